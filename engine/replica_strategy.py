"""Replica strategy of synchronous data parallelism, and the base class of others, which plugins bring."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..grid import Grid


class SynchronousReplicas:
    """Replica strategy of data parallelism: gradients are summed in every step, so weights are always equal.

    Args:
        grid: the engine's grid.

    Attributes:
        just_synchronized: always False here. Local updates set it to True after a synchronization of weights.
        contributing: number of grids whose batches were in the last step, 1 without ``fault_tolerance``.
    """

    just_synchronized = False
    contributing = 1

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    @property
    def collective_grid(self) -> Grid:
        """Grid for collectives of the whole run, such as an evaluation or a table of times."""
        return self.grid

    @property
    def leads(self) -> bool:
        """True if this replica prints what is equal on all replicas; always without ``fault_tolerance``."""
        return True

    @property
    def present(self) -> list[int]:
        """Indices of the replicas that have not left the training. In this strategy these are all replicas."""
        return list(range(self.grid.replicas))

    def share(self, numbers: Sequence[float]) -> list[float]:
        """Return the sums of numbers over replicas outside of the grid. This strategy has no such replicas."""
        return [*numbers]

    def stepping(self) -> AbstractContextManager[Grid]:
        """Context for a training step; yields the grid whose ranks take the step together."""
        return nullcontext(self.grid)

    def evaluating(self) -> AbstractContextManager[Grid]:
        """Context for an evaluation; yields the grid over which the loss is summed."""
        return nullcontext(self.grid)

    def reading(self) -> AbstractContextManager[Grid]:
        """Context in which weights or gradients are read; yields the grid whose replicas have equal weights."""
        return nullcontext(self.grid)

    def synchronize(self) -> None:
        """Do nothing, because the replicas' weights are always equal in this strategy."""

    def leave(self) -> bool:
        """Return True: replicas that take every step together also end together."""
        return True

    def common_weights(self) -> AbstractContextManager[None]:
        """Context in which the model has the weights of the last synchronization, here its present weights."""
        return nullcontext()

    def traffic(self) -> dict[str, Any]:
        """Return additional entries for ``traffic_report``. This strategy has none."""
        return {}

    def memory(self) -> dict[str, int]:
        """Return the bytes held for the strategy, by name, for ``memory_report``. This strategy holds none."""
        return {}
