"""Parameters -> padded flat buckets, and the range of each that a rank owns. Arithmetic only, no torch.

A bucket is one flat buffer. Its parameters lie in it in runs (sharded over the tensor axis; replicated;
replicated with partial gradients), so that what differs between them is one slice each:

    | sharded ... | replicated ... | partial ... | padding |
    |<----- rank 0's ----->|<----- rank 1's ----->|
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Parameters start on multiples of this many elements (64 bytes of fp32), as an allocator would place them.
_ALIGN = 16

SHARDED, REPLICATED, PARTIAL = range(3)
RUNS = (SHARDED, REPLICATED, PARTIAL)


class Item(NamedTuple):
    """A parameter to be placed: its number, its elements on this rank, and where it may lie."""

    number: int
    numel: int
    run: int
    key: Hashable  # parameters of different keys never share a bucket
    size: int = 0  # what it takes of a capacity, alike on every tensor rank, where shards are uneven; 0: numel


class Slot(NamedTuple):
    """Where a parameter lies in its bucket: elements ``start`` to ``stop``."""

    number: int
    start: int
    stop: int


@dataclass(frozen=True)
class FlatBucket:
    """The plan of one bucket: ``numel`` elements, a multiple of the number of shards."""

    key: Hashable
    slots: tuple[Slot, ...]
    runs: tuple[tuple[int, int], ...]  # for each run, the elements it spans
    numel: int
    shards: int

    def owned(self, rank: int) -> tuple[int, int]:
        """The half-open range of elements that a rank of the data axis owns."""
        size = self.numel // self.shards
        return rank * size, (rank + 1) * size

    def span(self, run: int, start: int, stop: int) -> tuple[int, int]:
        """The part of a run that lies within ``start`` to ``stop``; empty where it does not."""
        low, high = max(self.runs[run][0], start), min(self.runs[run][1], stop)
        return low, max(low, high)


def plan(items: Iterable[Item], shards: int, capacity: int) -> list[FlatBucket]:
    """Place parameters in buckets.

    Args:
        items: in the order of the model. Buckets are filled from the last to the first, and come in the order in
            which the backward pass makes their gradients final.
        shards: the size of the data axis.
        capacity: elements after which a bucket is closed; a larger parameter gets a bucket of its own.
    """
    if capacity < 1:
        raise ValueError(f"a bucket of {capacity} elements holds nothing: reduce_bucket_size is at least 1")
    by_key: dict[Hashable, list[Item]] = {}
    for item in items:
        by_key.setdefault(item.key, []).append(item)
    buckets = []
    for key, group in by_key.items():
        filling: list[Item] = []
        total = 0
        for item in reversed(group):
            size = item.size or item.numel
            if filling and total + size > capacity:
                buckets.append(_bucket(key, filling, shards))
                filling, total = [], 0
            filling.append(item)
            total += size
        buckets.append(_bucket(key, filling, shards))
    return sorted(buckets, key=lambda bucket: -min(slot.number for slot in bucket.slots))


def _bucket(key: Hashable, items: list[Item], shards: int) -> FlatBucket:
    slots, runs = [], []
    at = 0
    for run in RUNS:
        start = at
        for item in items:
            if item.run == run:
                slots.append(Slot(item.number, at, at + item.numel))
                at += -(-item.numel // _ALIGN) * _ALIGN
        runs.append((start, at))
    step = shards * _ALIGN
    return FlatBucket(key, tuple(slots), tuple(runs), -(-at // step) * step, shards)


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[slice, ...]]:
    """The n-d boxes that a flat, row-major interval of a tensor is made of, in its order: 2n - 1 of them at the most.

    >>> [*boxes((4, 3), 2, 9)]
    [(slice(0, 1, None), slice(2, 3, None)), (slice(1, 3, None), slice(0, 3, None))]
    """
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    inner = math.prod(shape[1:])
    (first, begin), (last, end) = divmod(start, inner), divmod(stop, inner)
    if first == last:
        yield from ((slice(first, first + 1), *rest) for rest in boxes(shape[1:], begin, end))
        return
    if begin:
        yield from ((slice(first, first + 1), *rest) for rest in boxes(shape[1:], begin, inner))
        first += 1
    if first < last:
        yield (slice(first, last), *(slice(0, length) for length in shape[1:]))
    yield from ((slice(last, last + 1), *rest) for rest in boxes(shape[1:], 0, end))
