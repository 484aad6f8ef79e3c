"""List scheduling with the real costs, for any placement within any memory limit: starts of the search.

The op that can start first runs first. Of two that start at the same time, an input gradient goes before a forward,
and a later chunk before an earlier one. A forward of chunk c of v leaves room for (v - 1 - c) k activations, so that k
microbatches which are further on can go on together, and no rank waits for ever.
"""

from __future__ import annotations

import math
import random

from .annealing import Problem, Sequences


def list_schedule(problem: Problem, rng: random.Random, spread: float = 0.0, together: int = 1) -> Sequences:
    """Return for each rank its forwards and input gradients in order, as codes of annealing.py.

    Args:
        problem: size, costs and memory limits.
        rng: source of random numbers.
        spread: largest random delay of an op when the next one is chosen, in multiples of the mean cost of a forward.
        together: the k of this module's docstring, from 1 to the least of the limits / chunks.
    """
    pipe, mbs, v = problem.pipe, problem.microbatches, problem.chunks
    stages = len(problem.placement)
    unit = spread * sum(map(sum, problem.f)) / stages
    arrived_f = [[0.0] * mbs] + [[math.inf] * mbs for _ in range(stages)]
    arrived_b = [[math.inf] * mbs for _ in range(stages)] + [[0.0] * mbs]
    clock, held = [0.0] * pipe, [0] * pipe
    late: list[list[float]] = [[] for _ in range(pipe)]  # costs of the weight gradients that are not done
    done = [[0] * (2 * v) for _ in range(pipe)]
    sequences: Sequences = [[] for _ in range(pipe)]
    for _ in range(2 * stages * mbs):
        best = math.inf, 0, 0, 0.0, 0
        for r in range(pipe):
            for code in range(2 * v - 1, -1, -1):  # input gradients first
                mb, chunk = done[r][code], code % v
                if mb == mbs:
                    continue
                stage, freed = problem.mine[r][chunk], 0
                start = clock[r]
                if code < v:
                    start = max(start, arrived_f[stage][mb])
                    freed = max(0, held[r] + 1 + (v - 1 - chunk) * together - problem.limits[r])
                    if freed > len(late[r]):
                        continue
                    start = max(start, clock[r] + sum(late[r][:freed]))
                elif mb == done[r][chunk]:
                    continue
                else:
                    start = max(start, arrived_b[stage + 1][mb])
                key = start + unit * rng.random() if unit else start
                if key < best[0]:
                    best = key, r, code, start, freed
        _, r, code, start, freed = best
        mb, chunk = done[r][code], code % v
        stage = problem.mine[r][chunk]
        for _ in range(freed):
            clock[r] += late[r].pop(0)
            held[r] -= 1
        while late[r] and clock[r] + late[r][0] <= start:  # in the time in which the rank would wait
            clock[r] += late[r].pop(0)
            held[r] -= 1
        if code < v:
            held[r] += 1
            clock[r] = start + problem.f[r][chunk]
            arrived_f[stage + 1][mb] = clock[r] + problem.hop_f[stage]
        else:
            late[r].append(problem.w[r][chunk])
            clock[r] = start + problem.i[r][chunk]
            arrived_b[stage][mb] = clock[r] + problem.hop_b[stage]
        done[r][code] = mb + 1
        sequences[r].append(code)
    return sequences
