"""Simulated annealing on orders of ops: orders as sequences of codes, a decoder that times them, and the moves.

A sequence has one rank's forwards and input gradients in order. The code of chunk c's forward is c, of its input
gradient v + c; the k-th use of a code is microbatch k. Most weight gradients are not in it: the decoder puts them where
the rank would wait anyway, or where memory must be freed. So sequences are short, every sequence that can be decoded is
a valid schedule within memory, and a move takes one code to another place. The code 2v + c does a weight gradient of
chunk c there, if one is left.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from ..program.costs import Costs
from ..program.ops import Op

Sequences = list[list[int]]


@dataclass
class Problem:
    """Size, costs and memory limits of a schedule, for which sequences of codes are timed.

    `limits` has for each rank the number of activations it may hold, each of one microbatch in one stage.
    """

    placement: tuple[int, ...]
    pipe: int
    microbatches: int
    costs: Costs
    limits: Sequence[int]
    mine: list[list[int]] = field(init=False)  # rank -> its stages, ascending

    def __post_init__(self) -> None:
        stages = len(self.placement)
        self.chunks = stages // self.pipe
        self.mine = [[s for s in range(stages) if self.placement[s] == r] for r in range(self.pipe)]
        cost = self.per_stage = self.costs.op_costs(stages, self.chunks)
        hops = self.costs.hops(self.placement)
        self.f, self.i, self.w = ([[cost[kind][s] for s in own] for own in self.mine] for kind in "FIW")
        self.hop_f, self.hop_b = [*hops, 0.0], [0.0, *hops]
        work = [sum(f) + sum(i) + sum(w) for f, i, w in zip(self.f, self.i, self.w, strict=True)]
        self.work = [self.microbatches * x for x in work]

    def lower_bound(self) -> float:
        """Return a makespan that no order can beat.

        One bound is the way of one microbatch through all stages and back. Each rank gives three more:

        - The time until its first input arrives, plus its forwards and input gradients, plus the way of its last
          gradient to stage 0.
        - Its work, plus two times in which it must wait. Before its first input gradient can start, it runs as many
          forwards as its memory has room for. After its last forward, whose microbatch has to go on to the last stage
          and back to stage 0, it has the backwards of as many microbatches left.
        - The time for which it holds activations, divided by the number that it may hold at once. To it comes what is
          missing from that number at the beginning, where forwards follow one another, and at the end, where weight
          gradients do.
        """
        f, i = self.per_stage["F"], self.per_stage["I"]
        backward = self._backward()
        last = len(self.placement) - 1
        down = [*accumulate((f[s] + self.hop_f[s] for s in range(last)), initial=0.0)]  # until the stage's F can start
        up = [*accumulate((i[s] + self.hop_b[s] for s in range(last, 0, -1)), initial=0.0)][::-1]  # after the last F
        bounds = [down[last] + f[last] + up[0] + backward[0]]
        for rank, (stages, life) in enumerate(zip(self.mine, self.lifetimes(), strict=True)):
            low, high, count = stages[0], stages[-1], self.microbatches * self.chunks
            limit = min(self.limits[rank], count)
            work = self.microbatches * sum(f[s] + backward[s] for s in stages)
            start, end = down[low], 0.0
            if limit < count:
                start = max(start, down[last] + f[last] + up[high] - limit * max(self.f[rank]))
                after = down[last] + f[last] - down[high] - f[high] + up[0] + backward[0]
                end = max(0.0, after - limit * max(backward[s] for s in stages))
            back = up[0] - up[low] - i[low] + backward[0]  # after the rank's last input gradient
            ramps = (min(self.f[rank]) + min(self.w[rank])) * (limit - 1) / 2
            bounds += [
                down[low] + self.microbatches * sum(f[s] + i[s] for s in stages) + back,
                start + work + end,
                down[low] + self.microbatches * life / limit + ramps,
            ]
        return max(bounds)

    def lifetimes(self) -> list[float]:
        """Return for each rank how long it holds one microbatch's activations at least, summed over its stages.

        A stage's are held from its forward, while the microbatch goes to the last stage and back, to the end of its
        weight gradient.
        """
        f, i, backward = self.per_stage["F"], self.per_stage["I"], self._backward()
        held = []
        away = 0.0  # from the end of a stage's forward to the start of its input gradient
        for s in reversed(range(len(self.placement))):
            away += self.hop_f[s] + self.hop_b[s + 1] if s + 1 < len(self.placement) else 0.0
            held.append(f[s] + away + backward[s])
            away += f[s] + i[s]
        held.reverse()
        return [sum(held[s] for s in stages) for stages in self.mine]

    def _backward(self) -> list[float]:
        """Return for each stage the cost of its backward, split or whole, whichever is less (they differ in ZeRO-3)."""
        cost = self.per_stage
        return [min(i + w, b) for i, w, b in zip(cost["I"], cost["W"], cost["B"], strict=True)]


@dataclass
class Decoded:
    """Result of `decode`: the makespan and, if asked for, the orders and start times."""

    makespan: float
    score: float  # the makespan and a small share of every rank's end, so that a sequence can improve step by step
    orders: list[list[Op]] | None = None
    starts: list[list[float]] | None = None  # the start of each code


def decode(
    problem: Problem, sequences: Sequences, patience: Sequence[float], below: float = math.inf, full: bool = False
) -> tuple[Decoded | None, int]:
    """Simulate sequences of codes: insert the weight gradients, and compute when each op runs.

    Args:
        problem: size, costs and memory limits.
        sequences: for each rank, its codes in order.
        patience: for each rank, the longest time by which a W may delay the next op, as a share of the W's time.
        below: give up as soon as the makespan must exceed this.
        full: also return each rank's ops in order, and the start of each code.

    Returns:
        The times (None if the sequences hang, exceed memory, or exceed `below`), and the number of codes decoded.
    """
    pipe, mbs, v = problem.pipe, problem.microbatches, problem.chunks
    stages = len(problem.placement)
    ready_f = [0.0] * mbs + [-1.0] * (stages * mbs)  # [stage * mbs + mb]: when its input arrives
    ready_b = [-1.0] * (stages * mbs) + [0.0] * mbs  # [(stage + 1) * mbs + mb]: its output's gradient
    hop_f, hop_b = problem.hop_f, problem.hop_b
    at, clock, held, idle = [0] * pipe, [0.0] * pipe, [0] * pipe, [0.0] * pipe
    uses = [[0] * (3 * v) for _ in range(pipe)]  # number of Ws that are done
    late: list[list[int]] = [[] for _ in range(pipe)]  # codes of the deferred Ws; `first` is the index of the next one
    first = [0] * pipe
    waiting: dict[int, int] = {}  # what a blocked rank waits for -> the rank
    backward = (stages + 1) * mbs  # keys of gradients come after the keys of activations
    runnable = list(range(pipe))
    ended = codes = 0
    orders: list[list[Op]] = [[] for _ in range(pipe)]
    starts: list[list[float]] = [[] for _ in range(pipe)]
    while runnable:
        r = runnable.pop()
        sequence, own, use, pending, limit = sequences[r], problem.mine[r], uses[r], late[r], problem.limits[r]
        cost_f, cost_i, cost_w, share = problem.f[r], problem.i[r], problem.w[r], patience[r]
        now, hold, wait, j, head = clock[r], held[r], idle[r], at[r], first[r]
        slack = below - problem.work[r]
        begin = j
        while j < len(sequence):
            code = sequence[j]
            if code >= 2 * v:
                c = code - 2 * v
                if c in pending[head:]:
                    pending.pop(pending.index(c, head))
                    if full:
                        orders[r].append(Op("W", own[c], use[code]))
                        use[code] += 1
                    now += cost_w[c]
                    hold -= 1
                if full:
                    starts[r].append(now)
                j += 1
                continue
            mb = use[code]
            forward = code < v
            chunk = code if forward else code - v
            stage = own[chunk]
            if forward:
                key = stage * mbs + mb
                arrived = ready_f[key]
            else:
                if use[chunk] <= mb:
                    return None, codes
                key = (stage + 1) * mbs + mb
                arrived = ready_b[key]
                key += backward
            if arrived < 0:
                waiting[key] = r
                break
            while head < len(pending):
                c = pending[head]
                w = cost_w[c]
                if now + w > arrived + share * w and not (forward and hold >= limit):
                    break
                if full:
                    orders[r].append(Op("W", own[c], use[2 * v + c]))
                    use[2 * v + c] += 1
                now += w
                hold -= 1
                head += 1
            if arrived > now:
                wait += arrived - now
                if wait > slack:
                    return None, codes + j - begin
                now = arrived
            if full:
                starts[r].append(now)
                orders[r].append(Op("F" if forward else "I", stage, mb))
            if forward:
                hold += 1
                if hold > limit:
                    return None, codes + j - begin
                now += cost_f[chunk]
                reader = key + mbs
                ready_f[reader] = now + hop_f[stage]
            else:
                pending.append(chunk)
                now += cost_i[chunk]
                reader = key - mbs
                ready_b[reader - backward] = now + hop_b[stage]
            use[code] = mb + 1
            j += 1
            if reader in waiting:
                runnable.append(waiting.pop(reader))
        else:
            for c in pending[head:]:
                if full:
                    orders[r].append(Op("W", own[c], use[2 * v + c]))
                    use[2 * v + c] += 1
                now += cost_w[c]
            head = len(pending)
            ended += 1
        codes += j - begin
        clock[r], held[r], idle[r], at[r], first[r] = now, hold, wait, j, head
    if ended < pipe:
        return None, codes
    end = max(clock)
    score = end + 0.02 * sum(clock) / pipe
    return Decoded(end, score, orders if full else None, starts if full else None), codes


def encode(problem: Problem, orders: Sequence[Sequence[Op]]) -> Sequences:
    """Return a schedule's orders as sequences; a whole backward becomes an input gradient."""
    chunk = {s: c for stages in problem.mine for c, s in enumerate(stages)}
    v = problem.chunks
    return [[chunk[op.stage] + (0 if op.kind == "F" else v) for op in order if op.kind != "W"] for order in orders]


