"""Measured figures of a machine, as ``triax machine measure`` writes them to its file: times of kernels by their size.

A table's rows are sizes followed by figures. Between the measured sizes the logarithm of a figure is interpolated, by
Shepard's method with the fourth power of the distance between the logarithms of the sizes (Shepard 1968).

Where ranks compute on the cores of the machine, the times are those of one process alone, in seconds of a core;
``plugins/plan/cores.py`` shares the cores among the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

Row = tuple[float, ...]
Table = tuple[Row, ...]


@dataclass(frozen=True)
class MeasuredTimes:
    """Times of a machine's kernels, collectives and of Python.

    Attributes:
        cores: processes that run at full speed at once, because the machine has as many cores (or as many times
            ``threads``), which all its ranks share; 0: each rank has a processor of its own.
        threads: threads of a process, with which everything was measured.
        crowding: (processes that compute at once, and the speed of all together over that of as many processes alone,
            but of no more than ``cores``).
        in_step: class of a block -> time of products, attention and kernels within a step over their time in a loop of
            their own, in which the caches hold more of their operands.
        products: dtype -> (m, k, n, and shares of the peak): forward (m, k) x (k, n), gradient of the inputs, gradient
            of the weights.
        attention: dtype -> (sequence, width of a head, and shares of the peak): forward, backward; causal operations.
        kernels: dtype -> kernel -> (elements, and seconds an element): forward, backward.
        optimizer: (parameters, seconds a parameter of AdamW).
        collectives: collective -> (ranks, bytes that a rank sends, seconds): seconds of a core, if they are shared.
        calls: axis (``tensor``, ``data``, ``context``, ``expert``) -> seconds of a collective within a layer beyond
            those in a loop, for Python and for the wait for other ranks.
        layers: class of a layer -> seconds of Python and the launch of kernels: forward, backward.
        microbatch: seconds of Python for a microbatch on a stage, beside its layers: forward, backward.
        step: seconds of Python for a step.
    """

    cores: int
    threads: int
    crowding: Table
    in_step: Mapping[str, float]
    products: Mapping[str, Table]
    attention: Mapping[str, Table]
    kernels: Mapping[str, Mapping[str, Table]]
    optimizer: Table
    collectives: Mapping[str, Table]
    calls: Mapping[str, float]
    layers: Mapping[str, Row]
    microbatch: Row
    step: float

    def product(self, dtype: str, m: float, k: float, n: float) -> Row:
        """Return the shares of the peak of a product, of the gradients of its inputs and of its weights."""
        return interpolated(self.products[dtype], (m, k, n))

    def attention_core(self, dtype: str, sequence: float, width: float) -> Row:
        """Return the shares of the peak of the core of attention, forward and backward."""
        return interpolated(self.attention[dtype], (sequence, width))

    def kernel(self, dtype: str, name: str, elements: float) -> tuple[float, float]:
        """Return the seconds of a kernel on so many elements, forward and backward."""
        forward, backward = interpolated(self.kernels[dtype][name], (max(1.0, elements),))
        return forward * elements, backward * elements

    def slowdown(self, name: str) -> float:
        """Return ``in_step`` of a block; of one that was not measured, the geometric mean of those that were."""
        return self.in_step.get(name) or math.prod(self.in_step.values()) ** (1 / len(self.in_step))

    def speed(self, processes: int) -> float:
        """Return the speed of each of so many processes that compute at once, over that of a process alone."""
        share = min(1.0, interpolated(self.crowding, (max(1, processes),))[0])
        return share * min(1.0, self.cores / max(1, processes)) if self.cores else 1.0

    def layer(self, name: str) -> Row:
        """Return the seconds of Python of a layer; of a block that was not measured, those of the slowest one."""
        return self.layers.get(name) or max(self.layers.values())

    def collective(self, name: str, ranks: int, sent: float) -> float:
        """Return the seconds of a collective in which each rank sends so many bytes.

        Linear between the measured bytes, and behind the last of them. Between numbers of ranks the logarithm is.
        """
        sizes: dict[float, list[tuple[float, float]]] = {}
        for number, size, seconds in self.collectives[name]:
            sizes.setdefault(number, []).append((size, seconds))
        table = tuple((number, _linear(points, sent)) for number, points in sizes.items())
        return interpolated(table, (ranks,))[0]


def _linear(points: Sequence[tuple[float, float]], x: float) -> float:
    """Return the value at x of the straight lines through points, given in order."""
    for (low, start), (high, stop) in pairwise(points):
        if x < high or (high, stop) == points[-1]:
            return max(start, start + (x - low) / (high - low) * (stop - start)) if x > low else start
    return points[0][1]


def interpolated(table: Table, sizes: Sequence[float]) -> Row:
    """Return the figures of a table at sizes between, or beyond, those of its rows.

    >>> interpolated(((1.0, 10.0), (4.0, 1000.0)), (2.0,))
    (100.0,)
    """
    count = len(sizes)
    wanted = [math.log(size) for size in sizes]
    total, sums = 0.0, [0.0] * (len(table[0]) - count)
    for row in table:
        distance = sum((math.log(size) - log) ** 2 for size, log in zip(row[:count], wanted, strict=True))
        if distance < 1e-12:
            return row[count:]
        weight = distance**-2
        total += weight
        sums = [a + weight * math.log(max(value, 1e-30)) for a, value in zip(sums, row[count:], strict=True)]
    return tuple(float(f"{math.exp(each / total):.12g}") for each in sums)
