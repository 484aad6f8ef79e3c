"""The ledger in a checkpoint: a run that starts again takes the samples that follow, and those that are owed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..checkpoint.matching import Shape
from ..checkpoint.protocol import Snapshot
from ..checkpoint.reader import LoadOptions
from ..engine.snapshot.capture import all_parameters
from ..zero.state_shards import StateShards
from .membership import Ledger

if TYPE_CHECKING:
    from ..engine.base import Engine
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
                "its weights alone (load_module_only=True), or leave fault_tolerance out"
            )

    def restore(self, snapshot: Snapshot, options: LoadOptions, usable: Mapping[str, Shape]) -> list[str]:
        """Load the ledger. Returns no notes."""
        if not options.weights_only:
            self._replicas.ledger = Ledger.of(snapshot.header["run"]["membership"])
        if self._replicas.shards is not None:
            self._replicas.shards.take_whole()
        return []

    def may_save_after(self, step: int, every: int) -> bool:
        """Return True if this replica has the state of the run, which is gathered with ZeRO over replicas."""
        return self._replicas.may_save(step % every == 0)
