"""What a step comes to over the whole grid: a few numbers, in one message."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..grid import Grid


def totals(grid: Grid, values: Sequence[Tensor | float]) -> list[float]:
    """Each value's sum over all ranks, in float64. Collective; it waits for the device once.

    Args:
        grid: over all of whose ranks is summed.
        values: 0-dim tensors or numbers; every rank has as many.
    """
    if grid.size == 1 and grid.device.type == "cpu":
        return [float(value) for value in values]
    sums = torch.stack([torch.as_tensor(value, dtype=torch.float64, device=grid.device) for value in values])
    grid.world.all_reduce(sums)
    found: list[float] = sums.tolist()
    return found


def number(value: Tensor) -> Tensor | float:
    """What a tensor of one element is now, in float64: a number, or on a GPU a tensor, so that nobody waits for it.

    Scripts reduce their losses in place, to print them: a view of one would change.
    """
    return float(value) if value.device.type == "cpu" else value.to(torch.float64, copy=True).reshape(())


def mean(grid: Grid, total: float, weight: float) -> Tensor:
    """``total / weight``, 0-dim float64 on the grid's device; not a number where nothing has a weight."""
    return torch.tensor(total / weight if weight else math.nan, dtype=torch.float64, device=grid.device)
