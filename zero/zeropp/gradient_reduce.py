"""qgZ: reduce-scatter of gradients quantized to 4 bits, by all-to-all. Wang et al. 2023 (arXiv:2306.10209).

A ring would round its partial sums at each of its steps. Here every rank owns one range of the gradients. Each rank
quantizes its gradients of that range to 4 bits and sends them to the owner, which dequantizes and sums them:

    1 hop      rank r receives its range from all N ranks and sums it. Each gradient is rounded once
    2 hops     the first hop is within a host of L ranks: the rank with local rank l sums the gradients of this host
               for the ranges that the ranks with local rank l own on all hosts. The second hop is between hosts: each
               host quantizes its sum to 4 bits again and sends it to the owner, which takes 1/L of the bytes that one
               hop sends between hosts

The gradients that a rank keeps for its own range are not rounded. Sums are computed in fp32 (float64 for float64), in
a fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...grid import Axis
from ...grid.comm.pending import Pending, Then, started
from .blocks import pack, packed_bytes, scale_dtype, unpack

BITS = 4


class QuantizedReduction:
    """Reduce-scatter over the data axis of tensors quantized to 4 bits.

    Args:
        axis: the axis of all replicas.
        within: the axis of the ranks of this host; None means one hop.
        between: the axis of the ranks that have this rank's local rank on each host; None means one hop.
    """

    def __init__(self, axis: Axis, within: Axis | None, between: Axis | None) -> None:
        self._axis, self._within, self._between = axis, within, between
        self._size = axis.size

    def reduce_scatter(self, output: Tensor, tensor: Tensor, async_op: bool = False) -> Pending:
        """Sum ``tensor`` (size * n,) over the ranks, and write the range of this rank to ``output`` (n,).

        With two hops, the second hop runs within ``wait`` of the returned ``Pending``.
        """
        parts = tensor.view(self._size, 1, -1)
        if self._within is None or self._between is None:
            hop = _Hop(self._axis, parts)
            pending = Then(hop, lambda: output.copy_(hop.sum()[0]))
        else:
            # Rank h L + l, at place l on host h, owns range h L + l: (H, L, n) -> (L, H, n), part l is sent to place l.
            hop = _Hop(self._within, parts.view(self._between.size, self._within.size, -1).transpose(0, 1))
            pending = Then(hop, lambda: self._second(hop.sum(), output))
        return started(pending, async_op)

    def _second(self, sums: Tensor, output: Tensor) -> None:
        assert self._between is not None
        hop = _Hop(self._between, sums.unsqueeze(1))
        hop.wait()
        output.copy_(hop.sum()[0])

    def sent(self, numel: int, dtype: torch.dtype) -> dict[str, float]:
        """Return the bytes that this rank sends to reduce-scatter ``numel`` elements: axis name -> bytes."""
        row = packed_bytes(numel // self._size, BITS, dtype)
        if self._within is None or self._between is None:
            return {self._axis.name: (self._size - 1) * row}
        hosts = self._between.size
        return {self._within.name: (self._within.size - 1) * hosts * row, self._between.name: (hosts - 1) * row}


class _Hop:
    """A running all-to-all of tensors quantized to 4 bits, and the sum of the received tensors.

    Args:
        axis: the axis whose ranks send and receive.
        parts: (size, rows, n), of which part r is sent to rank r.
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
        """Return the sum of the received parts and this rank's own part, (rows, n), in the dtype of the scales."""
        numel, wide = self._own.shape[-1], scale_dtype(self._dtype)
        total = self._own.to(wide, copy=True)
        for others in _others(self._axis):
            for rank in range(others.start, others.stop):
                total += unpack(self._received[rank], numel, BITS, self._dtype)
        return total


def _others(axis: Axis) -> tuple[slice, slice]:
    return slice(0, axis.rank), slice(axis.rank + 1, axis.size)
