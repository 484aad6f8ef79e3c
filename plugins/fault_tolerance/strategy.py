"""Replicas that come and go as the engine's replica strategy, which it finds by an entry point."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from ...grid import Grid
from .ledger_checkpoints import LedgerCheckpoints, RoundCheckpoints
from .local_rounds import LocalRounds
from .replicas import FaultTolerantReplicas

if TYPE_CHECKING:
    from ...engine.base import Engine


def step_grid(grid: Grid) -> Grid:
    """Return the grid of a step: the whole grid of this replica's processes."""
    return grid


def attach(engine: Engine, grid: Grid) -> tuple[FaultTolerantReplicas, LedgerCheckpoints]:
    """Return the replica strategy of a new engine, and what saves and loads its ledger.

    Each replica has folders of its own for automatic checkpoints and what the monitors write: ``replica-NAME`` in
    ``checkpoint.folder`` and in the folders of ``monitor``.

    Args:
        engine: the engine, with its optimizer and ``options.fault_tolerance``.
        grid: the grid of this replica's processes.
    """
    assert engine.options.fault_tolerance is not None
    held: Engine = weakref.proxy(engine)  # which holds its replica strategy
    faults, local = engine.options.fault_tolerance, engine.options.local_updates
    rounds = None if local is None else LocalRounds(held, grid, faults, local)
    replicas = rounds or FaultTolerantReplicas(held, grid, faults)
    for section, keys in {"checkpoint": ("folder",), "monitor": ("json", "tensorboard", "csv")}.items():
        given = getattr(engine.options, section)
        found = {key: getattr(given, key) for key in keys if isinstance(getattr(given, key), str)}
        own = given.changed(**{key: faults.own(folder, replicas.name) for key, folder in found.items()})
        engine.options = engine.options.changed(**{section: own})
    return replicas, LedgerCheckpoints(held, replicas) if rounds is None else RoundCheckpoints(held, rounds)
