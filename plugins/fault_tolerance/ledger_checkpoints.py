"""The ledger in a checkpoint: a run that starts again takes the samples that follow, and those that are owed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...base.errors import AgreedError
from ...checkpoint.matching import Shape
from ...checkpoint.reader import LoadOptions
from ...checkpoint.snapshot import OUTER, WEIGHTS, Snapshot
from ...engine.snapshot.capture import all_parameters
from ...zero.state_shards import StateShards
from .membership import Ledger

if TYPE_CHECKING:
    from ...engine.base import Engine
    from .local_rounds import LocalRounds
    from .replicas import FaultTolerantReplicas


class LedgerCheckpoints:
    """Saves and loads the ledger with the checkpoints of a replica, which are whole checkpoints of the run.

    Args:
        engine: the engine.
        replicas: its replica strategy.
    """

    def __init__(self, engine: Engine, replicas: FaultTolerantReplicas) -> None:
        self._engine, self._replicas = engine, replicas

    def shards(self) -> StateShards:
        """Return this rank's shards of the weights and the optimizer state.

        With ZeRO over replicas it is collective: all replicas save or load after the same step.

        Raises:
            RuntimeError: a replica was lost meanwhile.
        """
        if (problem := self._replicas.hold_whole_state()) is not None:
            raise RuntimeError(
                f"the optimizer state is cut over the replicas, and was not gathered ({problem}): save on all replicas "
                "after the same step, and again after the next one"
            )
        return StateShards(self._engine.data_axis, all_parameters(self._engine), self._engine.grid)

    def add_to(self, snapshot: Snapshot) -> None:
        """Add nothing: the state is equal on all replicas."""

    def run_state(self) -> dict[str, Any]:
        """Return ``membership`` for the checkpoint's header."""
        return {"membership": self._replicas.ledger.state()}

    def require_loadable(self, snapshot: Snapshot, options: LoadOptions) -> None:
        """Check that the checkpoint says which samples follow.

        Raises:
            ValueError: it was not saved by a run with ``fault_tolerance``.
        """
        if not options.weights_only and not snapshot.header["run"].get("membership"):
            raise ValueError(
                "the checkpoint does not say which samples follow, because it was saved without fault_tolerance: load "
                "only its weights (load_module_only=True), or leave fault_tolerance out"
            )

    def restore(self, snapshot: Snapshot, options: LoadOptions, usable: Mapping[str, Shape]) -> list[str]:
        """Load the ledger. Returns no notes."""
        if not options.weights_only:
            self._replicas.record.ledger = Ledger.of(snapshot.header["run"]["membership"])
        if self._replicas.sharded is not None:
            self._replicas.sharded.take_whole()
        return []

    def may_save_after(self, step: int, every: int) -> bool:
        """Return True if this replica has the state of the run, which is gathered with ZeRO over replicas."""
        return self._replicas.may_save(step % every == 0)


class RoundCheckpoints(LedgerCheckpoints):
    """Saves and loads the ledger and the outer velocity between two rounds of local updates.

    Args:
        engine: the engine.
        rounds: its replica strategy.
    """

    def __init__(self, engine: Engine, rounds: LocalRounds) -> None:
        super().__init__(engine, rounds)
        self._rounds = rounds

    def add_to(self, snapshot: Snapshot) -> None:
        """Add the outer velocity.

        Raises:
            AgreedError: on every rank, within a round, when the replicas have different weights.
        """
        if self._rounds.since:
            raise AgreedError(
                f"a checkpoint was asked for {self._rounds.since} steps after the last outer step, when replicas have "
                f"different weights: save after a multiple of {self._rounds.batches} steps (local_updates.every)"
            )
        for part in self._rounds.velocity_ranges(mine=True):
            snapshot.add_range(f"{OUTER}/velocity/{part.name}", part, self._engine.grid)

    def restore(self, snapshot: Snapshot, options: LoadOptions, usable: Mapping[str, Shape]) -> list[str]:
        """Load the ledger and the outer velocity. Returns no notes."""
        self._rounds.restart()
        if not options.weights_only and options.optimizer:
            for part in self._rounds.velocity_ranges(mine=False):
                name = f"{OUTER}/velocity/{part.name}"
                if name in snapshot.tensors and f"{WEIGHTS}/{part.name}" in usable:
                    snapshot.tensors[name].read_range(part, self._engine.grid)
        return super().restore(snapshot, options, usable)

    def may_save_after(self, step: int, every: int) -> bool:
        """Return True after an outer step."""
        return self._rounds.since == 0
