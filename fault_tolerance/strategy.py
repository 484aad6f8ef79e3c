"""Replicas that come and go as the engine's replica strategy, which it finds by an entry point."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from ..grid import Grid
from .ledger_checkpoints import LedgerCheckpoints, RoundCheckpoints
from .local_rounds import LocalRounds
from .replicas import FaultTolerantReplicas

if TYPE_CHECKING:
    from ..engine.base import Engine


def step_grid(grid: Grid) -> Grid:
    """Return the grid of a step: the whole grid of this replica's processes."""
    return grid


def attach(engine: Engine, grid: Grid) -> tuple[FaultTolerantReplicas, LedgerCheckpoints]:
    """Return the replica strategy of a new engine, and what saves and loads its ledger.

    Each replica has a folder of its own for automatic checkpoints, ``replica-NAME`` in ``checkpoint.folder``.

    Args:
        engine: the engine, with its optimizer and ``options.fault_tolerance``.
        grid: the grid of this replica's processes.
    """
    assert engine.options.fault_tolerance is not None
    held: Engine = weakref.proxy(engine)  # which holds its replica strategy
    options, local = engine.options.fault_tolerance, engine.options.local_updates
    rounds = None if local is None else LocalRounds(held, grid, options, local)
    replicas = rounds or FaultTolerantReplicas(held, grid, options)
    folder = engine.options.checkpoint.folder
    if folder is not None:
        own = engine.options.checkpoint.changed(folder=f"{folder}/replica-{replicas.name}")
        engine.options = engine.options.changed(checkpoint=own)
    return replicas, LedgerCheckpoints(held, replicas) if rounds is None else RoundCheckpoints(held, rounds)
