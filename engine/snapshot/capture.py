"""Copies an engine's weights, optimizer state, buffers, counters and schedules into a ``Snapshot``.

``restore.py`` does the reverse. The files of this folder use an engine through the two protocols below.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...base import VERSION
from ...base.json_values import encode
from ...checkpoint.convert.formats import describe
from ...checkpoint.generator_states import random_states
from ...checkpoint.matching import Shape
from ...checkpoint.reader import LoadOptions
from ...checkpoint.snapshot import BUFFERS, OPTIMIZER, RANDOM, WEIGHTS, Snapshot
from ...grid import Grid, layout_of
from ...grid.layout import FlatRange
from ...options.engine import EngineOptions
from ...pipe.module import PipelineModule
from ...zero.data_axis import ZeroDataAxis
from ...zero.optimizer_entries import group_entries, own_entries
from ...zero.optimizer_kinds import is_known
from ...zero.shard_ranges import NamedParameter
from ...zero.state_shards import StateShards
from ..named_parameters import named_parameters
from ..optim.loss_scale import LossScaler
from . import residuals

GROUPS = "param_groups"  # key of the snapshot's numbers, by the number of a parameter group


class ReplicaState(Protocol):
    """Protocol: the methods with which checkpoints save and load what a replica strategy keeps.

    ``plugins/local_sgd/replica_checkpoints.py`` and ``plugins/fault_tolerance/ledger_checkpoints.py`` implement it.
    """

    def shards(self) -> StateShards:
        """Return the weights and optimizer state averaged over the replicas."""

    def add_to(self, snapshot: Snapshot) -> None:
        """Add to a snapshot the part of this replica's own state that this rank writes."""

    def run_state(self) -> dict[str, Any]:
        """Return the entries of the strategy in ``run`` of the checkpoint's header. They are equal on every rank."""

    def require_loadable(self, snapshot: Snapshot, options: LoadOptions) -> None:
        """Raise ValueError if replicas with different states would train synchronously after this load."""

    def restore(self, snapshot: Snapshot, options: LoadOptions, usable: Mapping[str, Shape]) -> list[str]:
        """Load each replica's own state after the state averaged over the replicas. Collective.

        Returns:
            Notes for the log.
        """

    def may_save_after(self, step: int, every: int) -> bool:
        """Return True if an automatic checkpoint may be saved, and a received SIGTERM handled, after this step.

        Args:
            step: number of steps so far.
            every: ``checkpoint.every``, the steps between two automatic checkpoints.
        """


class Checkpointed(Protocol):
    """Protocol: the attributes and methods of an engine that saving and loading a checkpoint use."""

    options: EngineOptions
    grid: Grid
    module: Any
    batch: Any
    global_steps: int
    lr_scheduler: Any
    training_dataloader: Any
    data_axis: ZeroDataAxis
    loss_scaler: LossScaler | None
    replica_state: ReplicaState | None
    kept_state: Snapshot

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer as users see it. None if the engine has no optimizer."""

    @property
    def global_samples(self) -> int:
        """Number of samples trained on so far."""

    def set_position(self, steps: int, samples: int) -> None:
        """Set the counters of steps and samples, and discard the gradients of an unfinished step."""

    def settings(self, given: bool = False) -> dict[str, Any]:
        """Return the options as the user wrote them, ready for JSON."""


@torch.no_grad()
def capture(engine: Checkpointed, tag: str, client_state: Mapping[str, Any], exclude_frozen: bool = False) -> Snapshot:
    """Return a snapshot of an engine's state. On each rank it has the part of the state that this rank writes.

    The snapshot's tensors are views of the engine's tensors, without a copy.

    Args:
        engine: the engine, between two steps.
        tag: the checkpoint's name.
        client_state: the user's own values to save with the checkpoint.
        exclude_frozen: leave out the parameters that are not trained.

    Raises:
        TypeError: if the client state, the optimizer or the dataloader has a value that JSON cannot hold.
    """
    shards = state_shards(engine)
    header: dict[str, Any] = {
        "tag": tag,
        "step": engine.global_steps,
        "written": time.time(),
        "versions": {"triax": VERSION, "torch": torch.__version__},
        "grid": engine.grid.topology.sizes,
        "config": engine.settings(given=True),
        "dtype": str(engine.data_axis.options.weight_dtype or "").removeprefix("torch.") or None,
        "model": describe(engine.module),
        "run": run_state(engine),
    }
    snapshot = Snapshot(header=header, after_write=shards.data_axis.memory.evict)
    add_tensors(snapshot, engine, shards, engine.grid)
    for name, state in random_states(engine.grid).items():
        snapshot.add(f"{RANDOM}/{name}/{engine.grid.rank:05}", state)
    if engine.grid.data.is_first and engine.grid.context.is_first and engine.grid.tensor.is_first:
        snapshot.numbers = optimizer_numbers(shards)
        if engine.optimizer is not None and not is_known(type(shards.stepper.optimizer)):
            # The first rank writes the header, but may have no parameters of a group, and may have counted no steps.
            groups = enumerate(zip(engine.optimizer.param_groups, header["run"]["param_groups"], strict=True))
            snapshot.numbers |= {f"{GROUPS}/{number}": own for number, (group, own) in groups if group["params"]}
    if engine.replica_state is not None:
        engine.replica_state.add_to(snapshot)
    if exclude_frozen:
        _remove_frozen(snapshot, shards)
    else:
        snapshot.tensors |= engine.kept_state.tensors
        snapshot.numbers = {**snapshot.numbers, **engine.kept_state.numbers}
    snapshot.set_client_state(client_state, add_tensors=engine.grid.rank == 0)
    return snapshot


@torch.no_grad()
def capture_weights(engine: Checkpointed, exclude_frozen: bool = False) -> Snapshot:
    """Return a snapshot of an engine's weights and buffers only, with the part that this rank writes."""
    shards, snapshot = state_shards(engine), Snapshot()
    add_tensors(snapshot, engine, shards, engine.grid)
    snapshot.tensors = {n: whole for n, whole in snapshot.tensors.items() if n.partition("/")[0] in (WEIGHTS, BUFFERS)}
    if exclude_frozen:
        _remove_frozen(snapshot, shards)
    return snapshot


