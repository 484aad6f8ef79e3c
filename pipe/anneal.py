"""The search's engine: orders as words, a decoder that times them, and simulated annealing.

A word is one rank's forwards and input gradients as letters: chunk c's forward is c, its input gradient
v + c, and the k-th use of a letter is microbatch k. Weight gradients are not in it. The decoder puts
them where the rank would wait anyway, or where memory must be freed. So words are short, every word
that decodes is a valid schedule within memory, and a move is one letter taken elsewhere.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from .ops import Op
from .simulate import Costs

Words = list[list[int]]


@dataclass
class Problem:
    """What a word is timed for. Costs are per stage; `limits` counts stages' activations per rank."""

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
        cost = self.costs.op_costs(stages, self.chunks)
        hops = self.costs.hops(self.placement)
        self.f = [[cost["F"][s] for s in stages_of] for stages_of in self.mine]
        self.i = [[cost["I"][s] for s in stages_of] for stages_of in self.mine]
        self.w = [[cost["W"][s] for s in stages_of] for stages_of in self.mine]
        self.hop_f, self.hop_b = [*hops, 0.0], [0.0, *hops]
        work = [sum(f) + sum(i) + sum(w) for f, i, w in zip(self.f, self.i, self.w, strict=True)]
        self.work = [self.microbatches * x for x in work]

    def lower_bound(self) -> float:
        """No order at all is faster: a rank waits for its first input, works, and others finish after it."""
        f = {s: x for ss, xs in zip(self.mine, self.f, strict=True) for s, x in zip(ss, xs, strict=True)}
        i = {s: x for ss, xs in zip(self.mine, self.i, strict=True) for s, x in zip(ss, xs, strict=True)}
        stages = range(len(self.placement))
        down = sum(f[s] + self.hop_f[s] + i[s] + self.hop_b[s] for s in stages)
        bounds = [down + min(min(w) for w in self.w)]
        for rank, mine in enumerate(self.mine):
            start = sum(f[s] + self.hop_f[s] for s in range(mine[0]))
            back = sum(i[s] + self.hop_b[s + 1] for s in range(mine[0]))
            weights = self.microbatches * sum(self.w[rank])
            bounds += [start + self.work[rank], start + self.work[rank] - weights + back]
        return max(bounds)


@dataclass
class Decoded:
    makespan: float
    score: float  # the makespan, and a little of every rank's end, so that a word can improve step by step
    orders: list[list[Op]] | None = None
    starts: list[list[float]] | None = None  # when each letter began


def decode(
    problem: Problem, words: Words, patience: Sequence[float], below: float = math.inf, full: bool = False
) -> tuple[Decoded | None, int]:
    """Times the words, and counts the letters it looked at. None: they hang, or exceed memory, or `below`.

    `patience[r]`: how late a W may make rank r's next op, as a share of the W.
    """
    pipe, mbs, v = problem.pipe, problem.microbatches, problem.chunks
    stages = len(problem.placement)
    ready_f = [0.0] * mbs + [-1.0] * (stages * mbs)  # [stage * mbs + mb]: when its input is there
    ready_b = [-1.0] * (stages * mbs) + [0.0] * mbs  # [(stage + 1) * mbs + mb]: its output's gradient
    hop_f, hop_b = problem.hop_f, problem.hop_b
    at, clock, held, idle = [0] * pipe, [0.0] * pipe, [0] * pipe, [0.0] * pipe
    uses = [[0] * (2 * v) for _ in range(pipe)]
    late: list[list[int]] = [[] for _ in range(pipe)]  # letters of the Ws put off; `first` is the next one's place
    first = [0] * pipe
    waiting: dict[int, int] = {}  # what a blocked rank waits for -> the rank
    backward = (stages + 1) * mbs  # keys of gradients come after those of activations
    runnable = list(range(pipe))
    ended = letters = 0
    orders: list[list[Op]] = [[] for _ in range(pipe)]
    starts: list[list[float]] = [[] for _ in range(pipe)]
    while runnable:
        r = runnable.pop()
        word, mine, use, pending, limit = words[r], problem.mine[r], uses[r], late[r], problem.limits[r]
        cost_f, cost_i, cost_w, share = problem.f[r], problem.i[r], problem.w[r], patience[r]
        now, hold, wait, j, head = clock[r], held[r], idle[r], at[r], first[r]
        slack = below - problem.work[r]
        begin = j
        while j < len(word):
            letter = word[j]
            mb = use[letter]
            forward = letter < v
            chunk = letter if forward else letter - v
            stage = mine[chunk]
            if forward:
                key = stage * mbs + mb
                arrived = ready_f[key]
            else:
                if use[chunk] <= mb:
                    return None, letters
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
                    orders[r].append(Op("W", mine[c], pending[:head].count(c)))
                now += w
                hold -= 1
                head += 1
            if arrived > now:
                wait += arrived - now
                if wait > slack:
                    return None, letters + j - begin
                now = arrived
            if full:
                starts[r].append(now)
                orders[r].append(Op("F" if forward else "I", stage, mb))
            if forward:
                hold += 1
                if hold > limit:
                    return None, letters + j - begin
                now += cost_f[chunk]
                reader = key + mbs
                ready_f[reader] = now + hop_f[stage]
            else:
                pending.append(chunk)
                now += cost_i[chunk]
                reader = key - mbs
                ready_b[reader - backward] = now + hop_b[stage]
            use[letter] = mb + 1
            j += 1
            if reader in waiting:
                runnable.append(waiting.pop(reader))
        else:
            for k, c in enumerate(pending[head:], head):
                if full:
                    orders[r].append(Op("W", mine[c], pending[:k].count(c)))
                now += cost_w[c]
            head = len(pending)
            ended += 1
        letters += j - begin
        clock[r], held[r], idle[r], at[r], first[r] = now, hold, wait, j, head
    if ended < pipe:
        return None, letters
    end = max(clock)
    score = end + 0.02 * sum(clock) / pipe
    return Decoded(end, score, orders if full else None, starts if full else None), letters


