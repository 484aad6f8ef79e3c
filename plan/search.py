"""Search for the fastest layouts that fit, exact: nothing is left out but what a lower bound excludes.

The space is every combination of the axes' sizes, microbatch, chunks, schedule, ZeRO stage, recomputation and offload
that the model, the batch and the number of ranks admit. It is searched best first: nodes (axes and microbatch) in the
order of a lower bound of their time, until no bound is below the time of the worst layout kept.

Lower bounds, each for all layouts of a node or of a part of it:

- time: the microbatches' passes through 1/pipe of the model, without recomputation, messages or ZeRO, and the least
  bubble of the schedules
- memory: model states of 1/pipe of the model; the activations of the first pipe rank's blocks, of the microbatches
  that its schedule has in flight, and the margin for their fragments
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ..pipe.schedules.registry import RECIPES
from .cost import CLOSED_FORMS, CostModel, StepTime, Work, idle, utilization
from .memory import FRAGMENTS, RankMemory
from .parallel_layout import KNOWN_RECOMPUTATION, RECOMPUTATION, ParallelLayout

SCHEDULES = (
    "1f1b",
    "interleaved",
    "zb-h1",
    "zb-h2",
    "zb-v",
)  # gpipe and eager-1f1b are never faster than 1f1b, and hold more
MOST_CHUNKS = 8  # beyond those that divide the blocks evenly
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


class Searcher:
    """Search of a space for one model, machine, batch and sequence.

    Args:
        work: model, machine, batch and sequence.
        space: the layouts to search.
    """

    MEMORY, SLOWER, EMPTY = "does not fit in memory", "slower than the layouts kept, by a lower bound", "impossible"

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
        self.experts = max((layer.feedforward.experts for layer in work.layers if layer.feedforward), default=0)
        self.blocks = [index for index, layer in enumerate(work.layers) if layer.kind == "block"]
        self._variants: dict[tuple[int, int, bool, int], list[tuple[str, int]]] = {}
        self._bases: dict[tuple[int, ...], tuple[float, float, float]] = {}
        self._fewest: dict[tuple[int, int], int] = {}
        self._kept: dict[tuple[Any, ...], float] = {}

    # -------------------------------------------------------------------------------------------------- the space

    def _free(self, key: str, values: Sequence[Any]) -> list[Any]:
        """Return those of the values that the space admits."""
        given = self.space.given.get(key)
        return list(values) if given is None else [value for value in values if value in given]

    def axes(self) -> Iterator[ParallelLayout]:
        """Yield a layout for each possible size of the axes, with microbatch 1."""
        work, gpus = self.work, self.space.gpus
        sequence, config = work.sequence, work.config
        for t in self._free("tensor", divisors(gpus)):
            if not self._shards(t):
                continue
            for c in self._free("context", divisors(gpus // t)):
                if sequence % (2 * c if c > 1 else 1) or sequence % (c * t):
                    continue
                for p in self._free("pipe", divisors(gpus // t // c)):
                    if p > config.num_hidden_layers:
                        break
                    data = gpus // t // c // p
                    if self._free("data", [data]) and not work.batch % data:
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
        p, each = layout.pipe, len(self.blocks) // layout.pipe
        key = (p, each, m % p == 0, min(m // p, 2))
        if key in self._variants:
            return self._variants[key]
        found: list[tuple[str, int]] = []
        schedules = self.space.given.get("schedule", SCHEDULES)
        asked = "schedule" in self.space.given and "chunks" in self.space.given
        closed = {"interleaved": m % p == 0, "looped-bfs": m % p == 0, "zb-h1": m >= p}
        closed |= dict.fromkeys(("zb-h2", "zb-v"), m >= 2 * p)
        if p == 1:
            found = [("1f1b", 1)] if "1f1b" in schedules or set(schedules) - {"1f1b"} else []
            found = found if 1 in self._free("chunks", [1]) else []
        else:
            fair = [v for v in range(1, each + 1) if v <= MOST_CHUNKS or len(self.blocks) % (p * v) == 0]
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
        self._variants[key] = found
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

    def layouts(self, node: _Node) -> Iterator[ParallelLayout]:
        """Yield every layout of a node."""
        for schedule, chunks in self.variants(node.layout, node.microbatches):
            for zero, offload in self.stages(node.layout):
                for recompute in self._recomputes():
                    yield self._layout(node.layout, schedule, chunks, zero, offload, recompute)

    def _layout(
        self, layout: ParallelLayout, schedule: str, chunks: int, zero: int, offload: bool, recompute: str
    ) -> ParallelLayout:
        sharded = self.space.given.get("sequence_parallel", [None])[0]
        return ParallelLayout(
            *(layout.pipe, layout.data, layout.context, layout.tensor, layout.expert, layout.microbatch),
            *(chunks, schedule, zero, recompute, offload, sharded),
        )

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
        """Return the kinds of recomputation."""
        return list(self.space.given.get("recompute", RECOMPUTATION))

    # -------------------------------------------------------------------------------------------------- the bounds

    def _passes(self, layout: ParallelLayout) -> tuple[float, float, float]:
        """Return the seconds of the model's forward pass, input and weight gradients, for one microbatch."""
        key = (layout.microbatch, layout.context, layout.tensor, layout.expert)
        found = self._bases.get(key)
        if found is None:
            sharded = self.space.given.get("sequence_parallel", [None])[0]
            layout = ParallelLayout(
                *(1, layout.expert, layout.context, layout.tensor, layout.expert, layout.microbatch),
                sequence_parallel=sharded,
            )
            layers = [(count, self.model.layer(kind, layout)) for kind, count in Counter(self.model.kinds).items()]
            found = self._bases[key] = (
                sum(count * layer.forward for count, layer in layers),
                sum(count * layer.backward for count, layer in layers),
                sum(count * layer.products[2] for count, layer in layers),
            )
        return found

    def _time_bound(self, layout: ParallelLayout, m: int) -> float:
        """Return a lower bound of the seconds of all layouts of a node."""
        times, p = self._passes(layout), layout.pipe
        bubble = 0.0
        if p > 1:
            bubble = min(self._bubble(name, v, *times) for name, v in self.variants(layout, m))
        return self._at_least(layout, m, times, bubble)

    def _at_least(self, layout: ParallelLayout, m: int, times: tuple[float, float, float], bubble: float) -> float:
        """Return a lower bound of a step's seconds from those of ``_passes`` and ``_bubble``."""
        p, least = layout.pipe, m * sum(times)
        found = least / sum(self.work.speeds) if self.work.speeds else (least + (p - 1) * bubble) / p
        if self.model.on_cores:  # all ranks together compute no faster than the cores
            found = max(found, least * layout.gpus / p / self.model.speed_of_all(layout.gpus))
        return found * _JUST_BELOW

    def _bubble(self, schedule: str, chunks: int, forward: float, inputs: float, weights: float) -> float:
        """Return p / (p - 1) times a lower bound of a schedule's bubble; recomputation and messages only add to it."""
        if schedule not in CLOSED_FORMS or self.model.on_cores:  # they are simulated
            return 0.0
        if schedule == "zb-h2":  # of the closed forms what grows with each pass
            return max(forward, forward + inputs - 2 * weights)
        if schedule == "zb-v":
            return max(forward / 2, inputs / 2, max(forward, inputs) - weights)
        return idle(schedule, chunks, forward, inputs, weights)

    def _states_bound(self, layout: ParallelLayout, zero: int, offload: bool) -> float:
        """Return a lower bound of the bytes of model states: those of 1/pipe of the model."""
        model, options = self.model, self.memory.options
        replicas = layout.data * layout.context
        total = 0.0
        for shared, shards in ((True, replicas), (False, replicas // layout.expert)):
            key = ("parameters", layout.tensor, layout.expert, shared)
            if key not in self._kept:
                own = [model.parameters(kind, layout.tensor, layout.expert) for kind in range(len(model.types))]
                ties = [0.0 if shape.kind == "head" and shape.tie else 1.0 for shape in model.types]
                self._kept[key] = sum(ties[kind] * own[kind][0 if shared else 1] for kind in model.kinds)
            count = self._kept[key] / layout.pipe
            stage = zero if shards > 1 or offload else 0
            sharded = [shards if stage >= least else 1 for least in (3, 2, 1)]
            total += count * options.size / sharded[0]
            if not offload:
                masters = options.wide if options.wide != options.size else 0
                total += count * (options.wide / sharded[1] + (masters + options.wide * options.states) / sharded[2])
            elif stage < 2:
                total += count * options.wide / sharded[1]
        return total

    def _activations_bound(self, layout: ParallelLayout, m: int, schedule: str, chunks: int, recompute: str) -> float:
        """Return a lower bound of the bytes of activations and their fragments: blocks of the first pipe rank."""
        key = (layout.microbatch, layout.context, layout.tensor, layout.expert, recompute)
        kept = self._kept.get(key)
        if kept is None:
            one = self._layout(layout, "1f1b", 1, 0, False, recompute)
            tokens = layout.microbatch * self.work.sequence / layout.context
            kinds = {self.model.kinds[index] for index in self.blocks}
            kept = self._kept[key] = min(
                self.memory.layer_activations(self.model.types[kind], tokens, self.work.sequence, one) for kind in kinds
            )
        p, place = layout.pipe, (layout.pipe, chunks)
        fewest = self._fewest.get(place)
        if fewest is None:
            cuts = self.memory.cuts(p * chunks)
            stages = [range(cuts[c * p], cuts[c * p + 1]) for c in range(chunks)]
            fewest = min(sum(self.work.layers[i].kind == "block" for i in stage) for stage in stages)
            self._fewest[place] = fewest
        flight = min(p, m) * chunks
        if schedule == "interleaved":
            flight = min(m * chunks, flight + p - 1)  # chunks' forwards before the first backward
        elif schedule == "zb-h2":
            flight = min(2 * p - 1, m)
        elif schedule not in CLOSED_FORMS:
            flight = 1  # some hold less than 1F1B
        return flight * fewest * kept * (1 + FRAGMENTS)

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
        if not self.limits:
            peak = self.memory.peak(layout, self.work.batch, self.work.sequence)
            return peak, peak.total <= self.limit
        ranks = self.memory.ranks(layout, self.work.batch, self.work.sequence)
        pairs = [(each.total / limit, each) for each, limit in zip(ranks, self.limits, strict=True)]
        share, fullest = max(pairs, key=lambda pair: pair[0])
        return fullest, share <= 1

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
        found = Search([planned for _, planned in best], considered, dict(excluded), time.perf_counter() - start)
        if not best:
            found.nearest = self.nearest(nodes)
            found.seconds = time.perf_counter() - start
        return found

    def _size(self, node: _Node, recomputes: Sequence[str]) -> int:
        """Return the number of layouts of a node."""
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
        times = self._passes(layout)
        least = min((bound for bound, _ in states), default=math.inf)
        for schedule, chunks in self.variants(layout, m):
            shortest = self._at_least(layout, m, times, self._bubble(schedule, chunks, *times))
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
        *(layout.pipe, layout.chunks, layout.tensor, layout.expert, layout.microbatch, layout.schedule),
    )


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
        "step_s": step.seconds,
        **utilization(work, layout, step.seconds),
        "memory_gib": {kind: size / 2**30 for kind, size in memory._asdict().items()},
        "time_s": dict(step.kinds),
    }
