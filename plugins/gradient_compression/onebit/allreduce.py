"""Compressed all-reduce of 1-bit Adam: the mean of a tensor over the replicas, one bit an element in each direction.

Tang et al. 2021, arXiv:2102.02888, section 4 and algorithm 1. Each rank is a worker, and the server of 1/N of the
elements:

1. A worker adds its error of the last call to its tensor, sends each server its part (one bit an element, one scale a
   chunk), and keeps the new compression error.
2. A server averages the parts that it received, adds its own error of the last call, compresses again, and sends the
   result to all workers; it keeps the new compression error.

A bit is a sign. The scale preserves the 2-norm of a chunk of d elements: C(x) = |x|_2 / sqrt(d) * sign(x). (Lu et al.
2022 use |x|_1 / d, which is nearer to x but a fifth shorter; docs/onebit.md measures the difference.) A chunk is the
part of one parameter that one server has.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ....base.torch_private import norms_of_all
from ....grid import Axis

_BITS = 8


def pack(signs: Tensor) -> Tensor:
    """Pack booleans (rows, n), n a multiple of 8, to bytes (rows, n / 8).

    Bit k of a row's byte j is its element k n/8 + j, so that all operations are on contiguous memory.
    """
    rows, n = signs.shape
    bits = signs.view(torch.uint8).view(rows, _BITS, n // _BITS)
    packed = bits[:, 0].clone()
    for k in range(1, _BITS):
        packed |= bits[:, k] << k
    return packed


def unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Unpack the signs that ``pack`` packed, (rows, n / 8) -> (rows, n): 1 and -1."""
    rows, size = packed.shape
    signs = torch.empty(rows, _BITS, size, dtype=dtype, device=packed.device)
    for k in range(_BITS):
        signs[:, k] = (packed >> k) & 1
    return signs.view(rows, -1).mul_(2).sub_(1)


