"""Search for the best schedule at given costs, within a memory limit: `auto`.

    >>> found = find_schedule(pipe=4, microbatches=8, costs=Costs(1, 0.993, 0.717, 0.0335), memory=4, chunks=2)
    >>> print(found.summary())
    auto: makespan 23.47, bubble 7.63 %, 0.00 % above the lower bound; zb-v took 23.68

The search starts from the named schedules that fit, so it is never worse than the best of them, and improves the two
best by simulated annealing (annealing.py). If that misses the lower bound, it improves the two best of all starts, to
which steady states for these costs and this memory belong (steady.py), by less work each. Annealing is luck: less work
on one start may find more, so neither round takes the place of the other. Long schedules are improved at their ends: a
steady state is cut out of the middle, the rest is annealed, and the steady state is put back.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..program.activations import peak_activations
from ..program.costs import Costs
from ..program.ops import Op
from ..program.placement import loop, zigzag
from ..program.schedule import Schedule
from ..program.simulate import simulate
from .annealing import Problem, Sequences, anneal, decode, encode
from .greedy import list_schedule
from .registry import RECIPES, named_schedule
from .steady import search_steady_state
from .v_ends import squeezed_variants
from .v_steady import STEADY_STATES

PATIENCE = 0.5
EFFORT = 8_000_000  # codes to decode for the named schedules: about ten seconds
# Shares of it for the best start and the second best: of the named schedules, and of all starts.
NAMED, ALL, STEADY, GREEDY = (0.6, 0.4), (0.375, 0.3), 0.075, 0.025
SMALL = 100  # forwards and input gradients of a schedule for which there is work to try more kinds of starts and moves
TRIES = 24  # list schedules at most
ALONE = "one at a time"  # name of the schedule that always fits
Start = tuple[float, Problem, Schedule]


@dataclass(frozen=True)
class Found(Schedule):
    """Schedule found by the search, with its makespan and bubble at the costs of the search.

    ``best_named`` is the fastest named schedule within the memory limit, and ``named_makespan`` its makespan.
    """

    makespan: float
    bubble: float
    lower_bound: float  # no order on this many ranks and chunks is faster
    best_named: str
    named_makespan: float

    @property
    def gap(self) -> float:
        """Excess of the makespan over the lower bound, as a share of the bound."""
        return self.makespan / self.lower_bound - 1.0 if self.lower_bound else 0.0

    def summary(self) -> str:
        """Return makespan, bubble, gap and the best named schedule in one line."""
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
    """Search for the fastest schedule at `costs`, with at most `memory` activations on a rank.

    The result depends on the arguments alone, so every rank of a run finds the same schedule.

    Args:
        pipe: ranks of the pipe axis.
        microbatches: microbatches of a step.
        costs: costs of F, I, W and a message; by default F = I = W = 1.
        memory: activations that a rank may hold, in microbatches through 1/pipe of the model: one limit, or one for
            each rank; None: no limit.
        chunks: stages per rank; None: 1 or 2, whichever is faster.
        effort: scales the work; 1 takes ten seconds, and up to ten more if the first round misses the lower bound.
        seed: seed of the search.
    """
    costs = costs or Costs()
    starts: list[Start] = []
    for v in chunk_counts(pipe, costs, chunks):
        limits = _limits(pipe, microbatches, v, memory)
        for schedule in _fitting(pipe, microbatches, v, limits):
            problem = Problem(schedule.placement, pipe, microbatches, costs, limits)
            starts.append((simulate(schedule, costs).makespan, problem, schedule))
    named_makespan, _, named = min(starts, key=lambda start: start[0])
    best_makespan, best = named_makespan, named
    bound = min(problem.lower_bound() for _, problem, _ in starts)
    every = list(starts)
    if named_makespan > bound * (1 + 1e-12):
        every += _made(starts, int(EFFORT * effort), random.Random(seed))
    fastest = min(every, key=lambda start: start[0])
    if fastest[0] < best_makespan:
        best_makespan, _, best = fastest
    rounds = [(starts, NAMED), (every, ALL)]
    if named_makespan > 2 * fastest[0]:  # no named schedule is near, and the other starts get all the work
        rounds = [(every, (NAMED[0] + ALL[0], NAMED[1] + ALL[1]))]
    # The more promising round goes first: it may reach the bound.
    for candidates, shares in reversed(rounds) if fastest[0] < named_makespan else rounds:
        candidates.sort(key=lambda start: start[0])
        second = _second(candidates)
        for k, (at, share) in enumerate(zip((0, second), shares, strict=True)):
            makespan, problem, start = candidates[at]
            if best_makespan <= bound * (1 + 1e-12):  # as on one rank, where every order is the fastest
                break
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
        min(bound, best_makespan),  # the best order may be the bound but for rounding
        named.name,
        named_makespan,
    )


def tune(schedule: Schedule, costs: Costs, effort: float = 0.1) -> Schedule:
    """Improve a named schedule's order for `costs`, within its own peak memory. The result is never slower.

    A named schedule is generated for F = I = W, and another order may be better at other costs. The result may split B
    into I and W, also if `schedule` does not (``1f1b``); it keeps the name. `effort` scales the work, as in
    `find_schedule`.
    """
    peak = round(max(peak_activations(schedule)) * schedule.chunks)
    limits = [peak] * schedule.pipe
    problem = Problem(schedule.placement, schedule.pipe, schedule.microbatches, costs, limits)
    starts = [schedule, *(other for other in _others(schedule) if _fits(other, limits))]
    start = min(starts, key=lambda candidate: simulate(candidate, costs).makespan)
    # The search moves every W, which may be worse: keep the best of all.
    tuned = min(
        (schedule, start, _improve(problem, start, int(EFFORT * effort), random.Random(0))),
        key=lambda candidate: round(simulate(candidate, costs).makespan, 12),
    )
    return replace(tuned, name=schedule.name)


def chunk_counts(pipe: int, costs: Costs, chunks: int | None) -> tuple[int, ...]:
    """Return the numbers of chunks to try: the given one, the one that costs per stage imply, or both 1 and 2."""
    if chunks is not None:
        return (chunks,)
    lengths = {len(x) for x in (costs.F, costs.I, costs.W) if isinstance(x, Sequence)}
    return (max(1, lengths.pop() // pipe),) if len(lengths) == 1 else (1, 2)


def _limits(pipe: int, microbatches: int, chunks: int, memory: float | Sequence[float] | None) -> list[int]:
    """Return for each rank the number of activations that it may hold, each of one microbatch in one stage."""
    if memory is None:
        return [microbatches * chunks] * pipe
    per_rank = [memory] * pipe if isinstance(memory, int | float) else list(memory)
    if len(per_rank) != pipe:
        raise ValueError(f"memory has {len(per_rank)} limits for {pipe} ranks: give one number, or one each")
    if min(per_rank) < 1:
        raise ValueError(f"memory={min(per_rank):g} is too little for one microbatch's activations: give 1 or more")
    return [int(x * chunks + 1e-9) for x in per_rank]


def _fitting(pipe: int, microbatches: int, chunks: int, limits: Sequence[int]) -> list[Schedule]:
    """Return the schedules from which the search starts: named ones within `limits`, and some that always fit.

    The search has no pairs: the two passes of a named schedule's pair run one after the other.
    """
    schedules = []
    for name, recipe in RECIPES.items():
        if name == "forward" or not recipe.accepts(chunks) or microbatches < recipe.least(pipe):
            continue
        schedule = without_pairs(named_schedule(name, pipe, microbatches, chunks))
        schedules += [made for made in (schedule, *_others(schedule)) if _fits(made, limits)]
    for placement in sorted({zigzag(pipe, chunks), loop(pipe, chunks)}):
        stages_of = [[s for s in range(pipe * chunks) if placement[s] == r] for r in range(pipe)]
        passes = [[("F", s) for s in stages] + [("B", s) for s in reversed(stages)] for stages in stages_of]
        alone = tuple(tuple(Op(kind, s, m) for m in range(microbatches) for kind, s in ops) for ops in passes)
        schedules.append(Schedule(ALONE, pipe, microbatches, chunks, placement, alone))
    return schedules


def without_pairs(schedule: Schedule) -> Schedule:
    """Return a schedule whose passes run one after the other."""
    if not schedule.pairs:
        return schedule
    return replace(schedule, name=f"{schedule.name} without pairs", pairs=frozenset())


def _others(schedule: Schedule) -> list[Schedule]:
    """Return the squeezed variants of a ZB-V, V-Half or V-Min schedule; an empty list for others.

    At other costs than F = I = W a variant may be better than the schedule.
    """
    if schedule.name not in STEADY_STATES:
        return []
    return [
        replace(other, name=schedule.name)
        for other in squeezed_variants(schedule.name, schedule.pipe, schedule.microbatches)
    ]


def _made(starts: Sequence[Start], codes: int, rng: random.Random) -> list[Start]:
    """Return a steady state for each number of chunks in a zigzag of stages, where one is found that fits.

    For a small schedule also one for the other placement, and list schedules for both.
    """
    made: list[Start] = []
    problems = [problem for _, problem, schedule in starts if schedule.name == ALONE]
    problems = [p for p in problems if _is_small(p) or p.placement == zigzag(p.pipe, p.chunks)]
    for problem in problems:
        results = [search_steady_state(problem, int(STEADY * codes) // len(problems), rng)]
        if _is_small(problem):
            results.append(_list_schedules(problem, int(GREEDY * codes) // len(problems), rng))
        made += [(result[0], problem, _schedule(problem, *result[1:])) for result in results if result is not None]
    return made


def _is_small(problem: Problem) -> bool:
    return 2 * len(problem.placement) * problem.microbatches <= SMALL


def _list_schedules(problem: Problem, codes: int, rng: random.Random) -> tuple[float, Sequences, list[float]] | None:
    """Return the fastest of a few list schedules: the plain one, and those with random delays."""
    best: tuple[float, Sequences, list[float]] | None = None
    work = 2 * len(problem.placement) * problem.microbatches * problem.pipe  # of one list schedule, in codes
    most = max(1, min(min(problem.limits) // problem.chunks, problem.microbatches))
    for tried in range(min(TRIES, 1 + codes // work)):
        spread = 1.5 * rng.random() if tried > most else 0.0
        sequences = list_schedule(problem, rng, spread, 1 + tried % most)
        for patience in (0.0, PATIENCE):
            decoded, _ = decode(problem, sequences, [patience] * problem.pipe)
            if decoded is not None and (best is None or decoded.makespan < best[0]):
                best = decoded.makespan, sequences, [patience] * problem.pipe
    return best


def _second(candidates: Sequence[Start]) -> int:
    """Return the index of the second start to improve: the second best; of another placement for a small schedule.

    A start far behind the first is not worth its share of the work.
    """
    first = candidates[0]
    near = [i for i, start in enumerate(candidates) if i and start[0] < 1.1 * first[0]]
    others = [i for i in near if _is_small(first[1]) and candidates[i][1].placement != first[1].placement]
    return next(iter(others or near), 0)


def _fits(schedule: Schedule, limits: Sequence[int]) -> bool:
    peaks = peak_activations(schedule)
    return all(peak * schedule.chunks <= limit + 1e-9 for peak, limit in zip(peaks, limits, strict=True))


def _improve(problem: Problem, start: Schedule, codes: int, rng: random.Random) -> Schedule:
    sequences = encode(problem, start.orders)
    patience = [PATIENCE] * problem.pipe
    decoded, _ = decode(problem, sequences, patience)
    if decoded is None:
        return start  # with split backwards it exceeds the memory limit
    kept = decoded.makespan, sequences, patience
    few = 3 * problem.pipe
    # a long schedule has fewer tries per code: stay closer to its start
    is_small = _is_small(problem)
    heat = 1.0 if is_small else 0.1 if sum(map(len, sequences)) <= 400 else 0.02
    short = _shorten(problem, sequences, problem.microbatches - few)
    if short is not None:
        small, cut, places = short
        period = 2 * problem.chunks
        frozen = [(position, position + period) for position in places]
        _, cut, patience = anneal(small, cut, patience, codes, rng, heat, frozen)
        periods = problem.microbatches - few
        longer = [
            sequence[:at] + sequence[at : at + period] * periods + sequence[at:]
            for sequence, at in zip(cut, places, strict=True)
        ]
        decoded, _ = decode(problem, longer, patience)
        if decoded and decoded.makespan < kept[0]:
            kept = decoded.makespan, longer, patience
    else:
        annealed = anneal(problem, sequences, patience, codes, rng, heat, weights=is_small)
        kept = min(kept, annealed, key=lambda entry: entry[0])
    return _schedule(problem, kept[1], kept[2])


def _schedule(problem: Problem, sequences: Sequences, patience: Sequence[float]) -> Schedule:
    """Decode sequences and return their orders, with the weight gradients."""
    decoded, _ = decode(problem, sequences, patience, full=True)
    assert decoded is not None and decoded.orders is not None
    orders = tuple(tuple(_join_backward(order)) for order in decoded.orders)
    return Schedule("auto", problem.pipe, problem.microbatches, problem.chunks, problem.placement, orders)


def _shorten(problem: Problem, sequences: Sequences, drop: int) -> tuple[Problem, Sequences, list[int]] | None:
    """Cut `drop` microbatches out of a long schedule: the same part out of each rank's steady state.

    A steady state repeats a period, which has the forward and the input gradient of one microbatch in each chunk.

    Returns:
        (problem with fewer microbatches, shorter sequences, for each rank the index of a period of the steady state
        that stays), or None if a sequence has no steady state of that length, or the steady states are not at the same
        time.
    """
    if drop < 4:
        return None
    period = 2 * problem.chunks
    small = replace(problem, microbatches=problem.microbatches - drop)
    cut, stretches = [], []
    for sequence in sequences:
        start, end = _steady(sequence, period)
        if end - start < (drop + 2) * period or len(set(sequence[start : start + period])) < period:
            return None
        cut.append(sequence[:start] + sequence[start + drop * period :])
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


def _steady(sequence: Sequence[int], period: int) -> tuple[int, int]:
    """Return the longest range (start, stop) of a sequence in which each code equals the one `period` places before."""
    best, start = (0, 0), 0
    for i in range(len(sequence) - period + 1):
        if i == len(sequence) - period or sequence[i] != sequence[i + period]:
            if i + period - start > best[1] - best[0]:
                best = (start, i + period)
            start = i + 1
    return best


def _join_backward(order: Sequence[Op]) -> list[Op]:
    """Join adjacent I and W of stage 0 into B: no rank waits for that input gradient."""
    out: list[Op] = []
    for op in order:
        if op.kind == "W" and op.stage == 0 and out and out[-1] == op._replace(kind="I"):
            out[-1] = op._replace(kind="B")
        else:
            out.append(op)
    return out