def words_of(problem: Problem, orders: Sequence[Sequence[Op]]) -> Words:
    """A schedule's orders as words; a whole backward counts as an input gradient."""
    chunk = {s: c for mine in problem.mine for c, s in enumerate(mine)}
    v = problem.chunks
    return [[chunk[op.stage] + (0 if op.kind == "F" else v) for op in order if op.kind != "W"] for order in orders]


def anneal(
    problem: Problem,
    words: Words,
    patience: list[float],
    letters: int,
    random_: random.Random,
    heat: float,
    frozen: Sequence[tuple[int, int]] | None = None,
) -> tuple[float, Words, list[float]]:
    """Improves words by moving letters, until `letters` letters are decoded: (makespan, words, patience).

    `heat` is the first temperature, in forwards. In rank r's word the letters of `frozen[r]` stay.
    The work is counted, not timed, so that every rank of a run finds the same schedule.
    """
    words, patience = [list(word) for word in words], list(patience)
    found, used = decode(problem, words, patience)
    assert found is not None
    best, score = (found.makespan, [list(word) for word in words], list(patience)), found.score
    unit = sum(map(sum, problem.f)) / len(problem.placement) or 1.0
    ends = 0.02 * sum(problem.work) / problem.pipe  # at least this much of a score is not makespan
    pool = [r for r, word in enumerate(words) if len(word) > 1]
    while used < letters and pool:
        temperature = heat * unit * (1 - used / letters) ** 2 + 1e-9
        allowed = score - temperature * math.log(1.0 - random_.random())
        r = random_.choice(pool)
        word = words[r]
        i = k = 0
        old = patience[r]
        if random_.random() < 0.03:
            patience[r] = random_.choice((0.0, 0.1, 0.25, 0.5, 0.75, 0.99))
            if patience[r] == old:
                continue
        else:
            i = random_.randrange(len(word))
            k = i + random_.choice((-6, -4, -3, -2, -1, -1, -1, 1, 1, 1, 2, 3, 4, 6))
            if not 0 <= k < len(word):
                continue
            if frozen is not None and max(i, k) >= frozen[r][0] and min(i, k) < frozen[r][1]:
                continue
            letter = word[i]
            if all(x == letter for x in word[min(i, k) : max(i, k) + 1]):
                continue
            word.insert(k, word.pop(i))
        found, looked = decode(problem, words, patience, below=allowed - ends)
        used += looked + 10
        if found is not None and found.score <= allowed:
            score = found.score
            if found.makespan < best[0] - 1e-12:
                best = (found.makespan, [list(word) for word in words], list(patience))
        elif i == k:
            patience[r] = old
        else:
            word.insert(i, word.pop(k))
    return best
