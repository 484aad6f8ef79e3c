"""Search for the fastest layouts that fit, exact: nothing is left out but what a lower bound excludes.

The space is every combination of the axes' sizes, microbatch, chunks, schedule, ZeRO stage, recomputation and offload
that the model, the batch and the number of ranks admit. It is searched best first: nodes (axes and microbatch) in the
order of a lower bound of their time, until no bound is below the time of the worst layout kept.

Lower bounds, each for all layouts of a node or of a part of it:

- time: the microbatches' passes through 1/pipe of the model, without recomputation, messages or ZeRO, and the least
  bubble of the schedules
- memory: model states of 1/pipe of the model; the activations of the first pipe rank's blocks, of the microbatches
  that its schedule has in flight, and the margin for their fragments

Then come layouts with options of the schedule, where those can win (``Searcher.changes``). Each is simulated, so they
are tried in the order of their own bounds, after the others, until no bound is below the time of the worst layout kept.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ...pipe.program.slices import require_slices
from ...pipe.schedules.registry import RECIPES
from .cached import cached_method
from .cost import CostModel, StepTime, utilization
from .layer_memory import LayerSplit
from .memory import FRAGMENTS, RankMemory
from .parallel_layout import CHANGES, KNOWN_RECOMPUTATION, RECOMPUTATION, UNCHANGED, ParallelLayout
from .work import Work

SCHEDULES = tuple(name for name, recipe in RECIPES.items() if recipe.searched and recipe.closed is not None)
MOST_CHUNKS = 8  # beyond those that divide the blocks evenly
LEAST_SLICE = 4096  # tokens of a slice: products of fewer rows take longer per token
SHARES = (0.25, 0.5, 0.75, 1.0)  # of activations that are recomputed or offloaded
ROOM = 0.05  # share of a GPU's memory that should stay free beside the margin: the formulas were off by up to 3 %
_JUST_BELOW = 1 - 1e-8  # a bound is another sum of the same numbers, and times are compared in nine digits


class Planned(NamedTuple):
    """One layout with its time and the memory of the pipe rank that needs most."""

    layout: ParallelLayout
    time: StepTime
    memory: RankMemory


@dataclass
class Search:
    """Result of a search: the best layouts that fit, the fastest first, and what became of the others.

    Attributes:
        layouts: the best layouts.
        considered: number of layouts in the space.
        excluded: reason -> number of layouts that were excluded for it.
        seconds: time of the search.
        nearest: the layout that needs least memory, if none fits.
    """

    layouts: list[Planned]
    considered: int
    excluded: dict[str, int]
    seconds: float
    nearest: Planned | None = None


@dataclass(frozen=True)
class Space:
    """Layouts to search: for each key of ``ParallelLayout`` the values that are given; a key left out is free.

    Attributes:
        gpus: number of ranks.
        given: key -> its values.
        memory: bytes that a rank may hold, or of each rank of the pipe axis; None: the machine's.
    """

    gpus: int
    given: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    memory: float | Sequence[float] | None = None


class _Node(NamedTuple):
    """Layouts of the same axes and microbatch."""

    bound: float  # of their times
    order: int
    layout: ParallelLayout  # with the axes and the microbatch
    microbatches: int


class _ScheduleChange(NamedTuple):
    """Options of a schedule that are tried on the layouts of a node."""

    schedule: str
    chunks: int
    values: tuple[Any, ...]  # of ``CHANGES``
    recomputes: tuple[str, ...]


class Searcher:
    """Search of a space for one model, machine, batch and sequence.

    Args:
        work: model, machine, batch and sequence.
        space: the layouts to search.
    """

    MEMORY, SLOWER, EMPTY = "does not fit in memory", "slower than the layouts kept, by a lower bound", "impossible"
    NEEDLESS = "with needless recomputation or offload by the schedule"

    def __init__(self, work: Work, space: Space) -> None:
        self.work, self.space, self.model = work, space, CostModel(work)
        self.memory = self.model.memory
        memory = work.machine.memory if space.memory is None else space.memory
        self.limits = tuple(memory) if isinstance(memory, Sequence) else ()  # of the ranks of the pipe axis
        self.limit = max(self.limits) if isinstance(memory, Sequence) else memory
        for name, numbers in (("speeds", work.speeds), ("memory", self.limits)):
            if numbers and space.given.get("pipe") != [len(numbers)]:
                raise ValueError(
                    f"--{name} has {len(numbers)} numbers, one for each rank of the pipe axis. Give --layout "
                    f"pipe={len(numbers)} too."
                )
        self.unequal = bool(work.speeds or self.limits)
        # Options of the schedule that all layouts have.
        self.asked = tuple(space.given.get(name, [value])[0] for name, value in CHANGES.items())
        self.contexts = space.given.get("context", [1] if self.asked[0] > 1 else None)
        lengths, reason = (1.0,) * self.asked[0], work.config.refuses_slices()
        require_slices(lengths, work.sequence, context=max(self.contexts or [1]), reason=reason)
        self.experts = max((layer.feedforward.experts for layer in work.layers if layer.feedforward), default=0)
        self.blocks = [index for index, layer in enumerate(work.layers) if layer.kind == "block"]

    # -------------------------------------------------------------------------------------------------- the space

    def _free(self, key: str, values: Sequence[Any]) -> list[Any]:
        """Return those of the values that the space admits."""
        given = self.space.given.get(key)
        return list(values) if given is None else [value for value in values if value in given]

    def axes(self) -> Iterator[ParallelLayout]:
        """Yield a layout for each possible size of the axes, with microbatch 1."""
        work, gpus = self.work, self.space.gpus
        sequence, config = work.sequence, work.config
        group = self.space.given.get("shard_size", [1])[0]
        for t in self._free("tensor", divisors(gpus)):
            if not self._shards(t):
                continue
            for c in divisors(gpus // t):
                if self.contexts is not None and c not in self.contexts:
                    continue
                if sequence % (2 * c if c > 1 else 1) or sequence % (c * t):
                    continue
                for p in self._free("pipe", divisors(gpus // t // c)):
                    if p > config.num_hidden_layers:
                        break
                    data = gpus // t // c // p
                    if self._free("data", [data]) and not work.batch % data and not data * c % group:
                        for e in self._free("expert", divisors(data * c) if self.experts else [1]):
                            if e == 1 or not self.experts % e:
                                yield ParallelLayout(pipe=p, data=data, context=c, tensor=t, expert=e)

    def _shards(self, tensor: int) -> bool:
        try:
            self.work.config.check_tensor(tensor)
        except ValueError:
            return False
        return True

    def variants(self, layout: ParallelLayout, m: int) -> list[tuple[str, int]]:
        """Return the schedules and chunks of a node."""
        return self._variants(layout.pipe, m * self.asked[0])

    @cached_method
    def _variants(self, p: int, m: int) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        schedules = self.space.given.get("schedule", SCHEDULES)
        asked = "schedule" in self.space.given and "chunks" in self.space.given
        closed = {"interleaved": m % p == 0, "looped-bfs": m % p == 0, "zb-h1": m >= p}
        closed |= dict.fromkeys(("zb-h2", "zb-v"), m >= 2 * p)
        if self.asked[0] > 1 and "schedule" not in self.space.given:
            schedules = [name for name in schedules if RECIPES[name].sliced]
        if p == 1:
            found = [("1f1b", 1)] if "1f1b" in schedules or set(schedules) - {"1f1b"} else []
            found = found if 1 in self._free("chunks", [1]) else []
        else:
            blocks = len(self.blocks)
            fair = [v for v in range(1, blocks // p + 1) if v <= MOST_CHUNKS or blocks % (p * v) == 0]
            for name in schedules:
                recipe = RECIPES[name]
                # Of unequal ranks each has one stage.
                for v in self._free("chunks", [1] if self.unequal else fair):
                    if not recipe.accepts(v) or m < recipe.least(p):
                        continue
                    # The closed forms hold with whole groups of microbatches only. Others are simulated if asked for.
                    if not closed.get(name, True) and not asked:
                        continue
                    found.append((name, v))
        return found

    def stages(self, layout: ParallelLayout) -> list[tuple[int, bool]]:
        """Return the ZeRO stages of a node, each with and without offload."""
        alone = layout.data * layout.context == 1
        free = "zero" not in self.space.given
        # Without replicas all stages are alike, and only offload needs one. Without ZeRO nothing is offloaded.
        offloads = [False] if self.model.on_cores else [False, True]  # ranks on a CPU have no other memory
        return [
            (zero, offload)
            for zero in self._free("zero", [0, 1, 2, 3])
            for offload in self._free("offload", offloads)
            if not (offload and zero == 0) and not (alone and free and zero != offload)
        ]

    def nodes(self) -> Iterator[_Node]:
        """Yield every node that has layouts."""
        order = 0
        for axes in self.axes():
            most = self.work.batch // axes.data
            for b in self._free("microbatch", divisors(most)):
                m = most // b
                if self.variants(axes, m):
                    layout = replace(axes, microbatch=b)
                    yield _Node(self._time_bound(layout, m), order, layout, m)
                    order += 1

    def changes(self, layout: ParallelLayout, m: int) -> list[_ScheduleChange]:
        """Return the options of schedules that can make a node's layouts faster, where ``Space.given`` has none.

        All without a context axis:

        - slices, with 1f1b and interleaved in two chunks: for a model that they are exact for, of microbatches of one
          sequence, with ``LEAST_SLICE`` tokens or more
        - shares of activations that are recomputed by ops, or offloaded, with 1f1b, and interleaved in two chunks: for
          layouts that do not fit without, in place of ``recompute`` of layers, and whose copies take no longer than
          their passes

        Pairs of passes are planned only if they are given: no published run tells how much of a collective hides behind
        another pass on one device.
        """
        p = layout.pipe
        if p == 1 or layout.context > 1 or self.unequal or self.model.on_cores or self.asked != UNCHANGED:
            return []
        return self._changes(p, m, layout.microbatch == 1 and self.work.config.refuses_slices() is None)

    @cached_method
    def _changes(self, p: int, m: int, cut: bool) -> list[_ScheduleChange]:
        """Return ``changes`` of pipe ranks and microbatches; ``cut``: sequences can be cut into slices."""
        found: list[_ScheduleChange] = []
        given, recomputes = self.space.given, tuple(self._recomputes())
        one, two = (self._free("chunks", [v]) if v <= len(self.blocks) // p else [] for v in (1, 2))

        def add(name: str, chunks: Sequence[int], values: tuple[Any, ...], recomputes: tuple[str, ...]) -> None:
            if self._free("schedule", [name]) and m >= RECIPES[name].least(p):
                found.extend(_ScheduleChange(name, v, values, recomputes) for v in chunks if RECIPES[name].accepts(v))

        if cut and "slices" not in given:
            for n in (2, 4, 8, 16):
                if self.work.sequence >= n * LEAST_SLICE:
                    add("1f1b", one, (n, *UNCHANGED[1:]), recomputes)
                    add("interleaved", two if m * n % p == 0 else (), (n, *UNCHANGED[1:]), recomputes)
        for place, name in ((2, "recompute_ops"), (3, "offload_activations")):
            for share in SHARES if name not in given and "none" in recomputes else ():
                values = tuple(share if i == place else value for i, value in enumerate(UNCHANGED))
                add("1f1b", one, values, ("none",))
                if m % p == 0:
                    add("interleaved", two, values, ("none",))
        return found

    def _changed_stages(self, layout: ParallelLayout) -> list[tuple[int, bool]]:
        """Return the ZeRO stages of layouts with options: stages 2 and 3 communicate in each pass, unless given."""
        return [
            stage
            for stage in self.stages(layout)
            if ("zero" in self.space.given or stage[0] < 2) and ("offload" in self.space.given or not stage[1])
        ]

    def layouts(self, node: _Node) -> Iterator[ParallelLayout]:
        """Yield every layout of a node."""
        for schedule, chunks in self.variants(node.layout, node.microbatches):
            for zero, offload in self.stages(node.layout):
                for recompute in self._recomputes():
                    yield self._layout(node.layout, schedule, chunks, zero, offload, recompute)
        for change in self.changes(node.layout, node.microbatches):
            for zero, offload in self._changed_stages(node.layout):
                for recompute in change.recomputes:
                    yield self._layout(node.layout, *change[:2], zero, offload, recompute, change.values)

    def needless(self, layout: ParallelLayout) -> bool:
        """Return True if a layout recomputes or offloads by its schedule, which was not asked for, without need.

        It fits without, or its copies take longer than its passes, so that not all of them fit between these.
        """
        if self.asked != UNCHANGED or not any(layout.changes[2:]):
            return False
        slow = bool(layout.offload_activations) and self.model.option_step(layout).copies > 1
        return slow or self._fullest(without_changes(layout))[1]

    def _layout(
        self,
        layout: ParallelLayout,
        schedule: str,
        chunks: int,
        zero: int,
        offload: bool,
        recompute: str,
        changes: Sequence[Any] | None = None,
    ) -> ParallelLayout:
        sharded, group = (self.space.given.get(name, [None])[0] for name in ("sequence_parallel", "shard_size"))
        made = ParallelLayout(
            *(layout.pipe, layout.data, layout.context, layout.tensor, layout.expert, layout.microbatch),
            *(chunks, schedule, zero, recompute, offload, sharded, *(self.asked if changes is None else changes)),
        )
        return made if group is None else replace(made, shard_size=group)

    def impossible(self) -> str:
        """Return the reason why the space is empty."""
        given, gpus = self.space.given, self.space.gpus
        named = {name: given[name][0] for name in ("pipe", "data", "context", "tensor") if name in given}
        what = ", ".join(f"{name}={value}" for name, values in given.items() for value in values)
        for name, size in {**named, "x".join(named): math.prod(named.values())}.items():
            if gpus % size:
                return f"{name}={size}, which does not divide {gpus} GPUs"
        if (data := given.get("data", [1])[0] * given.get("microbatch", [1])[0]) and self.work.batch % data:
            return f"data x microbatch = {data}, which does not divide batch {self.work.batch}"
        return what or f"{self.work.config.num_hidden_layers} blocks and these numbers of heads"

    def _recomputes(self) -> list[str]:
        """Return the kinds of recomputation; layers that ops of the schedule run again are not run a third time."""
        return list(self.space.given.get("recompute", ("none",) if self.asked[2] else RECOMPUTATION))

    # -------------------------------------------------------------------------------------------------- the bounds

    def _passes(self, layout: ParallelLayout, schedule: str = "") -> tuple[float, float, float]:
        """Return the seconds of the model's forward pass, input and weight gradients, for one microbatch.

        In the pairs of a schedule, all collectives of the tensor and expert axes may hide.
        """
        hidden = self.asked[1] or (schedule != "" and RECIPES[schedule].pairs is not None)
        return self._passes_of(layout.microbatch, layout.context, layout.tensor, layout.expert, hidden)

    @cached_method
    def _passes_of(
        self, microbatch: int, context: int, tensor: int, expert: int, hidden: bool
    ) -> tuple[float, float, float]:
        sharded = self.space.given.get("sequence_parallel", [None])[0]
        layout = ParallelLayout(1, expert, context, tensor, expert, microbatch, sequence_parallel=sharded)
        layers = [(count, self.model.layer(kind, layout)) for kind, count in Counter(self.model.kinds).items()]
        return (
            sum(count * (time.forward - hidden * (time.tensor[0] + time.expert[0])) for count, time in layers),
            sum(count * (time.backward - hidden * (time.tensor[1] + time.expert[1])) for count, time in layers),
            sum(count * time.products.weights for count, time in layers),
        )

    def _time_bound(self, layout: ParallelLayout, m: int) -> float:
        """Return a lower bound of the seconds of all layouts of a node."""
        if layout.pipe == 1:
            return self._at_least(layout, m, self._passes(layout), 0.0)
        return min(self._variant_bound(layout, m, name, v) for name, v in self.variants(layout, m))

    def _variant_bound(self, layout: ParallelLayout, m: int, schedule: str, chunks: int) -> float:
        """Return a lower bound of the seconds of a node's layouts with a schedule."""
        times = self._passes(layout, schedule)
        return self._at_least(layout, m, times, self._bubble(schedule, chunks, *times))

    def _change_bound(self, layout: ParallelLayout, m: int, change: _ScheduleChange) -> float:
        """Return a lower bound of the seconds of a node's layouts with options of the schedule.

        The last rank waits for the first slice to pass the others, and they for its gradient, and slices take equally
        long. A rank with recomputation runs that share of its forward passes again, where it may have waited.
        """
        schedule, chunks, (slices, _, recomputed, _), _ = change
        times = self._passes(layout, schedule)
        if slices > 1:
            return self._at_least(layout, m, times, 0.99 * sum(times) / (slices * chunks))  # lengths are rounded
        again = max(0.0, recomputed - 1 / m) * times[0]
        waits = self._at_least(layout, m, times, self._bubble(schedule, chunks, *times))
        return max(waits, self._at_least(layout, m, (times[0] + again, *times[1:]), 0.0))

    def _at_least(self, layout: ParallelLayout, m: int, times: tuple[float, float, float], bubble: float) -> float:
        """Return a lower bound of a step's seconds from those of ``_passes`` and ``_bubble``."""
        p, least = layout.pipe, m * sum(times)
        found = least / sum(self.work.speeds) if self.work.speeds else (least + (p - 1) * bubble) / p
        if self.model.on_cores:  # all ranks together compute no faster than the cores
            found = max(found, least * layout.gpus / p / self.model.speed_of_all(layout.gpus))
        return found * _JUST_BELOW

    def _bubble(self, schedule: str, chunks: int, forward: float, inputs: float, weights: float) -> float:
        """Return p / (p - 1) times a lower bound of a schedule's bubble; recomputation and messages only add to it."""
        closed = RECIPES[schedule].closed
        if closed is None or self.model.on_cores or self.asked != UNCHANGED:  # they are simulated
            return 0.0
        return closed.repeated(forward, inputs, weights, chunks)

    def _states_bound(self, layout: ParallelLayout, zero: int, offload: bool) -> float:
        """Return a lower bound of the bytes of model states: those of 1/pipe of the model."""
        options, total = self.memory.options, 0.0
        for numel, shards in zip(self._parameters(layout.tensor, layout.expert), layout.replicas, strict=True):
            count = numel / layout.pipe
            stage = zero if shards > 1 or offload else 0
            sharded = [shards if stage >= least else 1 for least in (3, 2, 1)]
            total += count * options.size / sharded[0]
            if not offload:
                masters = options.wide if options.wide != options.size else 0
                total += count * (options.wide / sharded[1] + (masters + options.wide * options.states) / sharded[2])
            elif stage < 2:
                total += count * options.wide / sharded[1]
        return total

    @cached_method
    def _parameters(self, tensor: int, expert: int) -> tuple[float, float]:
        """Return the dense parameters of the model on a rank without a pipe axis, and the experts'."""
        own = [
            (0.0, 0.0) if shape.kind == "head" and shape.tie else self.model.zero.parameters(kind, tensor, expert)
            for kind, shape in enumerate(self.model.types)
        ]
        return sum(own[kind][0] for kind in self.model.kinds), sum(own[kind][1] for kind in self.model.kinds)

    def _activations_bound(
        self,
        layout: ParallelLayout,
        m: int,
        schedule: str,
        chunks: int,
        recompute: str,
        changes: Sequence[Any] | None = None,
    ) -> float:
        """Return a lower bound of the bytes of activations and their fragments: blocks of the first pipe rank."""
        changes = self.asked if changes is None else changes
        p, tokens = layout.pipe, layout.microbatch * self.work.sequence / layout.context
        one = LayerSplit.of(self._layout(layout, "1f1b", 1, 0, False, recompute, UNCHANGED), tokens, self.work.sequence)
        kinds = {self.model.kinds[index] for index in self.blocks}
        kept = min(self.memory.layer_memory.activations(kind, one) for kind in kinds)
        recipe = RECIPES[schedule]
        flights = recipe.in_flight(p, m, chunks)
        if flights is not None:
            flight = max(int(sum(counts)) for counts in flights[0])
        else:
            flight = 1 if recipe.closed is None else min(p, m) * chunks  # some hold less than 1F1B
        if changes[0] > 1 or changes[2] or changes[3]:
            # The first of two chunks lives longest: half of the activations are at most three quarters of a peak.
            share = (changes[2] + changes[3]) * (1 if chunks == 1 else 1.5)
            flight = max(1, math.floor((1 - share) * flight) - 1)
            flight = 1 if changes[0] > 1 or recipe.split or not recipe.searched else flight
        return flight * self._fewest_blocks(p, chunks) * kept * (1 + FRAGMENTS)

    @cached_method
    def _fewest_blocks(self, p: int, chunks: int) -> int:
        """Return the number of blocks in a stage of the first pipe rank, at least."""
        cuts = self.memory.cuts(p * chunks)
        stages = [range(cuts[c * p], cuts[c * p + 1]) for c in range(chunks)]
        return min(sum(self.work.layers[i].kind == "block" for i in stage) for stage in stages)

    # -------------------------------------------------------------------------------------------------- the search

    def evaluate(self, layout: ParallelLayout) -> Planned:
        """Return time and memory of one layout.

        Raises:
            ValueError: the batch, the model or the sequence does not admit it.
        """
        self.memory.check(layout, self.work.sequence)
        return Planned(layout, self.model.step(layout), self._fullest(layout)[0])

    def _fullest(self, layout: ParallelLayout) -> tuple[RankMemory, bool]:
        """Return the memory of the fullest pipe rank, and True if all fit."""
        if not self.limits and layout.changes == UNCHANGED:
            peak = self.memory.peak(layout, self.work.batch, self.work.sequence)
            return peak, peak.total <= self.limit
        made = None if layout.changes == UNCHANGED else self.model.option_step(layout).schedule()
        ranks = self.memory.ranks(layout, self.work.batch, self.work.sequence, made)
        limits = self.limits or (self.limit,) * len(ranks)
        pairs = [(each.total / limit, each) for each, limit in zip(ranks, limits, strict=True)]
        share, fullest = max(pairs, key=lambda pair: pair[0])
        return fullest, share <= 1

    def without_changes(self, layout: ParallelLayout) -> Planned | None:
        """Return a layout without options of its schedule, and without pairs, and its figures; None if it has none."""
        plain = without_changes(layout)
        return None if plain == layout else self.evaluate(plain)

    def run(self, top: int = 10) -> Search:
        """Return the ``top`` fastest layouts that fit."""
        start = time.perf_counter()
        excluded: Counter[str] = Counter()
        best: list[tuple[tuple[Any, ...], Planned]] = []  # the fastest so far
        considered = 0
        nodes = sorted(self.nodes())
        recomputes = self._recomputes()
        for place, node in enumerate(nodes):
            worst = best[-1][1].time.seconds if len(best) == top else math.inf
            if node.bound > worst:  # and so are all that follow
                for rest in nodes[place:]:
                    count = self._size(rest, recomputes)
                    considered, excluded[self.SLOWER] = considered + count, excluded[self.SLOWER] + count
                break
            considered += self._size(node, recomputes)
            self._expand(node, best, top, excluded, recomputes)
        considered += self._change(nodes, best, top, excluded)
        found = Search([planned for _, planned in best], considered, dict(excluded), time.perf_counter() - start)
        if not best:
            found.nearest = self.nearest(nodes)
            found.seconds = time.perf_counter() - start
        return found

    def _change(
        self, nodes: Sequence[_Node], best: list[tuple[tuple[Any, ...], Planned]], top: int, excluded: Counter[str]
    ) -> int:
        """Put those layouts with options of the schedule among the best that belong there; return their number."""
        considered, tried = 0, []
        for number, node in enumerate(nodes):
            changes = self.changes(node.layout, node.microbatches)
            stages = self._changed_stages(node.layout) if changes else []
            worst = best[-1][1].time.seconds if len(best) == top else math.inf
            if changes:  # no bubble
                layout, m = node.layout, node.microbatches
                if self._at_least(layout, m, self._passes(layout), 0.0) > worst:
                    count = len(stages) * sum(len(change.recomputes) for change in changes)
                    considered, excluded[self.SLOWER] = considered + count, excluded[self.SLOWER] + count
                    continue
            for place, change in enumerate(changes):
                count = len(stages) * len(change.recomputes)
                considered += count
                bound = self._change_bound(node.layout, node.microbatches, change)
                if bound > worst:
                    excluded[self.SLOWER] += count
                else:
                    tried.append((bound, number, place, node, change, stages))
        for bound, _, _, node, change, stages in sorted(tried, key=lambda each: each[:3]):
            self._expand_change(bound, node, change, stages, best, top, excluded)
        return considered

    def _expand_change(
        self,
        bound: float,
        node: _Node,
        change: _ScheduleChange,
        stages: Sequence[tuple[int, bool]],
        best: list[tuple[tuple[Any, ...], Planned]],
        top: int,
        excluded: Counter[str],
    ) -> None:
        """Put those layouts of a node and of some options of the schedule among the best that belong there."""
        layout, m, fixed = node.layout, node.microbatches, self.memory.reserve
        for recompute in change.recomputes:
            kept = self._activations_bound(layout, m, *change[:2], recompute, change.values) * _JUST_BELOW
            for zero, offload in stages:
                worst = best[-1][1].time.seconds if len(best) == top else math.inf
                if bound > worst:
                    excluded[self.SLOWER] += 1
                    continue
                if self._states_bound(layout, zero, offload) * _JUST_BELOW + kept + fixed > self.limit:
                    excluded[self.MEMORY] += 1
                    continue
                made = self._layout(layout, *change[:2], zero, offload, recompute, change.values)
                shortest = self.model.option_step(made).least()
                if any(made.changes[2:]):  # they make no step shorter
                    shortest = max(shortest, self.model.passes(without_changes(made)))
                if shortest * _JUST_BELOW > worst:
                    excluded[self.SLOWER] += 1
                    continue
                if self.needless(made):
                    excluded[self.NEEDLESS] += 1
                    continue
                self._try(made, best, top, excluded)

    def _size(self, node: _Node, recomputes: Sequence[str]) -> int:
        """Return the number of layouts of a node without options of the schedule."""
        return len(self.variants(node.layout, node.microbatches)) * len(self.stages(node.layout)) * len(recomputes)

    def _expand(
        self,
        node: _Node,
        best: list[tuple[tuple[Any, ...], Planned]],
        top: int,
        excluded: Counter[str],
        recomputes: Sequence[str],
    ) -> None:
        """Put those layouts of a node among the best that belong there."""
        layout, m = node.layout, node.microbatches
        states = [(self._states_bound(layout, *stage), stage) for stage in self.stages(layout)]
        fixed = self.memory.reserve
        least = min((bound for bound, _ in states), default=math.inf)
        for schedule, chunks in self.variants(layout, m):
            shortest = self._variant_bound(layout, m, schedule, chunks)
            for recompute in recomputes:
                worst = best[-1][1].time.seconds if len(best) == top else math.inf
                if shortest > worst:
                    excluded[self.SLOWER] += len(states)
                    continue
                kept = self._activations_bound(layout, m, schedule, chunks, recompute) * _JUST_BELOW
                kept = 0.0 if self.unequal else kept  # the rank with most activations may have fewer states
                if kept + least + fixed > self.limit:
                    excluded[self.MEMORY] += len(states)
                    continue
                if self.model.passes(self._layout(layout, schedule, chunks, 0, False, recompute)) * _JUST_BELOW > worst:
                    excluded[self.SLOWER] += len(states)
                    continue
                for bound, (zero, offload) in states:
                    if bound * _JUST_BELOW + kept + fixed > self.limit:
                        excluded[self.MEMORY] += 1
                        continue
                    self._try(self._layout(layout, schedule, chunks, zero, offload, recompute), best, top, excluded)

    def _try(
        self, layout: ParallelLayout, best: list[tuple[tuple[Any, ...], Planned]], top: int, excluded: Counter[str]
    ) -> None:
        simulated = layout.changes != UNCHANGED or layout.hides_collectives  # its time is known last
        if simulated and not self._fullest(layout)[1]:
            excluded[self.MEMORY] += 1
            return
        step = self.model.step(layout)
        key = preference(layout, step.seconds)
        if len(best) == top and key > best[-1][0]:
            excluded["slower than the layouts kept"] += 1
            return
        peak, fits = self._fullest(layout)
        if not fits:
            excluded[self.MEMORY] += 1
            return
        best.append((key, Planned(layout, step, peak)))
        best.sort(key=lambda each: each[0])
        if len(best) > top:
            best.pop()
            excluded["slower than the layouts kept"] += 1

    def nearest(self, nodes: Sequence[_Node]) -> Planned | None:
        """Return the layout that needs least memory, of those of the nodes with the least bounds."""
        recomputes = self._recomputes()

        def bound(node: _Node, variant: tuple[str, int], stage: tuple[int, bool], recompute: str) -> float:
            states = self._states_bound(node.layout, *stage)
            return states + self._activations_bound(node.layout, node.microbatches, *variant, recompute)

        candidates = (
            (bound(node, variant, stage, recompute), number, node, variant, stage, recompute)
            for number, node in enumerate(nodes)
            for variant in self.variants(node.layout, node.microbatches)
            for stage in self.stages(node.layout)
            for recompute in recomputes
        )
        least = heapq.nsmallest(64, candidates, key=lambda each: each[:2])
        found = [
            self.evaluate(self._layout(node.layout, *variant, *stage, recompute))
            for _, _, node, variant, stage, recompute in least
        ]
        return min(found, key=lambda planned: planned.memory.total, default=None)


