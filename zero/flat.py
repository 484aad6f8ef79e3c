"""Layout of parameters in padded flat buckets, and the range of each bucket that a rank owns. No torch.

A bucket is one flat buffer. Its parameters lie in it in runs: sharded over the tensor axis, replicated, and replicated
with partial gradients. Each kind is then one slice:

    | sharded ... | replicated ... | partial ... | padding |
    |<----- rank 0's ----->|<----- rank 1's ----->|
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

# Parameters start on multiples of this many elements (64 bytes of fp32), as an allocator would place them.
ALIGN = 16
# Optimizer state in 8 or 4 bits (``stored_state.py``): elements of one scale, at whose multiples parameters then start,
# and elements of the smallest parameter that has such state, as in bitsandbytes.
BLOCK, LEAST_CODED = 64, 4096

# If nothing is sent, a parameter of so many elements or more has a bucket of its own: the gradient that autograd makes
# then becomes the bucket's without a copy. (Copying a smaller one takes no longer than one more bucket.)
LARGE = 2**16

SHARDED, REPLICATED, PARTIAL = range(3)
RUNS = (SHARDED, REPLICATED, PARTIAL)


class Item(NamedTuple):
    """A parameter to be placed in a bucket.

    ``number`` is its index in the list of parameters, ``numel`` its elements on this rank, and ``run`` the kind of
    elements: sharded, replicated or partial.
    """

    number: int
    numel: int
    run: int
    key: Hashable  # parameters of different keys never share a bucket
    size: int = 0  # elements counted against the capacity, equal on all tensor ranks if shards are uneven; 0: numel
    shards: int = 1  # number of replicas over which the bucket is sharded; parameters of a key have the same


def rules_of_size(number: int, size: int, *, threshold: int, nothing_sent: bool) -> tuple[bool, int | None]:
    """Return the two parts of a parameter's key that depend on its size.

    Args:
        number: its index in the list of parameters.
        size: its elements, at most, on a rank of the tensor axis.
        threshold: largest size of a parameter that stage 3 does not shard; 0 below stage 3.
        nothing_sent: it has no replicas to exchange its gradient with.

    Returns:
        True if stage 3 does not shard it; and its number if it has a bucket of its own, else None.
    """
    return 0 < size <= threshold, number if nothing_sent and size >= LARGE else None


def shards_of(ranks: int, size: int | None, expert: int = 1) -> int:
    """Return the number of ranks over which parameters are sharded.

    Ranks of the expert axis are consecutive replicas. So a group holds ``size / expert`` copies of an expert, which
    shard it, or one.

    Args:
        ranks: ranks that hold the parameters before ZeRO shards them.
        size: consecutive replicas that shard among themselves; None: all of them.
        expert: size of the expert axis, for parameters that it shards; else 1.
    """
    if size is None:
        return ranks
    return min(size // expert if size % expert == 0 else 1, ranks)


def require_equal_groups(replicas: int, size: int) -> None:
    """Require that groups of ``size`` replicas divide the replicas.

    Raises:
        ValueError: they do not; the message names the sizes that do.
    """
    if size < 1 or replicas % size:
        fitting = ", ".join(str(size) for size in range(1, replicas + 1) if replicas % size == 0)
        raise ValueError(
            f"{replicas} replicas do not fall into groups of {size}: give one of {fitting}, preferably the number of "
            "replicas on a host"
        )


class Slot(NamedTuple):
    """Position of a parameter in its bucket: elements ``start`` to ``stop``."""

    number: int
    start: int
    stop: int


@dataclass(frozen=True)
class FlatBucket:
    """Layout of one bucket of ``numel`` elements, a multiple of the number of shards."""

    key: Hashable
    slots: tuple[Slot, ...]
    runs: tuple[tuple[int, int], ...]  # for each run, its start and stop
    numel: int
    shards: int

    def owned(self, rank: int) -> tuple[int, int]:
        """Return start and stop of the elements that one of the replicas owns."""
        size = self.numel // self.shards
        return rank * size, (rank + 1) * size

    def span(self, run: int, start: int, stop: int) -> tuple[int, int]:
        """Return the part of a run that lies within ``start`` to ``stop``; it may be empty."""
        low, high = max(self.runs[run][0], start), min(self.runs[run][1], stop)
        return low, max(low, high)


def plan(items: Iterable[Item], capacity: int, align: int = ALIGN) -> list[FlatBucket]:
    """Return the layouts of the buckets for parameters.

    Args:
        items: in the order of the model. Buckets are filled from the last item to the first, and are returned in the
            order in which the backward pass completes their gradients.
        capacity: elements of a bucket at most; a larger parameter gets a bucket of its own.
        align: parameters and shards begin at multiples of this number of elements.

    Raises:
        ValueError: ``capacity`` is less than 1.
    """
    if capacity < 1:
        raise ValueError(f"a bucket of {capacity} elements holds nothing: set reduce_bucket_size to 1 or more")
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
                buckets.append(_bucket(key, filling, align))
                filling, total = [], 0
            filling.append(item)
            total += size
        buckets.append(_bucket(key, filling, align))
    return sorted(buckets, key=lambda bucket: -min(slot.number for slot in bucket.slots))


def _bucket(key: Hashable, items: list[Item], align: int) -> FlatBucket:
    slots, runs = [], []
    at = 0
    for run in RUNS:
        start = at
        for item in items:
            if item.run == run:
                slots.append(Slot(item.number, at, at + item.numel))
                at += -(-item.numel // align) * align
        runs.append((start, at))
    shards = items[0].shards
    step = shards * align
    return FlatBucket(key, tuple(slots), tuple(runs), -(-at // step) * step, shards)
