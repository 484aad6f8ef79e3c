"""Row-sparse gradients of embeddings: only the rows that some replica's batch looked up travel, and sums are exact.

An embedding's gradient has zeros but in the rows of the tokens that came. Each replica sends its rows and their
numbers, and all add up everybody's; where that would send more than the plain sum, the plain sum it is. Every replica
decides alike, from the most rows that one of them has.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..grid import Grid
from .compressor import Compressor, Place, Rest, flats, packed, packed_bytes, places, unpacked

if TYPE_CHECKING:
    from .buckets import Bucket


@dataclass(frozen=True)
class SparseRows:
    """Sends the rows of some weights' gradients that are not zero, and sums everything else.

    Attributes:
        weights: of embeddings, (rows, columns): ``[model.embedding.weight]``. One that is used elsewhere too, as a
            tied head uses it, has a gradient in every row: it is summed whole, and looking for its rows is for nothing.

    Raises:
        ValueError: a weight has no rows.
    """

    weights: Collection[Tensor]

    def __post_init__(self) -> None:
        flat = next((tuple(weight.shape) for weight in self.weights if weight.dim() != 2), None)
        if flat is not None:
            raise ValueError(f"weights are of embeddings, (rows, columns), and one is of shape {flat}")

    def __call__(self, grid: Grid, buckets: Sequence[Bucket]) -> SparseRowsExchange:
        """The ``Exchange`` of these buckets."""
        return SparseRowsExchange(self, grid, buckets)


class SparseRowsExchange(Compressor):
    """What ``SparseRows`` makes. It keeps nothing from step to step."""

    def __init__(self, options: SparseRows, grid: Grid, buckets: Sequence[Bucket]) -> None:
        super().__init__(grid, buckets)
        weights = set(options.weights)
        self._places = [p for p in places(buckets) if p.member.parameter in weights and p.start < p.stop]
        self._sent = 0.0

    def gradients(self, buckets: Sequence[Bucket]) -> None:
        """See ``Exchange``."""
        own = flats(buckets)
        self.steps += 1
        if self.axis.size == 1:
            return
        touched = [(place.of(own).view(place.matrix) != 0).any(1).nonzero().view(-1) for place in self._places]
        most = torch.tensor([rows.numel() for rows in touched], dtype=torch.int64, device=self.device)
        if self._places:
            self.axis.all_reduce(most, op="max")
        counted = dict(zip(self._places, zip(touched, most.tolist(), strict=True), strict=True))
        sparse = {place: counted[place] for place in self._fewer(buckets, {p: n for p, (_, n) in counted.items()})}
        rest = Rest(self.axis, buckets, sparse)
        rest.start(own)
        self._sent = rest.formula() + 2 * most.numel() * most.itemsize * (self.axis.size - 1) / self.axis.size
        for place, (rows, count) in sparse.items():
            self._send(place, place.of(own), rows, count, buckets[place.bucket].communicate)
        rest.finish(own)

    def formula(self) -> float:
        """For each embedding N - 1 messages of the most rows that a replica has; and the sum of the rest."""
        return self._sent

    def _fewer(self, buckets: Sequence[Bucket], counts: Mapping[Place, int]) -> list[Place]:
        """Those whose rows take fewer bytes than all of them.

        What else is in a bucket of stage 1 is then summed on all replicas, in place of each one's range of it: twice
        the bytes, which the rows have to be worth too.
        """
        found = []
        for number in dict.fromkeys(place.bucket for place in counts):
            bucket, size = buckets[number], self.axis.size
            whole = bucket.communicate.itemsize / size  # what an element of a range takes, over N - 1; of a sum twice
            rows = {
                p: packed_bytes(n, n * p.matrix[1], bucket.communicate) for p, n in counts.items() if p.bucket == number
            }
            chosen = [p for p, sent in rows.items() if sent < 2 * whole * (p.stop - p.start)]
            others = bucket.flat.numel - sum(p.stop - p.start for p in chosen)
            scattered = bucket.owned != (0, bucket.flat.numel)
            if not scattered or sum(rows[p] for p in chosen) + 2 * whole * others < whole * bucket.flat.numel:
                found += chosen
        return found

    def _send(self, place: Place, flat: Tensor, rows: Tensor, count: int, dtype: torch.dtype) -> None:
        """Have everybody's rows, and add them up replica by replica: in the same order on each."""
        if not count:
            return
        gradient, columns = flat.view(place.matrix), place.matrix[1]
        # Who has fewer rows than others sends zeros for row 0.
        numbers = torch.zeros(count, dtype=torch.int32, device=flat.device)
        numbers[: rows.numel()] = rows
        values = torch.zeros(count, columns, dtype=dtype, device=flat.device)
        values[: rows.numel()] = gradient[rows]
        mine = packed(numbers, values.view(-1))
        every = mine.new_empty(self.axis.size * mine.numel())
        self.axis.all_gather(every, mine)
        gradient.zero_()
        for theirs in every.view(self.axis.size, -1):
            where, what = unpacked(theirs, count, count * columns, dtype)
            gradient.index_add_(0, where, what.view(count, columns).to(gradient.dtype))
        self._sent += packed_bytes(count, count * columns, dtype) * (self.axis.size - 1)
