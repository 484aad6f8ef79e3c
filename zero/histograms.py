"""Histograms of weights and gradients by parameter, combined over the ranks by counts: nothing is gathered whole.

Each rank counts the elements of its own shards. The ranks of a stage agree on the range of each parameter and add up
their counts, over the replicas and over the tensor axis; then the stages tell the first one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..grid import Grid
from .bucket import Bucket
from .data_axis import ZeroDataAxis

_INFINITE = torch.inf


class CountedRange(NamedTuple):
    """Histogram of a tensor: counts of equal parts of the range from ``low`` to ``high``, and sums over its elements.

    Elements that are not finite are counted in ``not_finite`` alone.
    """

    low: float
    high: float
    counts: list[int]
    elements: int
    sum: float
    squares: float
    not_finite: int


def parameter_histograms(data_axis: ZeroDataAxis, grid: Grid, bins: int) -> dict[str, CountedRange]:
    """Return the histograms of all trained parameters, on the first rank of the grid; {} on others. Collective.

    The names are ``Weights/...`` and, after a step that was not skipped, ``Gradients/...`` with the gradients of the
    step, divided by the batch's weight and clipped.

    Args:
        data_axis: the parameters of this rank.
        grid: the grid of the ranks that took the step.
        bins: counts of each histogram.
    """
    parts = [(name, part) for bucket in data_axis.buckets if bucket.trained for name, part in _parts(bucket, grid)]
    weights = [(f"Weights/{name}", weights) for name, (weights, _) in parts]
    gradients = [(f"Gradients/{name}", gradients) for name, (_, gradients) in parts] if data_axis.stepped else []
    named = [(name, _finite(part)) for name, part in (*weights, *gradients)]
    rows: list[tuple[str, CountedRange]] = []
    if named:
        device, axes = grid.device, (data_axis.axis, grid.tensor)
        ends = [(float(x.min()), -float(x.max())) if x.numel() else (_INFINITE, _INFINITE) for _, (x, _) in named]
        ranges = torch.tensor(ends, dtype=torch.float64, device=device)
        for axis in axes:
            axis.all_reduce(ranges, op="min")
        bounds = [(low, -high) if math.isfinite(low) else (0.0, 0.0) for low, high in ranges.tolist()]
        counted = [_counts(*part, low, high, bins) for (_, part), (low, high) in zip(named, bounds, strict=True)]
        table = torch.stack(counted).to(device)
        for axis in axes:
            axis.all_reduce(table)
        for (name, _), (low, high), row in zip(named, bounds, table.tolist(), strict=True):
            counts, (elements, total, squares, lost) = [int(count) for count in row[:bins]], row[bins:]
            if elements or lost:  # a tied parameter is counted on its first stage
                rows.append((name, CountedRange(low, high, counts, int(elements), total, squares, int(lost))))
    if not (data_axis.axis.is_first and grid.tensor.is_first):
        return {}
    everywhere = grid.pipe.all_gather_json([(name, *row) for name, row in rows])
    return {name: CountedRange(*row) for rows in everywhere for name, *row in rows} if grid.pipe.is_first else {}


def _parts(bucket: Bucket, grid: Grid) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Yield for each parameter its name, and the elements of weights and gradients that this rank counts."""
    start, stop = bucket.owned
    weights, first = bucket.values()
    gradients = bucket.owned_gradient
    for slot, member in zip(bucket.flat.slots, bucket.members, strict=True):
        low, high = max(slot.start, start) - start, min(slot.stop, stop) - start
        once = bucket.counted and bucket.counts
        if low >= high or not once or not (member.layout.sharded or grid.tensor.is_first):
            low = high = 0
        here = weights[start - first :][low:high], gradients[low:high]
        yield member.layout.name, here
        bucket.memory.evict(*here)


def _finite(part: Tensor) -> tuple[Tensor, int]:
    """Return the finite elements of a tensor, at least in fp32, and the number of the others."""
    real = torch.view_as_real(part) if part.is_complex() else part
    wide = real.detach().reshape(-1).to(torch.promote_types(real.dtype, torch.float32))
    finite = wide.isfinite()
    return (wide, 0) if bool(finite.all()) else (wide[finite], int(finite.logical_not().sum()))


def _counts(x: Tensor, lost: int, low: float, high: float, bins: int) -> Tensor:
    """Return the counts of equal parts of a range, and number, sum and sum of squares of the elements, and ``lost``."""
    if low == high:  # all elements are equal: they are in the middle
        counts = torch.zeros(bins, dtype=torch.float64)
        counts[bins // 2] = x.numel()
    else:
        counts = torch.histc(x, bins, low, high).double().cpu()
    wide = x.double()
    sums = [float(x.numel()), float(wide.sum()), float(wide.square().sum()), float(lost)]
    return torch.cat([counts, torch.tensor(sums, dtype=torch.float64)])
