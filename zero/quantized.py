"""qgZ: gradients reduce-scattered as blocks of 4 bits, by all-to-all. Wang et al. 2023 (arXiv:2306.10209).

A ring would round what it has added up at each of its steps. Here every rank sends each other one its part of that
one's range, in blocks of 4 bits, and whoever owns the range adds up floats:

    1 hop      rank r has the parts of all N ranks, and their sum: each rounded once
    2 hops     within a host of L ranks first: of each range that is another host's business too, the one of them whose
               place it is has the sum of the host's parts. Between the hosts then travels one part a host, in blocks of
               4 bits again: 1/L of what one hop sends there.

What a rank has itself is not rounded. Sums are in fp32 (float64 of float64), in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from ..grid import Axis, Grid, Pending
from .blocks import pack, packed_bytes, scale_dtype, unpack
from .buckets import Bucket
from .plus import inner, outer, ranks_per_host

BITS = 4


class Then:
    """Something under way, and what to do when it has arrived."""

    def __init__(self, pending: Pending, then: Callable[[], object]) -> None:
        self._pending, self._then = pending, then

    def wait(self) -> None:
        self._pending.wait()
        self._then()


class QuantizedReduction:
    """The data axis, to buckets: as ever, but for its reduce-scatter.

    Args:
        axis: of all replicas.
        within, between: the ranks of this host, and those at this rank's place on the hosts; None: one hop.
    """

    def __init__(self, axis: Axis, within: Axis | None, between: Axis | None) -> None:
        self._axis, self._within, self._between = axis, within, between
        self.size, self.rank = axis.size, axis.rank

    def reduce_scatter(self, output: Tensor, tensor: Tensor, async_op: bool = False) -> Pending:
        """See ``Axis.reduce_scatter``. With two hops the second one begins, and ends, where this is waited for."""
        parts = tensor.view(self.size, 1, -1)
        if self._within is None or self._between is None:
            hop = _Hop(self._axis, parts)
            pending = Then(hop, lambda: output.copy_(hop.sum()[0]))
        else:
            # Rank h L + l is number l on host h, and has that range: (H, L, n) -> to each l, all its hosts' (L, H, n).
            hop = _Hop(self._within, parts.view(self._between.size, self._within.size, -1).transpose(0, 1))
            pending = Then(hop, lambda: self._second(hop.sum(), output))
        if not async_op:
            pending.wait()
        return pending

    def _second(self, sums: Tensor, output: Tensor) -> None:
        assert self._between is not None
        hop = _Hop(self._between, sums.unsqueeze(1))
        hop.wait()
        output.copy_(hop.sum()[0])

    def sent(self, numel: int, dtype: torch.dtype) -> dict[str, float]:
        """Bytes that this rank sends to reduce-scatter so many elements: the axis's name -> bytes."""
        row = packed_bytes(numel // self.size, BITS, dtype)
        if self._within is None or self._between is None:
            return {self._axis.name: (self.size - 1) * row}
        hosts = self._between.size
        return {self._within.name: (self._within.size - 1) * hosts * row, self._between.name: (hosts - 1) * row}

    def all_reduce(self, tensor: Tensor, op: str = "sum", async_op: bool = False) -> Pending:
        """The axis's own; so are the others."""
        return self._axis.all_reduce(tensor, op, async_op)

    def all_gather(self, output: Tensor, tensor: Tensor, async_op: bool = False) -> Pending:
        """See above."""
        return self._axis.all_gather(output, tensor, async_op)

    def broadcast(self, tensor: Tensor, source: int = 0, async_op: bool = False) -> Pending:
        """See above."""
        return self._axis.broadcast(tensor, source, async_op)


class _Hop:
    """Parts on their way to those who add them up: to each rank of an axis its own, in blocks of 4 bits.

    Args:
        axis: whose ranks send and receive.
        parts: (size, rows, n): the first dim says to whom.
    """

    def __init__(self, axis: Axis, parts: Tensor) -> None:
        self._axis, self._own, self._dtype = axis, parts[axis.rank], parts.dtype
        size, rows, numel = parts.shape
        sent = torch.empty(size, rows, packed_bytes(numel, BITS, parts.dtype), dtype=torch.uint8, device=parts.device)
        for others in _others(axis):
            if others.start < others.stop:
                sent[others] = pack(parts[others], BITS)
        self._received = torch.empty_like(sent)
        self._pending = axis.all_to_all(self._received, sent, async_op=True)

    def wait(self) -> None:
        self._pending.wait()

    def sum(self) -> Tensor:
        """(rows, n): what came and what was here, in the dtype of scales."""
        numel, wide = self._own.shape[-1], scale_dtype(self._dtype)
        total = self._own.to(wide, copy=True)
        for others in _others(self._axis):
            for rank in range(others.start, others.stop):
                total += unpack(self._received[rank], numel, BITS, self._dtype)
        return total


def _others(axis: Axis) -> tuple[slice, slice]:
    return slice(0, axis.rank), slice(axis.rank + 1, axis.size)


def quantize_reductions(buckets: Sequence[Bucket], grid: Grid, host: int) -> None:
    """From here on these buckets reduce-scatter in blocks of 4 bits. Collective.

    Args:
        buckets: sharded ones.
        grid: whose data axis they are reduced over.
        host: how many consecutive replicas are on a host; 1: found out.
    """
    host = host if host > 1 else ranks_per_host(grid)
    hops: tuple[Axis, Axis] | tuple[None, None] = (None, None)
    if 1 < host < grid.data.size:
        hops = inner(grid, host, " reduce"), outer(grid, host, " reduce")
    axis = QuantizedReduction(grid.data, *hops)
    for bucket in buckets:
        bucket._axis = cast(Axis, axis)