class OneBitMean:
    """Compressed mean over an axis of flat tensors of one layout. The caller keeps the compression errors.

    Args:
        axis: the axis whose ranks have one tensor each; all ranks make and call it, in the same order.
        numel: number of elements of a tensor, a multiple of 8 times the axis's size.
        spans: (start, stop) of each parameter in it, in order. Elements between them are 0 and stay 0.
        device: device of the tensors.
        means: compress a chunk to two values, the means of its elements of either sign (Seide et al. 2014), in place of
            one scale. The error is never longer than the tensor, also of sparse ones.

    Attributes:
        part: start and stop of the elements of which this rank is the server.
    """

    def __init__(
        self, axis: Axis, numel: int, spans: Sequence[tuple[int, int]], device: torch.device, means: bool = False
    ) -> None:
        self._axis, size = axis, numel // axis.size
        self._values = 2 if means else 1  # that each chunk is compressed to
        if size * axis.size != numel or size % _BITS:
            raise ValueError(f"{numel} elements are not a multiple of {_BITS} bits times {axis.size} ranks")
        self.part = (axis.rank * size, (axis.rank + 1) * size)
        cuts = sorted({0, numel, *(at for span in spans for at in span), *range(0, numel, size)})
        chunks = [(a, b) for a, b in pairwise(cuts) if a < b]
        self._lengths = [b - a for a, b in chunks]
        self._each = torch.tensor(self._lengths, device=device)
        real = [any(a >= start and b <= stop for start, stop in spans) for a, b in chunks]
        # Chunks whose scales are sent to, and received from, each rank: rows of one length, padded with
        # ``len(chunks)``.
        rows: list[list[int]] = [[] for _ in range(axis.size)]
        for number, ((a, _), whole) in enumerate(zip(chunks, real, strict=True)):
            if whole:
                rows[a // size].append(number)
        self._most = max(1, *(len(row) for row in rows))
        filled = [[*row, *[len(chunks)] * (self._most - len(row))] for row in rows]
        self._rows = torch.tensor(filled, device=device)  # (ranks, most)
        mine = [number for number, (a, _) in enumerate(chunks) if a // size == axis.rank]
        self._mine = slice(mine[0], mine[-1] + 1)

    def bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes that this rank sends in one call: as a worker and as a server, bits and scales."""
        size = self.part[1] - self.part[0]
        return 2 * (self._axis.size - 1) * (size // _BITS + self._most * self._values * dtype.itemsize)

    def __call__(self, own: Tensor, server: Tensor, alive: Tensor) -> Tensor:
        """Return the compressed mean, (numel,), equal on every rank. Collective.

        Args:
            own: (numel,), this rank's tensor plus its worker error; takes the new worker error.
            server: (part,), the error of this rank as a server; takes the new one.
            alive: (numel,), 1 and 0, equal on every rank: elements with 0 take no part, and their mean is 0.
        """
        size, dtype = self._axis.size, own.dtype
        own.mul_(alive)
        ones = self._norms(alive).clamp(min=1)
        packed, scales = self._compress(own, ones, slice(None), size, alive)
        outgoing = torch.cat([packed, self._table(scales, self._rows)], dim=1)
        incoming = torch.empty_like(outgoing)
        self._axis.all_to_all(incoming, outgoing)

        start, stop = self.part
        came = self._scales(incoming[:, packed.shape[1] :], dtype, self._rows[self._axis.rank].expand(size, -1))
        total = torch.zeros_like(server)
        for rank in range(size):  # in the same order on every rank
            signs = unpack(incoming[rank : rank + 1, : packed.shape[1]], dtype)[0]
            total += self._decoded(signs, came[rank, self._mine], self._mine)
        server += total.div_(size)
        server.mul_(alive[start:stop])
        packed, scales = self._compress(server, ones, self._mine, 1, alive[start:stop])
        every = own.new_zeros(len(self._lengths), self._values)
        every[self._mine] = scales
        mine = torch.cat([packed, self._table(every, self._rows[self._axis.rank].unsqueeze(0))], dim=1)
        whole = mine.new_empty(size, mine.shape[1])
        self._axis.all_gather(whole, mine)
        table = self._scales(whole[:, packed.shape[1] :], dtype, self._rows)
        # Each chunk's scale is in the row of one rank and 0 in the others.
        signs = unpack(whole[:, : packed.shape[1]], dtype).view(-1)
        return self._decoded(signs, table.sum(dim=0), slice(None)).mul_(alive)

    def _compress(self, x: Tensor, ones: Tensor, chunks: slice, rows: int, alive: Tensor) -> tuple[Tensor, Tensor]:
        """Compress a tensor; ``x`` is overwritten with the compression error.

        Args:
            x: (elements,), the tensor, or this rank's part of it.
            ones: for each chunk of the whole layout, the 2-norm of ``alive``: the root of the number of elements that
                take part.
            chunks: the chunks that ``x`` has.
            rows: number of ranks to which the signs go, one row for each.
            alive: (elements,), 1 for elements that take part, else 0.

        Returns:
            The signs as bits, (rows, bytes), and the scales, (chunks, values).
        """
        if self._values == 1:
            scales = (self._norms(x, chunks) / ones[chunks]).unsqueeze(1)
        else:
            above = (x >= 0).to(x.dtype).mul_(alive)
            parts = ((x.clamp(min=0), above), (x.clamp(max=0), alive - above))
            means = [self._norms(part, chunks, 1) / self._norms(which, chunks, 1).clamp(min=1) for part, which in parts]
            scales = torch.stack([means[0], -means[1]], dim=1)
        packed = pack((x >= 0).view(rows, -1))
        x.sub_(self._decoded(unpack(packed, x.dtype).view(-1), scales, chunks).mul_(alive))
        return packed, scales

    def _decoded(self, signs: Tensor, scales: Tensor, chunks: slice) -> Tensor:
        """Return the values of signs (elements,), which are overwritten, with the scales (chunks, values)."""
        if self._values == 1:
            return signs.mul_(self._spread(scales[:, 0], chunks))
        above, below = (self._spread(scales[:, number], chunks) for number in (0, 1))
        return torch.where(signs > 0, above, below)

    def _norms(self, x: Tensor, chunks: slice = slice(None), order: int = 2) -> Tensor:
        """Return the norm of each of the chunks, (chunks,), of which ``x`` has the elements."""
        return torch.stack(norms_of_all(x.split(self._lengths[chunks]), order))

    def _spread(self, scales: Tensor, chunks: slice) -> Tensor:
        """Expand one scale per chunk to one per element: (chunks,) -> (elements,)."""
        return scales.repeat_interleave(self._each[chunks], output_size=sum(self._lengths[chunks]))

    def _table(self, scales: Tensor, rows: Tensor) -> Tensor:
        """Return the scales as bytes to send, (rows, bytes): row r has those of the chunks that ``rows[r]`` lists."""
        return torch.cat([scales, scales.new_zeros(1, self._values)])[rows].flatten(1).view(torch.uint8)

    def _scales(self, table: Tensor, dtype: torch.dtype, rows: Tensor) -> Tensor:
        """Return received scales, the inverse of ``_table``: (rows, bytes) -> (rows, chunks, values).

        Chunks that ``rows`` does not list for a row are 0 there.
        """
        values = table.contiguous().view(dtype).view(*rows.shape, self._values)
        found = values.new_zeros(len(rows), len(self._lengths) + 1, self._values)
        return found.scatter_(1, rows.unsqueeze(2).expand_as(values), values)[:, :-1]
