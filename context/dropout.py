"""Dropout of activations whose tokens lie on the ranks of the context axis, with the masks of one process."""

from __future__ import annotations

from torch import Tensor

from ..grid import Grid
from ..grid.randomness.random import Dropout
from .order import positions


def dropout(p: float, grid: Grid, sequence_parallel: bool, columns: tuple[Tensor, int] | None = None) -> Dropout:
    """Return a dropout layer for activations whose tokens are spread over the context axis.

    With ``sequence_parallel`` each rank's tokens are spread further, over the tensor axis. ``columns`` is that of
    ``Dropout``, for activations whose last dim the tensor axis shards.
    """
    tensor, context = grid.tensor if sequence_parallel else None, grid.context
    if context.size == 1:
        return Dropout(p, axis=tensor, columns=columns)

    def rows(count: int) -> Tensor:
        local = count if tensor is None else count * tensor.size
        held = positions(local * context.size, context.size, context.rank, local)
        return held if tensor is None else held.chunk(tensor.size)[tensor.rank]

    return Dropout(p, rows=rows, columns=columns)