def anneal(
    problem: Problem,
    sequences: Sequences,
    patience: list[float],
    codes: int,
    rng: random.Random,
    heat: float,
    frozen: Sequence[tuple[int, int]] | None = None,
    weights: bool = False,
) -> tuple[float, Sequences, list[float]]:
    """Improve sequences by simulated annealing: move one code of one rank, and keep the change if it is good enough.

    Args:
        problem: size, costs and memory limits.
        sequences, patience: the start, as for `decode`.
        codes: end after this many decoded codes. The work is counted, not timed, so that all ranks find the same
            schedule.
        rng: source of random numbers.
        heat: the first temperature, as a multiple of the mean cost of a forward.
        frozen: for each rank, a range (start, stop) of its sequence that no move may touch.
        weights: also add and remove codes of weight gradients.

    Returns:
        (makespan, sequences, patience) of the best found.
    """
    sequences, patience = [list(sequence) for sequence in sequences], list(patience)
    decoded, used = decode(problem, sequences, patience)
    assert decoded is not None
    best, score = (decoded.makespan, [list(sequence) for sequence in sequences], list(patience)), decoded.score
    unit = sum(map(sum, problem.f)) / len(problem.placement) or 1.0
    ends = 0.02 * sum(problem.work) / problem.pipe  # at least this much of a score is not makespan
    pool = [r for r, sequence in enumerate(sequences) if len(sequence) > 1]
    least = problem.lower_bound() * (1 + 1e-12)
    while used < codes and pool and best[0] > least:
        temperature = heat * unit * (1 - used / codes) ** 2 + 1e-9
        allowed = score - temperature * math.log(1.0 - rng.random())
        r = rng.choice(pool)
        sequence = sequences[r]
        i = k = 0
        old = patience[r]
        kind = rng.random()
        added = removed = -1
        if weights and 0.03 <= kind < 0.06:
            i = rng.randrange(len(sequence) + 1)
            if i < len(sequence) and sequence[i] >= 2 * problem.chunks:
                removed = sequence.pop(i)
            else:
                added = rng.randrange(2 * problem.chunks, 3 * problem.chunks)
                sequence.insert(i, added)
        elif kind < 0.03:
            patience[r] = rng.choice((0.0, 0.1, 0.25, 0.5, 0.75, 0.99))
            if patience[r] == old:
                continue
        else:
            i = rng.randrange(len(sequence))
            k = i + rng.choice((-6, -4, -3, -2, -1, -1, -1, 1, 1, 1, 2, 3, 4, 6))
            if not 0 <= k < len(sequence):
                continue
            if frozen is not None and max(i, k) >= frozen[r][0] and min(i, k) < frozen[r][1]:
                continue
            code = sequence[i]
            if all(x == code for x in sequence[min(i, k) : max(i, k) + 1]):
                continue
            sequence.insert(k, sequence.pop(i))
        decoded, looked = decode(problem, sequences, patience, below=allowed - ends)
        used += looked + 10
        if decoded is not None and decoded.score <= allowed:
            score = decoded.score
            if decoded.makespan < best[0] - 1e-12:
                best = (decoded.makespan, [list(sequence) for sequence in sequences], list(patience))
        elif added >= 0:
            del sequence[i]
        elif removed >= 0:
            sequence.insert(i, removed)
        elif i == k:
            patience[r] = old
        else:
            sequence.insert(i, sequence.pop(k))
    return best
