"""Local updates as the engine's replica strategy, which it finds by an entry point of ``triax.replica_strategies``."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from ...base.dtypes import dtype_of
from ...grid import Grid
from .local_replicas import LocalReplicas
from .replica_checkpoints import ReplicaCheckpoints
from .replica_grid import ReplicaGrid

if TYPE_CHECKING:
    from ...engine.base import Engine


def step_grid(grid: Grid) -> ReplicaGrid:
    """Return the grid on which a replica steps alone. Collective over the grid."""
    return ReplicaGrid(grid)


def attach(engine: Engine, grid: ReplicaGrid) -> tuple[LocalReplicas, ReplicaCheckpoints]:
    """Return the replica strategy of a new engine, and what saves and loads each replica's state.

    Args:
        engine: the engine, with its optimizer and ``options.local_updates``.
        grid: the grid of ``step_grid``.
    """
    assert engine.options.local_updates is not None
    held: Engine = weakref.proxy(engine)  # which holds its replica strategy
    replicas = LocalReplicas(
        engine.options.local_updates,
        grid,
        engine.data_axis,
        engine.optimizer,
        engine.lr_scheduler,
        dtype_of(engine.options.reduction.dtype),
        lambda: int(held.global_steps),
    )
    return replicas, ReplicaCheckpoints(engine, replicas)
