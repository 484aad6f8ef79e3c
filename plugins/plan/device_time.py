"""Times of a machine's kernels in the precision of a run: the formulas of a roofline, or measured tables.

    ``measured`` None      a product takes the longer of its FLOPs and its bytes; other kernels their bytes
    measured               products, attention and kernels by tables, times ``slowdown`` within a step
    measured, ``on_cores`` the ranks share the cores, and the transport takes a core too, so that nothing hides it

Roofline: Williams et al. 2009. Tiles and waves: NVIDIA's guide to matrix multiplication.
"""

from __future__ import annotations

import math

from ...base.formulas import BYTES
from .work import Work


class DeviceTime:
    """Seconds of kernels on one rank.

    Args:
        work: model, machine, batch and sequence.

    Attributes:
        work, machine: the work and its machine.
        bytes: of an element of weights and activations.
        wide: bytes of an element of a gradient, in fp32 at least.
        peak: FLOP/s in the precision.
        narrow: the operands of the blocks' products have a dtype of their own, of one byte; product_peak: its FLOP/s.
        measured: measured tables, or None.
        on_cores: the ranks share the cores of one machine.
        slowdown: time of a kernel within a step, over its measured time in a loop of its own.

    Raises:
        ValueError: the machine was measured in other precisions, or its ranks share cores and have several speeds.
    """

    def __init__(self, work: Work) -> None:
        self.work, self.machine, self.measured = work, work.machine, work.machine.measured
        self.bytes = BYTES[work.precision]
        self.wide = max(4, self.bytes)
        self.peak = work.machine.peak_of(work.precision)
        self.narrow = work.products not in (None, work.precision)
        self.product_peak = work.machine.peak_of(work.products or work.precision)
        self.on_cores = self.measured is not None and self.measured.cores > 0
        block = next(layer.name for layer in work.layers if layer.kind == "block")
        self.slowdown = self.measured.slowdown(block) if self.measured is not None else 1.0
        if self.measured is not None and work.precision not in self.measured.products:
            raise ValueError(
                f"the machine {work.machine.name} was measured in {', '.join(self.measured.products)}, not in "
                f"{work.precision}. Give --precision with one of them."
            )
        if work.speeds and self.on_cores:
            raise ValueError("ranks that share cores cannot have different speeds. Leave --speeds out.")

    def product(self, m: int, k: int, n: int, calls: int = 1, output: float = 0, narrow: bool = False) -> float:
        """Return the seconds of ``calls`` products of an m x k and a k x n matrix, by formula.

        Args:
            m, k, n: sizes of the matrices.
            calls: number of products.
            output: bytes of an element of the result; by default those of the precision.
            narrow: the operands are of the dtype ``work.products``, with one byte an element.
        """
        machine = self.machine
        rows, columns = machine.tile
        tiles = math.ceil(m / rows) * math.ceil(n / columns) * calls
        full = m * n * calls / (tiles * rows * columns)  # share of the tiles that is used
        waves = math.ceil(tiles / machine.units) * machine.units / tiles
        peak = self.product_peak if narrow else self.peak
        compute = 2 * m * k * n * calls * waves / (peak * machine.product_efficiency * full)
        moved = ((1 if narrow else self.bytes) * (m * k + k * n) + (output or self.bytes) * m * n) * calls
        return max(compute, self.moved(moved))

    def moved(self, size: float) -> float:
        """Return the seconds in which elementwise kernels read and write so many bytes."""
        return size / self.machine.elementwise_speed

    def kernel(self, name: str, elements: float) -> tuple[float, float]:
        """Return the measured seconds of a kernel within a step, forward and backward."""
        assert self.measured is not None
        forward, backward = self.measured.kernel(self.work.precision, name, elements)
        return self.slowdown * forward, self.slowdown * backward

    def call(self, axis: str) -> float:
        """Return the measured seconds of a collective within a layer beyond those in a loop of its own."""
        return self.measured.calls.get(axis, 0.0) if self.measured is not None else 0.0
