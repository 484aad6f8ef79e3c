"""Time that the slowest replica of a step takes longer than the mean, by the documents that each one has.

A document of L tokens costs L + L^2 / scale (data/balance.py), so rows of as many tokens differ in work. A replica runs
its microbatches one after another, and the stages of its pipeline wait for the longest one while they fill and drain.
With w the work of a microbatch over the mean, and b the bubble in mean microbatches, a replica takes the time of

    (sum of its w) + b * (its largest w)        instead of        m + b

The sum is exact for stages that take the same time and forward passes alone (a flow shop with proportional times:
Pinedo 2016, chapter 6). For training schedules tests compare it with simulations.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property

import numpy as np

from ...data.balance import deal
from ...data.mixture import Rows
from ...data.packing import Pieces
from ...data.token_file import Array
from .layer_shapes import LayerShape
from .parallel_layout import ParallelLayout

STEPS = 8  # steps whose documents are read


class Imbalance:
    """Work of the replicas and microbatches of a run's first steps, by their documents.

    Args:
        rows: the rows that the run trains on.
        batch: rows of a step.
        layers: the model's layers.
        balanced: ``batch.balance`` deals the documents of a step out by their work.
    """

    def __init__(self, rows: Rows, batch: int, layers: Sequence[LayerShape], balanced: bool) -> None:
        self._rows, self._batch, self._balanced = rows, batch, balanced
        self._scale = attention_scale(layers)
        self._work = cache(self._work_of)

    def factor(self, layout: ParallelLayout, bubble: float) -> float:
        """Return the time of the slowest replica's passes over that of replicas with equal microbatches.

        Args:
            layout: the layout.
            bubble: idle time of the schedule, in microbatches.
        """
        m = layout.microbatches(self._batch)
        work = self._work(self._batch // (m * layout.microbatch), m)
        return float(((work.sum(-1) + bubble * work.max(-1)).max(-1) / (m + bubble)).mean())

    def _work_of(self, replicas: int, m: int) -> Array:
        """Return the work of each microbatch over the step's mean: (steps, replicas, m)."""
        steps = [self._dealt(step, replicas, m) if self._balanced else self._in_order(step) for step in self._steps]
        work = np.array(steps).reshape(STEPS, replicas, m, -1).sum(-1)
        return work / work.mean((1, 2), keepdims=True)

    def _in_order(self, step: Sequence[Pieces]) -> list[float]:
        """Return the work of each row of a step. Padding counts as a document, since it is computed as one."""
        return [self._cost(row.sizes).sum() for row in step]

    def _dealt(self, step: Sequence[Pieces], replicas: int, m: int) -> list[float]:
        """Return the work of each microbatch of a step whose documents are dealt out."""
        sizes = np.concatenate([row.sizes[row.last > 0] for row in step])
        costs = self._cost(sizes)
        return [costs[documents].sum() for documents in deal(sizes, self._scale, replicas, m)]

    @cached_property
    def _steps(self) -> list[list[Pieces]]:
        """The documents of each row of the first steps."""
        rows = [pieces for row in range(STEPS * self._batch) for _, pieces in self._rows.pieces(row, 1)]
        return [rows[first : first + self._batch] for first in range(0, len(rows), self._batch)]

    def _cost(self, sizes: Array) -> Array:
        return sizes + sizes.astype(np.float64) ** 2 / self._scale


def attention_scale(layers: Sequence[LayerShape]) -> float:
    """Return the tokens at which a document's attention costs as much as its other work, as ``balance_of`` does."""
    weights = channels = 0.0
    for layer in layers:
        weights += sum(product.inputs * product.outputs * product.times for product in layer.products)
        if layer.attention is not None:
            width, window = layer.attention.heads * layer.attention.value_dim, layer.attention.window
            weights += 2 * width * (window or 0)
            channels += 0 if window else width
    return weights / channels if channels else np.inf
