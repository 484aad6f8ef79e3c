"""Checkpoints under local updates (local SGD, DiLoCo), where replicas have different weights between synchronizations.

weights/..., optimizer/...             state averaged over the replicas, from which any other run can continue
replica/00001/weights/..., ...         each replica's own state, with which as many replicas continue bit-identically
outer/common/..., outer/velocity/...   weights after the last synchronization, and the outer optimizer's momentum
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...checkpoint.matching import Shape
from ...checkpoint.reader import LoadOptions
from ...checkpoint.snapshot import OUTER, REPLICA, WEIGHTS, Snapshot
from ...engine.snapshot.capture import Checkpointed, add_tensors, all_parameters, optimizer_numbers, run_state
from ...engine.snapshot.restore import read_optimizer, read_weights, same_optimizer_state, set_optimizer, set_schedule
from ...zero.state_shards import StateShards
from .local_replicas import LocalReplicas
from .mean_state import MeanStateShards


class ReplicaCheckpoints:
    """Saves and loads the state of each replica in a checkpoint. Implements ``capture.ReplicaState``.

    Args:
        engine: the engine whose state is saved and loaded.
        local: the engine's replica strategy.
    """

    def __init__(self, engine: Checkpointed, local: LocalReplicas) -> None:
        self._engine: Checkpointed = weakref.proxy(engine)  # the engine holds this object
        self._local = local
        self._prefix = f"{REPLICA}/{local.grid.replica:05}"

    def shards(self) -> MeanStateShards:
        """Return the weights and optimizer state averaged over the replicas.

        ``async_diloco`` synchronizes first, so that all replicas' states in a checkpoint are of the same time.
        """
        if self._local.outer.asynchronous:
            self._local.synchronize()
        return self._mean()

    def _mean(self) -> MeanStateShards:
        engine, local = self._engine, self._local
        return MeanStateShards(engine.data_axis, all_parameters(engine), local.grid.full_grid, local.steps_since_sync)

    def _own(self) -> StateShards:
        return StateShards(self._engine.data_axis, all_parameters(self._engine), self._local.grid)

    def add_to(self, snapshot: Snapshot) -> None:
        """Add to a snapshot this replica's tensors, the numbers of its optimizer state, its schedule and loss scale.

        The schedules and loss scales of two replicas may differ, because each replica skips its own overflowed steps.
        """
        engine, local, prefix, own = self._engine, self._local, self._prefix, Snapshot()
        with local.reading() as grid:
            add_tensors(own, engine, self._own(), grid)
        for name, tensor in own.tensors.items():
            # After a synchronization, the replicas' weights are equal.
            if local.steps_since_sync or not name.startswith(f"{WEIGHTS}/"):
                snapshot.tensors[f"{prefix}/{name}"] = tensor
        kinds = {"velocity": local.outer.velocity, "common": local.outer.common if local.steps_since_sync else []}
        for kind, flats in kinds.items():
            for part in self._mean().flats(flats, True) if flats else ():
                snapshot.add_range(f"{OUTER}/{kind}/{part.name}", part, engine.grid)
        if engine.grid.tensor.is_first:
            numbers = optimizer_numbers(self._own())
            snapshot.numbers |= {f"{prefix}/{name}": state for name, state in numbers.items()}
        if local.grid.world.is_first:
            run = run_state(engine)
            kept = {key: run[key] for key in ("param_groups", "optimizer_entries", "lr_scheduler") if key in run}
            snapshot.numbers[prefix] = kept | run.get("loss_scaler", {})

    def run_state(self) -> dict[str, Any]:
        """Return ``local_updates`` for the checkpoint's header: counters, which are equal on every rank."""
        local = self._local
        counters = {
            "type": local.options.TYPE,
            "replicas": local.grid.replicas,
            "since": local.steps_since_sync,
            "parted": local.diverged,
            "steps": local.steps,
            "meetings": local.outer.synchronizations,
        }
        return {"local_updates": counters}

    def require_loadable(self, snapshot: Snapshot, options: LoadOptions) -> None:
        """Raise an error if replicas with different states would train synchronously after this load.

        Raises:
            ValueError: if the replicas have made local steps, the checkpoint is from before ``start_step``, and the
                state of the optimizers and schedules is not loaded.
        """
        step, start = snapshot.header["run"]["global_steps"], self._local.options.start_step
        if self._local.diverged and step < start and not (options.weights_only or self._loads_all(snapshot, options)):
            raise ValueError(
                f"the weights of {snapshot.source} cannot be loaded alone. It was saved at step {step}, before local "
                f"updates begin (start_step {start}), but the optimizers of these replicas have already made local "
                "updates. Load the states of the optimizer and of the schedule too"
            )

    def _loads_all(self, snapshot: Snapshot, options: LoadOptions) -> bool:
        """Return True if the state of optimizers and schedules is loaded from this snapshot."""
        return options.optimizer and options.schedule and same_optimizer_state(snapshot, self._engine)

    def restore(self, snapshot: Snapshot, options: LoadOptions, usable: Mapping[str, Shape]) -> list[str]:
        """Load each replica's own state, after the state averaged over the replicas was loaded. Collective.

        Only a checkpoint of as many replicas has a state for each replica of this run.

        Args:
            snapshot: the snapshot read from the checkpoint.
            options: which parts of the state to load.
            usable: name -> shape of the snapshot's weights and buffers that the model has.

        Returns:
            Notes for the log.
        """
        local = self._local
        local.outer.restart()
        local.steps_since_sync = 0
        saved = snapshot.header["run"].get("local_updates")
        if options.weights_only:
            return []
        loads_all = self._loads_all(snapshot, options)
        if saved is None:
            local.diverged = local.diverged and not loads_all
            return []
        notes = []
        same, parted = saved["replicas"] == local.grid.replicas, saved.get("parted", True)
        if local.steps_together and parted:
            same = False
            notes.append(
                "the replicas of the checkpoint had made local updates, but here they step together until "
                f"local_updates.start_step {local.options.start_step}: all continue from the mean of their states"
            )
        elif not same and saved["since"]:
            notes.append(
                f"the checkpoint has {saved['replicas']} replicas, {saved['since']} steps after a synchronization, and "
                f"this run has {local.grid.replicas}: all continue from the mean of their states"
            )
        if options.optimizer:
            self._read_outer(snapshot, "velocity", local.outer.velocity, usable)
        if same:
            self._read_outer(snapshot, "common", local.outer.common, usable)
            local.outer.start_round()
            self._read_own(snapshot, options, usable)
            local.steps_since_sync = saved["since"]
        if loads_all:
            local.diverged = same and parted
        local.steps, local.outer.synchronizations = saved["steps"], saved["meetings"]
        local.steps_restored, local.sent = saved["steps"], 0.0
        return notes

    def _read_outer(self, snapshot: Snapshot, kind: str, flats: list[Tensor], usable: Mapping[str, Shape]) -> None:
        for part in self._mean().flats(flats, False) if flats else ():
            name = f"{OUTER}/{kind}/{part.name}"
            if name in snapshot.tensors and f"{WEIGHTS}/{part.name}" in usable:
                snapshot.tensors[name].read_range(part, self._engine.grid)

    def _read_own(self, snapshot: Snapshot, options: LoadOptions, usable: Mapping[str, Shape]) -> None:
        engine, shards, own = self._engine, self._own(), snapshot.under(f"{self._prefix}/")
        read_weights(engine, shards, own, usable)
        kept = snapshot.numbers.get(self._prefix, {})
        if options.optimizer and same_optimizer_state(snapshot, engine):
            read_optimizer(shards, own, usable, engine.grid)
            set_optimizer(engine, kept)
            if engine.loss_scaler is not None and "scale" in kept:
                engine.loss_scaler.load_state_dict(kept)
        if options.schedule and "lr_scheduler" in kept:
            set_schedule(engine, kept)

    def may_save_after(self, step: int, every: int) -> bool:
        """Return True after a synchronization of the weights, and after every ``every``-th step.

        At other steps no checkpoint is saved and no signal is checked, because both would make the replicas wait.
        """
        return self._local.just_synchronized or step % every == 0
