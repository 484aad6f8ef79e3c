"""Activations that the ranks of a schedule hold, in device memory and in host memory, from the orders alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from operator import mul

from .ops import BACKWARD, COMPUTE, MAKES, Op
from .orders import Orders


def peak_activations(schedule: Orders, sizes: Sequence[float] | None = None) -> tuple[float, ...]:
    """Return the most activations that each rank holds at once.

    A rank holds an activation from the start of its F to the end of its W or B; in a forward-only schedule, during its
    F only. It holds an offloaded activation until an F or C has waited for its O, and again from its R on. It holds a
    recomputed activation during its F, and again from its C on; the stage's input, which stays, does not count.

    Args:
        schedule: the schedule.
        sizes: activations of one microbatch in each stage, such as bytes, which are then the unit of the result. None:
            the unit is the activations of one microbatch in 1/pipe of the model, so that schedules with different
            chunks compare.
    """
    counts = counts_in_flight(schedule)
    if sizes is None:
        return rank_peaks(schedule, counts)
    own = [
        [size for size, home in zip(sizes, schedule.placement, strict=True) if home == r] for r in range(len(counts))
    ]
    return tuple(max((sum(map(mul, flights, of)) for flights in most), default=0) for most, of in zip(counts, own))


def rank_peaks(schedule: Orders, counts: Sequence[Sequence[tuple[float, ...]]]) -> tuple[float, ...]:
    return tuple(max(map(sum, flights), default=0) / schedule.chunks for flights in counts)


def stage_peaks(schedule: Orders, counts: Sequence[Sequence[tuple[float, ...]]]) -> tuple[float, ...]:
    """Return the most activations of each stage that its rank holds at once."""
    of_ranks = [iter(map(max, zip(*held, strict=True))) for held in counts]  # the stages of a rank are in their order
    return tuple(next(of_ranks[rank], 0.0) / schedule.chunks for rank in schedule.placement)


def counts_in_flight(schedule: Orders) -> list[list[tuple[float, ...]]]:
    """Return for each rank the largest numbers of microbatches whose activations its stages hold at once.

    A slice counts as its share of a microbatch's tokens. A rank with several stages may have several such tuples,
    because none is larger in all stages: with two chunks, (3, 1) and (2, 2).
    """
    flights_of = []
    for rank in range(schedule.pipe):
        most = largest_counts(counts for _, counts in activations_held(schedule, rank))
        if len(schedule.slices) > 1:
            most = [tuple(count / sum(schedule.slices) for count in flights) for flights in most]
        flights_of.append(most)
    return flights_of


def activations_held(schedule: Orders, rank: int) -> Iterator[tuple[Op, tuple[float, ...]]]:
    """Yield each op of a rank that takes memory for activations, and what each stage of the rank then holds.

    The unit is a microbatch or, with slices, the unit of ``Schedule.slices``. An offload frees its memory when a later
    op waits for it. An F or C waits for the offloads that were issued before the compute op before it, and the second
    op of a pair for those of the first, with which it starts.
    """
    index = {stage: i for i, stage in enumerate(s for s, home in enumerate(schedule.placement) if home == rank)}
    held: list[float] = [0] * len(index)
    leaving: deque[tuple[int, int, float]] = deque()  # offloads under way: compute ops before it, its stage, size
    computed = 0  # compute ops that have started before this op
    recomputed = {op[1:] for op in schedule.orders[rank] if op.kind == "C"}
    forward_only = schedule.forward_only
    for ops in schedule.groups(rank):
        for op in ops:
            kind, stage, microbatch = op
            size = schedule.slices[microbatch % len(schedule.slices)]
            if kind in MAKES:
                while leaving and leaving[0][0] < computed:
                    _, left, freed = leaving.popleft()
                    held[index[left]] -= freed
            elif kind == "O":
                leaving.append((computed, stage, size))
            if kind in "FRC":
                held[index[stage]] += size
                yield op, tuple(held)
                if forward_only:
                    held[index[stage]] = 0
                elif kind == "F" and (stage, microbatch) in recomputed:
                    held[index[stage]] -= size
            elif kind in "BW":
                held[index[stage]] -= size
        computed += len(ops) * (ops[0].kind in COMPUTE)


def peak_offloaded(schedule: Orders) -> tuple[float, ...]:
    """Return the most activations that each rank holds in host memory, in the unit of ``peak_activations``.

    A buffer in host memory is taken from an O until the backward that reads the reloaded activations.
    """
    peaks = []
    for order in schedule.orders:
        there: dict[tuple[int, int], float] = {}
        most = 0.0
        for kind, stage, microbatch in order:
            if kind == "O":
                there[stage, microbatch] = schedule.slices[microbatch % len(schedule.slices)]
                most = max(most, sum(there.values()))
            elif kind in BACKWARD:
                there.pop((stage, microbatch), None)
        peaks.append(most / (schedule.chunks * sum(schedule.slices)))
    return tuple(peaks)


def largest_counts(counts: Iterable[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """Return the tuples that no other one exceeds in all places."""
    largest: list[tuple[float, ...]] = []
    for candidate in sorted(set(counts), reverse=True):  # a tuple comes after those that exceed it
        if not any(all(x <= y for x, y in zip(candidate, larger, strict=True)) for larger in largest):
            largest.append(candidate)
    return largest