def state_shards(engine: Checkpointed) -> StateShards:
    """Return this rank's shards of an engine's weights and optimizer state."""
    if engine.replica_state is not None:
        return engine.replica_state.shards()
    return StateShards(engine.data_axis, all_parameters(engine), engine.grid)


def all_parameters(engine: Checkpointed) -> list[NamedParameter]:
    """Return this rank's parameters: the module's, and those that the optimizer alone has."""
    by_parameter = {entry.parameter: entry for entry in named_parameters(engine.module)}
    for bucket in engine.data_axis.buckets:
        for member in bucket.members:
            by_parameter.setdefault(member.parameter, NamedParameter(member.parameter, member.layout, True))
    return [*by_parameter.values()]


def _remove_frozen(snapshot: Snapshot, shards: StateShards) -> None:
    """Remove from a snapshot the weights of parameters that are not trained."""
    for named in shards.parameters:
        if not named.parameter.requires_grad:
            snapshot.tensors.pop(f"{WEIGHTS}/{named.layout.name}", None)


def buffers(module: nn.Module, rank: int) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield a module's persistent buffers.

    Args:
        module: the module.
        rank: this rank's position on the pipe axis.

    Yields:
        Name in the whole model, buffer, and True if this position of the pipe axis writes the buffer to the checkpoint.
    """
    if not isinstance(module, PipelineModule):
        yield from ((name, buffer, True) for name, buffer in _persistent(module))
        return
    for source, prefix, layer in module.named_layers():
        stage = min(bisect.bisect_right(module.boundaries, source), len(module.placement)) - 1
        for name, buffer in _persistent(layer):
            yield f"{prefix}.{name}", buffer, module.placement[stage] == rank


def _persistent(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    known = module.state_dict(keep_vars=True)
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in known)


def add_tensors(snapshot: Snapshot, engine: Checkpointed, shards: StateShards, grid: Grid) -> None:
    """Add to a snapshot the tensors that this rank writes: shards of weights, optimizer state, residuals, buffers.

    Over all ranks of ``grid``, each element of the model is written once.
    """
    for shard_range in shards.values(mine=True):
        snapshot.add_range(f"{WEIGHTS}/{shard_range.name}", shard_range, grid)
    for key, shard_range in shards.states():
        snapshot.add_range(f"{OPTIMIZER}/{key}/{shard_range.name}", shard_range, grid)
    for name, shard_range in residuals.ranges(grid, shards):
        snapshot.add_range(name, shard_range, grid)
    for name, value in residuals.whole_tensors(grid, shards):
        snapshot.add(name, value)
    for name, key, value in shards.stepper.odd_shaped_state(shards.ranges):
        snapshot.add(f"{OPTIMIZER}/{key}/{name}", value)
    for name, buffer, writes in buffers(engine.module, grid.pipe.rank):
        if writes and grid.data_context.is_first and (layout_of(buffer).sharded or grid.tensor.is_first):
            layout, flat = layout_of(buffer), buffer.detach().contiguous().view(-1)
            snapshot.add_range(f"{BUFFERS}/{name}", FlatRange(name, layout, 0, flat.numel(), flat), grid)


def optimizer_numbers(shards: StateShards) -> dict[str, Any]:
    """Return the plain numbers (no tensors) of each parameter's optimizer state, by parameter name, for JSON."""
    return {name: encode(state, None, f"the optimizer's state of {name}") for name, state in shards.scalars().items()}


def run_state(engine: Checkpointed) -> dict[str, Any]:
    """Return the run's counters, optimizer options and schedules for JSON. They are equal on every rank."""
    scaler, schedule, loader = engine.loss_scaler, engine.lr_scheduler, engine.training_dataloader
    state: dict[str, Any] = {
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "train_batch_size": engine.batch.train,
        "seed": engine.options.seed,
        **residuals.numbers(engine.grid, engine.data_axis),
    }
    if engine.optimizer is not None:
        inner = engine.data_axis.stepper.optimizer
        state["optimizer"] = type(inner).__name__
        state["param_groups"] = encode(group_entries(engine.optimizer), None, "optimizer.param_groups")
        if own := own_entries(inner):
            state["optimizer_entries"] = encode(own, None, f"{type(inner).__name__}.state_dict()")
    if scaler is not None:
        state["loss_scaler"] = scaler.state_dict()
    if schedule is not None:
        state["lr_scheduler"] = {
            "type": type(schedule).__name__,
            "state": encode(schedule.state_dict(), None, f"the state of {type(schedule).__name__}"),
        }
    if engine.replica_state is not None:
        state |= engine.replica_state.run_state()
    if hasattr(loader, "state_dict"):
        state["loader"] = encode(loader.state_dict(), None, "the state of training_dataloader")
    return state