def preference(layout: ParallelLayout, seconds: float) -> tuple[Any, ...]:
    """Return the key by which layouts are ordered: faster ones first, and of equally fast ones the simpler one."""
    return (
        *(
            float(f"{seconds:.9g}"),
            layout.context,
            layout.offload,
            KNOWN_RECOMPUTATION.index(layout.recompute),
            layout.zero,
        ),
        *(layout.pipe, layout.chunks, layout.tensor, layout.expert, layout.microbatch, layout.schedule, layout.changes),
    )


def without_changes(layout: ParallelLayout) -> ParallelLayout:
    """Return a layout without options of its schedule, and without pairs."""
    name = "zb-v" if RECIPES[layout.schedule].pairs is not None else layout.schedule
    return replace(layout, schedule=name, slices=1, pairs=False, recompute_ops=0.0, offload_activations=0.0)


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, the smallest first.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return small + [number // each for each in reversed(small) if each * each != number]


def to_dict(planned: Planned, work: Work) -> dict[str, Any]:
    """Return the object that ``triax plan --json`` prints for one layout."""
    layout, step, memory = planned
    names = ("pipe", "data", "context", "tensor", "expert", "microbatch", "chunks", "schedule", "zero", "recompute")
    return {
        **{name: getattr(layout, name) for name in names},
        "offload": layout.offload,
        **({} if layout.shard_size is None else {"shard_size": layout.shard_size}),
        **{name: getattr(layout, name) for name in CHANGES},
        "step_s": step.seconds,
        **utilization(work, layout, step.seconds),
        "memory_gib": {kind: size / 2**30 for kind, size in memory._asdict().items()},
        "time_s": dict(step.kinds),
    }
