"""Search for a cut of a list of layers into stages by the layers' costs, and for the schedule and chunks that suit it.

    >>> from triax.pipe.program.layer_costs import LayerCost
    >>> costs = LayerCosts([LayerCost(1.0, 1.0, 1.0)] * 5 + [LayerCost(4.0, 4.0, 4.0)])
    >>> find_cut("time", costs, pipe=2, microbatches=4).boundaries
    (0, 5, 6)

``time``: of the cuts that fit in memory, the cut with the least makespan, as ``simulate`` computes it. ``memory``: the
cut whose fullest rank has the fewest bytes; of several such cuts, the one with the least makespan. ``auto``: as
``time``, over several schedules.

The search starts from the best cut by a lower bound of the makespan, which dynamic programming over the slowest stage
finds. It improves the cut by moves of boundaries: of one, of two, and of a run of them, which carries a layer to a
distant stage. Then it simulates the cuts that the lower bound does not exclude, up to ``MOST_CUTS``. If these are all
of them, the result is proved to be the best. All cuts of one round are simulated at once, as arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, pairwise, product
from typing import Any

import numpy as np

from ..base.errors import ConfigError
from .partition import SEARCHED, balanced, uniform
from .program.activations import counts_in_flight, peak_activations
from .program.layer_costs import LayerCosts
from .program.schedule import Schedule
from .program.simulate import simulate, timeline_of
from .schedules.registry import RECIPES, named_schedule

# Schedules of "auto": of equal ones, the first.
SCHEDULES = tuple(name for name, recipe in RECIPES.items() if recipe.searched)
MOST_CHUNKS = 4  # of "auto"
MOST_CUTS = 5_000  # cuts that are simulated
ROUND = 1000  # cuts of one simulation
_WIDTH = 6  # times MOST_CUTS: cuts of the first stages that are compared by their bounds
_STEPS = (-2, -1, 0, 1, 2)  # of a boundary in a move
_EXACT = 1 - 1e-12  # share of a makespan by which a bound may be off, from rounding

Array = Any  # of numpy


@dataclass(frozen=True)
class StageCut:
    """Cut of a list of layers into the stages of a schedule, with what it costs.

    Attributes:
        method: what it was chosen for: ``time``, ``memory`` or ``auto``; or how it was made, such as ``uniform``.
        schedule: the schedule.
        boundaries: stage s has the layers ``boundaries[s]`` to ``boundaries[s + 1] - 1``.
        makespan: seconds of the passes of a step.
        bubble: idle share of the busiest rank.
        peaks: bytes of each rank: weights, gradients, optimizer state, and activations in flight.
        proved: True if no other cut for this schedule is better.
    """

    method: str
    schedule: Schedule
    boundaries: tuple[int, ...]
    makespan: float
    bubble: float
    peaks: tuple[float, ...]
    proved: bool = False

    def __str__(self) -> str:
        return (
            f"{self.method}: {list(self.boundaries)}, {self.schedule.name}, chunks {self.schedule.chunks}, "
            f"{1e3 * self.makespan:.4g} ms, bubble {self.bubble:.1%}, at most {max(self.peaks) / 1e9:.4g} GB a rank"
        )


def judged(method: str, costs: LayerCosts, schedule: Schedule, boundaries: Sequence[int]) -> StageCut:
    """Return a cut with what it costs."""
    timed = simulate(schedule, costs.of_stages(boundaries, schedule.placement))
    return StageCut(
        method, schedule, tuple(map(int, boundaries)), timed.makespan, timed.bubble, _peaks(costs, schedule, boundaries)
    )


def find_cut(
    method: str,
    costs: LayerCosts,
    pipe: int,
    microbatches: int,
    schedule: str | Schedule = "1f1b",
    chunks: int | None = None,
    limit: float | Sequence[float] | None = None,
) -> StageCut:
    """Search for the best cut. The result depends on the arguments alone, so every rank of a run finds the same one.

    Args:
        method: ``time``, ``memory`` or ``auto``.
        costs: costs of the layers.
        pipe: ranks of the pipe axis.
        microbatches: microbatches of a step.
        schedule: name of a schedule, or the schedule; for ``auto``, which chooses one, it has no meaning.
        chunks: stages per rank; None: the schedule's default, and for ``auto`` what is best.
        limit: bytes that a rank may take, one number or one for each rank; None: no limit.

    Raises:
        ConfigError: no cut was found within the limit; the message has the numbers of the cut that comes nearest.
        ValueError: an unknown method or schedule, or fewer layers than stages.
    """
    if method not in SEARCHED:
        raise ValueError(f"there is no search for {method!r}: give one of {', '.join(SEARCHED)}")
    limits = _limits(limit, pipe)
    if method == "auto":
        made = list(_candidates(len(costs.layers), pipe, microbatches, chunks))
    else:
        made = [named_schedule(schedule, pipe, microbatches, chunks) if isinstance(schedule, str) else schedule]
    best: tuple[tuple[float, float], Schedule, Array] | None = None
    proved = True
    for order in made:
        uniform(len(costs.layers), order.stages)  # refuses too few layers
        key, cut, exact = _CutSearch(costs, order, limits, method == "memory").run(None if best is None else best[0])
        proved = proved and exact
        if best is None or key < best[0]:
            best = key, order, cut
    if best is None:
        raise ValueError(f"none of {', '.join(SCHEDULES)} runs {chunks} chunks on {pipe} ranks: leave chunks out")
    cut_found = replace(judged(method, costs, best[1], best[2]), proved=proved)
    _require_within(cut_found, costs, limits)
    return cut_found


def compare_cuts(
    costs: LayerCosts,
    pipe: int,
    microbatches: int,
    schedule: str | Schedule = "1f1b",
    chunks: int | None = None,
    limit: float | Sequence[float] | None = None,
) -> list[StageCut]:
    """Return cuts beside one another: ``uniform``, ``parameters``, ``time``, ``memory`` and ``auto``.

    The first two ignore the limit. Of the other three, the list has the cuts that are found within the limit. Arguments
    as for ``find_cut``.

    Raises:
        ConfigError: no cut was found within the limit.
    """
    own = named_schedule(schedule, pipe, microbatches, chunks) if isinstance(schedule, str) else schedule
    layers = costs.layers
    rows = [
        judged("uniform", costs, own, uniform(len(layers), own.stages)),
        judged("parameters", costs, own, balanced([layer.states for layer in layers], own.stages)),
    ]
    problem: ConfigError | None = None
    for method in SEARCHED:
        try:
            rows.append(find_cut(method, costs, pipe, microbatches, own, chunks if method == "auto" else None, limit))
        except ConfigError as error:
            problem = error
    if problem is not None and len(rows) == 2:
        raise problem
    return rows


def _candidates(layers: int, pipe: int, microbatches: int, chunks: int | None) -> Iterator[Schedule]:
    for name in SCHEDULES:
        for count in range(1, MOST_CHUNKS + 1) if chunks is None else (chunks,):
            if RECIPES[name].accepts(count) and pipe * count <= layers and microbatches >= RECIPES[name].least(pipe):
                yield named_schedule(name, pipe, microbatches, count)


def _limits(limit: float | Sequence[float] | None, pipe: int) -> list[float]:
    limits = (
        [float(limit)] * pipe if isinstance(limit, (int, float)) else [np.inf] * pipe if limit is None else [*limit]
    )
    if len(limits) != pipe or not all(share > 0 for share in limits):
        raise ValueError(
            f"limit is {limit} for {pipe} ranks of the pipe axis: give bytes above 0, one number or one each"
        )
    return limits


def _peaks(costs: LayerCosts, schedule: Schedule, boundaries: Sequence[int]) -> tuple[float, ...]:
    """Return the bytes of each rank."""
    stages = [costs.layers[start:stop] for start, stop in pairwise(boundaries)]
    kept = peak_activations(schedule, [sum(layer.kept for layer in stage) for stage in stages])
    states = [0.0] * schedule.pipe
    for stage, rank in zip(stages, schedule.placement, strict=True):
        states[rank] += sum(layer.states for layer in stage)
    return tuple(a + b for a, b in zip(states, kept, strict=True))


def _require_within(cut: StageCut, costs: LayerCosts, limits: Sequence[float]) -> None:
    """Check that a cut keeps the limits.

    Raises:
        ConfigError: it does not.
    """
    over = {
        peak / limit: rank for rank, (peak, limit) in enumerate(zip(cut.peaks, limits, strict=True)) if peak > limit
    }
    if not over:
        return
    rank = over[max(over)]
    own = [s for s, home in enumerate(cut.schedule.placement) if home == rank]
    states = sum(layer.states for s in own for layer in costs.layers[cut.boundaries[s] : cut.boundaries[s + 1]])
    sought = "any schedule" if cut.method == "auto" else f"{cut.schedule.name} with {cut.schedule.chunks} chunks"
    raise ConfigError(
        f"no cut of {len(costs.layers)} layers over {cut.schedule.pipe} ranks with {sought} was found within "
        f"{limits[rank] / 1e9:.4g} GB a rank. The nearest, {list(cut.boundaries)} with {cut.schedule.name}, takes "
        f"{cut.peaks[rank] / 1e9:.4g} GB on rank {rank}: {states / 1e9:.4g} GB of weights, gradients and optimizer "
        f"state, and {(cut.peaks[rank] - states) / 1e9:.4g} GB of activations. Use more pipe ranks, smaller "
        "microbatches, recomputation, a higher ZeRO stage or another schedule, or raise the limit"
    )


class _CutSearch:
    """Search for the cut of one schedule.

    A cut is a row of boundaries, and K cuts are an array (K, stages + 1). A pair is minimised: for time, (excess over
    the memory limits, makespan); for memory, (share of the limits that the fullest rank takes, makespan).

    Args:
        costs: costs of the layers.
        schedule: the schedule.
        limits: bytes of each rank.
        least_memory: minimise memory, and not time.
    """

    def __init__(self, costs: LayerCosts, schedule: Schedule, limits: Sequence[float], least_memory: bool) -> None:
        self._costs, self._schedule, self._place = costs, schedule, schedule.placement
        self._limits, self._least_memory = limits, least_memory
        self._stages, self._count = schedule.stages, len(costs.layers)
        self._scale = [1.0 if limit == np.inf else limit for limit in limits]
        self._sums = {
            name: np.concatenate([[0.0], np.cumsum([getattr(layer, name) for layer in costs.layers])])
            for name in ("forward", "inputs", "weights", "states", "kept")
        }
        self._hops = np.array([costs.latency + costs.per_byte * layer.output for layer in costs.layers])
        speeds = costs.speed_of(schedule.pipe)
        self._speeds = [speeds[rank] for rank in schedule.placement]
        self._fastest = max(speeds)
        spans = [(s.start, rank, s.op) for rank, row in enumerate(timeline_of(schedule).rows) for s in row]
        # With passes of time 1, an op starts after those whose results it reads.
        self._ops = [(rank, *op) for _, rank, op in sorted(spans)]
        self._split = any(op.kind in "IW" for order in schedule.orders for op in order)
        counts = counts_in_flight(schedule)
        self._own = [[s for s, home in enumerate(self._place) if home == rank] for rank in range(schedule.pipe)]
        self._flights = [np.array(counts_of_rank, dtype=float) for counts_of_rank in counts]
        self._needed, self._next = self._bottleneck()

    def run(self, known: tuple[float, float] | None) -> tuple[tuple[float, float], Array, bool]:
        """Return (the pair, the boundaries, True if no cut is better).

        Args:
            known: a pair that is reached elsewhere: cuts that are no better need not be found.
        """
        if known is not None and (0.0, self._needed[0, 0] * _EXACT) >= known and not self._least_memory:
            return (np.inf, np.inf), np.array(self._start()), True
        sizes = [[getattr(layer, name) for layer in self._costs.layers] for name in ("states", "kept")]
        starts = [self._start(), uniform(self._count, self._stages), *(balanced(size, self._stages) for size in sizes)]
        key, best = self._descend(*self._best(np.unique(np.array(starts), axis=0)))
        aim = key if known is None else min(key, known)
        cuts, bounds, exact = self._not_excluded(aim)
        for at in range(0, len(cuts), ROUND):
            if at >= MOST_CUTS:
                exact = False
                break
            if (self._least_memory or bounds[at] < aim[1]) and (nearby := self._best(cuts[at : at + ROUND]))[0] < key:
                key, best = nearby
                aim = min(key, aim)
        return (key, best, True) if exact else (*self._descend(key, best), False)

    def _descend(self, key: tuple[float, float], cut: Array) -> tuple[tuple[float, float], Array]:
        """Return a pair and its cut, after moves that make the pair less."""
        while (step := self._best(self._moves(cut)))[0] < key:
            key, cut = step
        return key, cut

    def _start(self) -> list[int]:
        """Return the cut with the least lower bound."""
        cut = [0]
        for stage in range(self._stages):
            cut.append(int(self._next[stage, cut[-1]]))
        return cut

    def _moves(self, cut: Array) -> Array:
        """Return the cuts to which moves lead: of one boundary, of two, and of all between two."""
        inner = self._stages - 1
        shifts = {(0,) * inner}
        for i, j in combinations_with_replacement(range(inner), 2):
            for a, b in product(_STEPS, repeat=2):
                shift = [0] * inner
                shift[i], shift[j] = a, b
                shifts.add(tuple(shift))
            for a in _STEPS:
                shifts.add((0,) * i + (a,) * (j - i + 1) + (0,) * (inner - 1 - j))
        moved = np.repeat(cut[None], len(shifts), axis=0)
        if inner:
            moved[:, 1:-1] += np.array(sorted(shifts))
        return moved[(np.diff(moved, axis=1) > 0).all(axis=1)]

    def _best(self, cuts: Array) -> tuple[tuple[float, float], Array]:
        """Return the least pair of cuts, and the cut."""
        first, second = self._first(self._shares(cuts, self._stages)), self._makespans(cuts)
        at = np.lexsort((second, first))[0]
        return (float(first[at]), float(second[at])), cuts[at]

    def _first(self, shares: Array) -> Array:
        return shares if self._least_memory else np.maximum(0.0, shares - 1.0)

    def _loads(self, cuts: Array, stages: int) -> list[Array]:
        """Return (stages, K) seconds of F, I and W of the first stages of cuts, and of the messages behind them."""
        speeds = np.array(self._speeds[:stages])[:, None]
        passes = [self._sums[name][cuts.T] for name in ("forward", "inputs", "weights")]
        return [*((np.diff(sums, axis=0)[:stages] / speeds) for sums in passes), self._hop(cuts, stages)]

    def _hop(self, cuts: Array, stages: int) -> Array:
        same = [s + 1 == self._stages or self._place[s] == self._place[s + 1] for s in range(stages)]
        return np.where(np.array(same)[:, None], 0.0, self._hops[cuts.T[1 : stages + 1] - 1])

    def _makespans(self, cuts: Array) -> Array:
        """Return the makespan of each cut, as ``simulate`` does for one."""
        f, i, w, hop = self._loads(cuts, self._stages)
        b = i + w
        zero, last = np.zeros(len(cuts)), self._stages - 1
        clock = [zero] * self._schedule.pipe
        ready: dict[tuple[bool, int, int], Array] = {}
        for rank, kind, stage, microbatch in self._ops:
            now = clock[rank]
            if kind == "W":
                now = now + w[stage]
            elif kind == "F":
                if stage:
                    now = np.maximum(now, ready.pop((True, stage, microbatch)))
                now = now + f[stage]
                if stage < last:
                    ready[True, stage + 1, microbatch] = now + hop[stage]
            else:
                if stage < last:
                    now = np.maximum(now, ready.pop((False, stage, microbatch)))
                now = now + (b if kind == "B" else i)[stage]
                if stage:
                    ready[False, stage - 1, microbatch] = now + hop[stage - 1]
            clock[rank] = now
        return np.maximum.reduce(clock)

    def _shares(self, cuts: Array, stages: int) -> Array:
        """Return the share of its limit that the fullest rank takes, with the first stages of cuts."""
        states, kept = (np.diff(self._sums[name][cuts.T], axis=0) for name in ("states", "kept"))
        shares = np.zeros(len(cuts))
        for own, flights, scale, limit in zip(self._own, self._flights, self._scale, self._limits, strict=True):
            known = [s for s in own if s < stages]
            if known and (self._least_memory or limit < np.inf):
                peak = states[known].sum(axis=0) + (flights[:, : len(known)] @ kept[known]).max(axis=0)
                shares = np.maximum(shares, peak / scale)
        return shares

    # -------------------------------------------------------------------------------------------- lower bounds

    def _bottleneck(self) -> tuple[Array, Array]:
        """Return arrays by (s, i): the least bound of the makespan of all cuts of the layers from i on into the stages
        from s on, and where stage s then ends.

        Stage s runs its first op when one microbatch has passed the layers before it, and then all its passes; and when
        its last gradient is sent, that has to pass the layers before it.
        """
        before = {name: sums[:-1] / self._fastest for name, sums in self._sums.items()}
        head = before["forward"]
        tail = before["inputs"] + (0.0 if self._split else before["weights"])
        need = np.full((self._stages + 1, self._count + 1), np.inf)
        need[self._stages, self._count] = 0.0
        after = np.zeros((self._stages, self._count + 1), dtype=int)
        for stage in range(self._stages)[::-1]:
            for start in range(stage, self._count):
                f, i, w = (
                    self._schedule.microbatches * (sums[start + 1 :] - sums[start]) / self._speeds[stage]
                    for sums in (self._sums["forward"], self._sums["inputs"], self._sums["weights"])
                )
                bounds = np.maximum(self._bound(f, i, w, head[start], tail[start]), need[stage + 1, start + 1 :])
                at = int(np.argmin(bounds))
                need[stage, start], after[stage, start] = bounds[at], start + 1 + at
        return need, after

    def _bound(self, f: Array, i: Array, w: Array, head: Array, tail: Array) -> Array:
        """Return the bound of a stage, from the seconds of all its passes and the seconds before and after them."""
        if self._split:  # weight gradients may come when the last gradient is sent
            return np.maximum(head + f + i + w, head + f + i + tail)
        return head + f + i + w + tail

    def _not_excluded(self, aim: tuple[float, float]) -> tuple[Array, Array, bool]:
        """Return cuts with lower bounds below ``aim``, their bounds, and True if these are all such cuts.

        The cuts grow by one stage at a time. The bound excludes cuts at each stage; if too many are left, the cuts with
        the largest bounds are dropped too.
        """
        cuts, exact, m = np.zeros((1, 1), dtype=int), True, self._schedule.microbatches
        for stage in range(self._stages):
            left, known = self._stages - stage - 1, stage + 1
            ends = [np.arange(last + 1, self._count - left + 1) for last in cuts[:, -1]] if left else []
            ends = ends or [np.array([self._count])] * len(cuts)
            cuts = np.column_stack([np.repeat(cuts, [len(stops) for stops in ends], axis=0), np.concatenate(ends)])
            f, i, w, hop = self._loads(cuts, known)
            back = i if self._split else i + w
            start = np.cumsum(np.vstack([np.zeros(len(cuts)), (f + hop)[:-1]]), axis=0)
            end = np.cumsum(np.vstack([np.zeros(len(cuts)), (back + hop)[:-1]]), axis=0)
            bound = self._bound(m * f, m * i, m * w, start, end).max(axis=0)
            for own in self._own:
                if (earlier := [s for s in own if s <= stage])[1:]:
                    bound = np.maximum(bound, start[earlier[0]] + m * (f + i + w)[earlier].sum(axis=0))
            bound = np.maximum(bound, self._needed[known, cuts[:, -1]]) * _EXACT
            first = self._first(self._shares(cuts, known))
            keep = np.flatnonzero((first < aim[0]) | ((first <= aim[0]) & (bound < aim[1])))
            keep = keep[np.lexsort((bound[keep], first[keep]) if self._least_memory else (bound[keep],))]
            width = _WIDTH * MOST_CUTS // self._count
            exact, keep = exact and (len(keep) <= width or not left), keep[: width if left else None]
            cuts, bounds = cuts[keep], bound[keep]
            if not len(keep):
                return np.zeros((0, self._stages + 1), dtype=int), bounds, exact
        return cuts, bounds, exact
