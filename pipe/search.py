"""The best order that can be found for measured costs, within a memory limit.

    >>> found = find_schedule(pipe=4, microbatches=8, costs=Costs(1, 0.993, 0.717, 0.0335), memory=4, chunks=2)
    >>> print(found.summary())
    auto: makespan 23.47, bubble 7.63 %, 0.82 % above the lower bound; zb-v took 23.68

The named schedules that fit are the start: never worse than the best of them. Then letters of their
words are moved about (anneal.py). Long schedules are improved at their ends: a steady state is cut out
of the middle, what is left is annealed, and the steady state is put back.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .anneal import Problem, Words, anneal, decode, words_of
from .ops import Op
from .schedule import Schedule
from .schedules import RECIPES, make_schedule, zigzag
from .simulate import Costs, peak_activations, simulate
from .v_shaped import LAYOUTS, ways

PATIENCE = 0.5
EFFORT = 8_000_000  # letters decoded: some five seconds
Start = tuple[float, Problem, Schedule]


@dataclass(frozen=True)
class Found(Schedule):
    """A schedule, and how good it is at the costs it was sought for."""

    makespan: float
    bubble: float
    lower_bound: float  # no order at all on this many ranks and chunks is faster
    best_named: str
    named_makespan: float

    @property
    def gap(self) -> float:
        """How far above the lower bound the makespan is, as a share of the bound."""
        return self.makespan / self.lower_bound - 1.0 if self.lower_bound else 0.0

    def summary(self) -> str:
        return (
            f"{self.name}: makespan {self.makespan:.4g}, bubble {100 * self.bubble:.2f} %, "
            f"{100 * self.gap:.2f} % above the lower bound; {self.best_named} took {self.named_makespan:.4g}"
        )


def find_schedule(
    pipe: int,
    microbatches: int,
    costs: Costs | None = None,
    memory: float | Sequence[float] | None = None,
    chunks: int | None = None,
    *,
    effort: float = 1.0,
    seed: int = 0,
) -> Found:
    """The fastest schedule found for `costs` with at most `memory` activations on a rank.

    `memory` is in microbatches through 1/pipe of the model (one limit, or one for each rank; None: no
    limit), `chunks` the stages per rank (None: 1 or 2, whichever is faster). The answer depends on the
    arguments alone, so every rank of a run finds the same. `effort` scales the work.
    """
    costs = costs or Costs()
    starts: list[Start] = []
    for v in _options(pipe, costs, chunks):
        limits = _limits(pipe, microbatches, v, memory)
        for schedule in _fitting(pipe, microbatches, v, limits):
            problem = Problem(schedule.placement, pipe, microbatches, costs, limits)
            starts.append((simulate(schedule, costs).makespan, problem, schedule))
    starts.sort(key=lambda start: start[0])
    named_makespan, _, named = starts[0]
    best, best_makespan = named, named_makespan
    # the two best starts; a second one far behind the first would be a waste
    second = 1 if len(starts) > 1 and starts[1][0] < 1.1 * named_makespan else 0
    for k, (at, share) in enumerate(((0, 0.6), (second, 0.4))):
        _, problem, start = starts[at]
        improved = _improve(problem, start, int(EFFORT * effort * share), random.Random(seed + k))
        makespan = simulate(improved, costs).makespan
        if makespan < best_makespan:
            best, best_makespan = improved, makespan
    return Found(
        "auto",
        pipe,
        microbatches,
        best.chunks,
        best.placement,
        best.orders,
        best_makespan,
        simulate(best, costs).bubble,
        min(problem.lower_bound() for _, problem, _ in starts),
        named.name,
        named_makespan,
    )


def tune(schedule: Schedule, costs: Costs, effort: float = 0.1) -> Schedule:
    """A named schedule whose order suits `costs`, within its own peak memory; never slower.

    The zero-bubble papers' generators take the costs too: what is best at F = I = W is not at others.
    """
    peak = round(max(peak_activations(schedule)) * schedule.chunks)
    limits = [peak] * schedule.pipe
    problem = Problem(schedule.placement, schedule.pipe, schedule.microbatches, costs, limits)
    starts = [schedule, *(other for other in _others(schedule) if _fits(other, limits))]
    start = min(starts, key=lambda candidate: simulate(candidate, costs).makespan)
    # The search puts every W where it thinks best, and that may be worse.
    found = min(
        (schedule, start, _improve(problem, start, int(EFFORT * effort), random.Random(0))),
        key=lambda candidate: round(simulate(candidate, costs).makespan, 12),
    )
    return replace(found, name=schedule.name)


def _options(pipe: int, costs: Costs, chunks: int | None) -> tuple[int, ...]:
    """The chunks to try: those asked for, those that per-stage costs are for, or 1 and 2."""
    if chunks is not None:
        return (chunks,)
    lengths = {len(x) for x in (costs.F, costs.I, costs.W) if isinstance(x, Sequence)}
    return (max(1, lengths.pop() // pipe),) if len(lengths) == 1 else (1, 2)


def _limits(pipe: int, microbatches: int, chunks: int, memory: float | Sequence[float] | None) -> list[int]:
    """How many stages' activations each rank may hold."""
    if memory is None:
        return [microbatches * chunks] * pipe
    per_rank = [memory] * pipe if isinstance(memory, int | float) else list(memory)
    if len(per_rank) != pipe:
        raise ValueError(f"memory has {len(per_rank)} limits for {pipe} ranks: give one number, or one each")
    if min(per_rank) < 1:
        raise ValueError(f"a rank that runs a microbatch holds 1 activation: memory={min(per_rank):g} is too little")
    return [int(x * chunks + 1e-9) for x in per_rank]


