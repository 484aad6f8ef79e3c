"""Search of steady states: one microbatch's ops, repeated every period, timed with the real costs within the memory.

V-Half and V-Min (v_steady.py) are such repetitions for F = I = W and for two limits of memory. At other costs their ops
collide, and at other limits there is none. Here the period and the waits between the stages are searched for. Qi et al.
2024 (arXiv:2405.15362) call the repeated ops a building block.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from .annealing import Problem, Sequences, decode

PATIENCES = (0.0, 0.25, 0.5, 0.75)  # of `decode`


def search_steady_state(
    problem: Problem, codes: int, rng: random.Random
) -> tuple[float, Sequences, list[float]] | None:
    """Search for the fastest repetition of one microbatch's ops, by trying periods and waits near the best ones.

    Args:
        problem: size, costs and memory limits.
        codes: end after about this many decoded codes, as ``anneal``.
        rng: source of random numbers.

    Returns:
        (makespan, sequences, patience), as ``anneal``; None if no try fits into the memory.
    """
    held = [life / limit for life, limit in zip(problem.lifetimes(), problem.limits, strict=True)]
    least = max(*(work / problem.microbatches for work in problem.work), *held)
    best: tuple[float, Sequences, list[float]] | None = None
    period, share, waits = 1.1, 0.5, [0.0] * 4
    spread = 1.0
    for _ in range(max(1, codes // (2 * len(problem.placement) * problem.microbatches))):
        tried = 1.0 + abs(period - 1.0 + rng.gauss(0, 0.2 * spread))
        longer = [max(0.0, wait + rng.choice((0.0, 1.0)) * rng.gauss(0, spread)) for wait in waits]
        patience = [rng.choice(PATIENCES) if rng.random() < 0.3 else share] * problem.pipe
        starts = repeated_block(problem, tried * least, longer)
        if starts is None:
            continue
        sequences = _sequences(problem, starts, tried * least)
        decoded, _ = decode(problem, sequences, patience, below=best[0] if best else math.inf)
        if decoded is not None and (best is None or decoded.makespan < best[0]):
            best = decoded.makespan, sequences, patience
            period, share, waits, spread = tried, patience[0], longer, max(0.1, 0.8 * spread)
    return best


def repeated_block(problem: Problem, period: float, waits: Sequence[float]) -> list[tuple[float, float]] | None:
    """Place one microbatch's ops, each as early as no op of another microbatch is in its way.

    Args:
        problem: size and costs.
        period: time after which the next microbatch follows.
        waits: before each forward of the first and of the last half of the stages, and before each input gradient of
            these, in multiples of a forward's cost.

    Returns:
        Start of each stage's forward and input gradient; None if the period has no gap that is long enough.
    """
    f, i = problem.per_stage["F"], problem.per_stage["I"]
    stages = len(problem.placement)
    busy: list[list[tuple[float, float]]] = [[] for _ in range(problem.pipe)]
    unit = sum(f) / stages
    begins, ends = [0.0] * stages, [0.0] * stages
    now = 0.0
    for back in (False, True):
        for s in reversed(range(stages)) if back else range(stages):
            cost, starts, hop = (i[s], ends, problem.hop_b[s]) if back else (f[s], begins, problem.hop_f[s])
            wait = unit * waits[2 * back + (2 * s >= stages)]
            start = _place(busy[problem.placement[s]], now + wait, cost, period)
            if start is None:
                return None
            starts[s] = start
            now = start + cost + hop
    return [*zip(begins, ends, strict=True)]


def _place(busy: list[tuple[float, float]], earliest: float, cost: float, period: float) -> float | None:
    """Return the earliest start that overlaps no busy time, modulo the period, and add the op to the busy times."""
    start, latest = earliest, earliest + period
    moved = True
    while moved:
        moved = False
        for begin, length in busy:
            after = (start - begin) % period
            if after < length - 1e-9:
                start += length - after
            elif period - after < cost - 1e-9:
                start += period - after + length
            else:
                continue
            moved = True
        if start > latest:
            return None
    busy.append((start, cost))
    return start


def _sequences(problem: Problem, times: Sequence[tuple[float, float]], period: float) -> Sequences:
    """Return the codes of each rank, in the order of their times if the block is repeated."""
    v = problem.chunks
    return [
        [
            code
            for _, code in sorted(
                (times[s][back] + m * period, c + v * back)
                for c, s in enumerate(stages)
                for back in (0, 1)
                for m in range(problem.microbatches)
            )
        ]
        for stages in problem.mine
    ]
