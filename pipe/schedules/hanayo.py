"""Hanayo's waves: v = 2w stages per rank, to and fro w times. At each end two consecutive stages share a rank.

    stage   0 1 2 3 4 5 6 7        w = 1, p = 4        rank    0 1 2 3 3 2 1 0

Several patterns are tried on a few microbatches (squeeze.py); the best one is scheduled in full.
Idle times and peaks are in the terms of classic.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from ..program.ops import Orders
from ..program.placement import zigzag
from .classic import merge
from .squeeze import NEVER, StageOp, squeeze

Patterns = list[list[StageOp]]


def wave(pipe: int, microbatches: int, chunks: int) -> Orders:
    """Hanayo (Liu 2023): a bubble of about 1/v of 1F1B's, at about its memory.

    With w = v/2 waves, m = p and B = 2F the paper's bubble is (2p-2)/(3pw+p-1); this one's is smaller up to
    w = 3, and within 3 % of it at w = 4. Idle 2(p-1)/3 (F+B) at v = 2 and peak p; at more waves about
    (p-1)(F+B)/v where p divides m, more otherwise (as with interleaved), and peak at most p + (p-1)(v-2)/2v.

    rank 0: 0F0 0F1 3F0 3B0 0F2 3F1 3B1 0B0 3F2 3B2 0B1 0B2
    rank 1: 1F0 2F0 1F1 2F1 2B0 1F2 1B0 2F2 2B1 1B1 2B2 1B2
    """
    placement = zigzag(pipe, chunks)
    limits = [chunks * pipe + (chunks // 2 - 1) * (pipe - 1)] * pipe
    few = microbatches if microbatches < 3 * pipe else 2 * pipe + microbatches % pipe
    tries = []
    for i, (patterns, ahead) in enumerate(candidate_patterns(placement, pipe, few, limits[0])):
        result = squeeze(patterns, placement, few, limits, ahead)
        if result:
            tries.append((result[0], i))
    for _, i in sorted(tries):
        patterns, ahead = next(islice(candidate_patterns(placement, pipe, microbatches, limits[0]), i, None))
        result = squeeze(patterns, placement, microbatches, limits, ahead)
        if result:
            return result[1]
    raise AssertionError(f"no wave for pipe={pipe}, microbatches={microbatches}, chunks={chunks}")


def candidate_patterns(
    placement: Sequence[int], pipe: int, microbatches: int, limit: int
) -> Iterator[tuple[Patterns, bool]]:
    """Yield the patterns to try, as (patterns, ahead); `patterns` has a rough order of ops for each rank.

    `ahead` is the argument of `squeeze`: True if ops may run earlier than in the pattern. `limit` is the number of
    activations (of one stage) that a rank may hold.
    """
    for slope, ahead in ((-1, False), (-1, True), (0, True)):
        yield periodic(placement, pipe, microbatches, slope), ahead
    if len(placement) == 2 * pipe:
        return  # with one wave, the first is the best
    half, less = max(1, pipe // 2), max(1, pipe - 1)
    windows = {w: deepest_first(placement, pipe, microbatches, w) for w in (half, less, pipe, pipe + half)}
    for f, b in ((half, pipe), (pipe + half, pipe), (pipe + half, less), (less, pipe + half), (half, half)):
        yield merge_mirrored(windows[f], windows[b], len(placement), limit), True


def periodic(placement: Sequence[int], pipe: int, microbatches: int, slope: int) -> Patterns:
    """Lay out one microbatch's ops in time, repeat them every 3v units, and return each rank's ops in order of time.

    F takes one unit and B two, so a rank's work for a microbatch takes 3v units. Each op starts at the first time at
    which its rank is free in every period and which is slope * r (mod 3) for a forward on rank r. No two ops of a rank
    overlap.
    """
    stages = len(placement)
    period = 3 * stages // pipe
    taken: list[set[int]] = [set() for _ in range(pipe)]
    starts: list[list[tuple[int, StageOp]]] = [[] for _ in range(pipe)]
    path: list[StageOp] = [("F", s) for s in range(stages)] + [("B", s) for s in reversed(range(stages))]
    now = 0
    for kind, stage in path:
        rank = placement[stage]
        length = 1 if kind == "F" else 2
        while (now - slope * rank - length + 1) % 3 or now % period in taken[rank]:
            now += 1
        taken[rank].add(now % period)
        starts[rank].append((now, (kind, stage)))
        now += length
    return [
        [stage_op for _, stage_op in sorted((t + period * m, a) for t, a in block for m in range(microbatches))]
        for block in starts
    ]


def merge_mirrored(forwards: list[list[int]], backwards: list[list[int]], stages: int, limit: int) -> Patterns:
    """Return each rank's pattern: `limit` forwards, then backwards and forwards in turn.

    Args:
        forwards: for each rank, the stages of its forwards in order.
        backwards: for each rank, stages in the order of a forward pass. The backwards run in the mirror image: a
            backward of stage n - 1 - s for stage s, with n = `stages`.
        stages: number of stages.
        limit: number of forwards before the first backward.
    """
    return [
        merge([("F", s) for s in f], [("B", stages - 1 - s) for s in b], limit)
        for f, b in zip(forwards, backwards, strict=True)
    ]


def deepest_first(placement: Sequence[int], pipe: int, microbatches: int, window: int) -> list[list[int]]:
    """Return for each rank the stages of its forwards, in order, if it always runs the deepest stage that is ready.

    At most `window` microbatches are on their way through the stages at any time.
    """
    stages = len(placement)
    stages_of = [[s for s in reversed(range(stages)) if placement[s] == r] for r in range(pipe)]
    arrival = [[0] * microbatches] + [[NEVER] * microbatches for _ in range(stages)]
    at = [0] * stages  # stage -> its next microbatch
    order: list[list[int]] = [[] for _ in range(pipe)]
    now, left = 0, stages * microbatches
    while left:
        for rank in range(pipe):
            for s in stages_of[rank]:
                mb = at[s]
                if mb < microbatches and arrival[s][mb] <= now and (s > 0 or mb - at[-1] < window):
                    at[s] = mb + 1
                    arrival[s + 1][mb] = now + 1
                    order[rank].append(s)
                    left -= 1
                    break
        now += 1
    return order