def _fitting(pipe: int, microbatches: int, chunks: int, limits: Sequence[int]) -> list[Schedule]:
    """The schedules to start from: every named one that fits, and one that always does."""
    schedules = []
    for name, recipe in RECIPES.items():
        if name == "forward" or not recipe.accepts(chunks) or microbatches < recipe.least(pipe):
            continue
        schedule = make_schedule(name, pipe, microbatches, chunks)
        schedules += [made for made in (schedule, *_others(schedule)) if _fits(made, limits)]
    placement = zigzag(pipe, chunks)
    mine = [[s for s in range(pipe * chunks) if placement[s] == r] for r in range(pipe)]
    alone = tuple(
        tuple(
            op
            for m in range(microbatches)
            for op in (*(Op("F", s, m) for s in stages), *(Op("B", s, m) for s in reversed(stages)))
        )
        for stages in mine
    )
    return [*schedules, Schedule("one at a time", pipe, microbatches, chunks, placement, alone)]


def _others(schedule: Schedule) -> list[Schedule]:
    """The same schedule in the orders that are best at other costs than F = I = W."""
    if schedule.name not in LAYOUTS:
        return []
    return [replace(way, name=schedule.name) for way in ways(schedule.name, schedule.pipe, schedule.microbatches)]


def _fits(schedule: Schedule, limits: Sequence[int]) -> bool:
    peaks = peak_activations(schedule)
    return all(peak * schedule.chunks <= limit + 1e-9 for peak, limit in zip(peaks, limits, strict=True))


def _improve(problem: Problem, start: Schedule, letters: int, random_: random.Random) -> Schedule:
    words = words_of(problem, start.orders)
    patience = [PATIENCE] * problem.pipe
    decoded, _ = decode(problem, words, patience)
    if decoded is None:
        return start  # its whole backwards need what W put off does not leave
    kept = decoded.makespan, words, patience
    few = 3 * problem.pipe
    # a long schedule has fewer tries per letter: it is better kept near its start
    heat = 0.1 if sum(map(len, words)) <= 400 else 0.02
    short = _shorten(problem, words, problem.microbatches - few)
    if short is not None:
        small, cut, places = short
        period = 2 * problem.chunks
        frozen = [(place, place + period) for place in places]
        _, cut, patience = anneal(small, cut, patience, letters, random_, heat, frozen)
        again = problem.microbatches - few
        longer = [word[:at] + word[at : at + period] * again + word[at:] for word, at in zip(cut, places, strict=True)]
        decoded, _ = decode(problem, longer, patience)
        if decoded and decoded.makespan < kept[0]:
            kept = decoded.makespan, longer, patience
    else:
        found = anneal(problem, words, patience, letters, random_, heat)
        kept = min(kept, found, key=lambda entry: entry[0])
    decoded, _ = decode(problem, kept[1], kept[2], full=True)
    assert decoded is not None and decoded.orders is not None
    orders = tuple(tuple(_whole(order)) for order in decoded.orders)
    return Schedule("auto", problem.pipe, problem.microbatches, problem.chunks, problem.placement, orders)


def _shorten(problem: Problem, words: Words, drop: int) -> tuple[Problem, Words, list[int]] | None:
    """Takes `drop` periods out of each word's steady state: (problem, words, where a period stays).

    None where the words have no steady state that long, or not all at one time.
    """
    if drop < 4:
        return None
    period = 2 * problem.chunks
    small = replace(problem, microbatches=problem.microbatches - drop)
    cut, stretches = [], []
    for word in words:
        start, end = _steady(word, period)
        if end - start < (drop + 2) * period or len(set(word[start : start + period])) < period:
            return None
        cut.append(word[:start] + word[start + drop * period :])
        stretches.append((start, end - drop * period - period))
    decoded, _ = decode(small, cut, [PATIENCE] * problem.pipe, full=True)
    if decoded is None or decoded.starts is None:
        return None
    times = decoded.starts
    first = max(t[a] for t, (a, _) in zip(times, stretches, strict=True))
    last = min(t[b] for t, (_, b) in zip(times, stretches, strict=True))
    if first > last:
        return None
    middle = (first + last) / 2
    places = [next(i for i in range(a, b + 1) if t[i] >= middle or i == b) for t, (a, b) in zip(times, stretches)]
    return small, cut, places


def _steady(word: Sequence[int], period: int) -> tuple[int, int]:
    """The longest stretch of a word that repeats with this period."""
    best, start = (0, 0), 0
    for i in range(len(word) - period + 1):
        if i == len(word) - period or word[i] != word[i + period]:
            if i + period - start > best[1] - best[0]:
                best = (start, i + period)
            start = i + 1
    return best


def _whole(order: Sequence[Op]) -> list[Op]:
    """I and W of stage 0 in one B where they are neighbours: nobody waits for that input gradient."""
    out: list[Op] = []
    for op in order:
        if op.kind == "W" and op.stage == 0 and out and out[-1] == op._replace(kind="I"):
            out[-1] = op._replace(kind="B")
        else:
            out.append(op)
    return out
