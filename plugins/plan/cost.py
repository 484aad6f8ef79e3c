"""Time of a training step on a layout, from the shapes of the layers and a machine's description.

    layer_time.py     LayerTime   one microbatch in one layer                       products to overhead
    pass_time.py      PassTime    as the schedule runs its passes                   recompute
                      RankTime    all layers of a pipe rank, with its messages      pipe
    zero_time.py      ZeroTime    collectives and optimizer                         data, optimizer, offload
    schedule_time.py  ScheduleTime   simulated schedules                            bubble
    option_step.py    OptionStep     schedules with options                         tensor, expert, recompute, bubble
    core_step.py      CoreStep    all of it where ranks share cores                 cores

A step consists of the passes of the busiest pipe rank, the bubble of the schedule, messages between stages, the data
axis (ZeRO) and the optimizer.

| term | seconds | source |
|---|---|---|
| bubble | idle time of the schedule, with all other pipe ranks' times | pipe/schedules, docs/schedules.md |
| imbalance | time by which the replica with the most work exceeds the mean | imbalance.py |
| pipe | each pass waits for its message, 2 s b h bytes (1/t of them under sequence parallelism), and for the \
software's overhead | Narayanan et al. 2021 |
| overhead | Python of a step, beside that of its layers | measured |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import mul
from typing import NamedTuple

from ...base.formulas import model_states
from ...options.schedule import ScheduleOptions
from ...pipe.program.layer_costs import LayerCost, LayerCosts
from ...pipe.schedules.registry import RECIPES
from .cached import cached_method
from .collectives import message
from .core_step import CoreStep
from .device_time import DeviceTime
from .imbalance import Imbalance
from .layer_time import LayerTime, LayerTimer, TimeSplit
from .memory import ModelMemory
from .option_step import OptionStep, pass_costs
from .parallel_layout import UNCHANGED, ParallelLayout
from .pass_time import PassTime, RankTime, busiest
from .schedule_time import ScheduleTime
from .work import Work
from .zero_time import ZeroTime

KINDS = (
    *("products", "attention", "elementwise", "overhead", "recompute", "tensor", "context", "expert"),
    *("pipe", "bubble", "imbalance", "cores", "data", "optimizer", "offload"),
)


class StepTime(NamedTuple):
    """Time of a step: seconds in all and by kind."""

    seconds: float
    kinds: dict[str, float]


class CostModel:
    """Times of layers and steps, each computed once and kept.

    Args:
        work: model, machine, batch and sequence.

    Attributes:
        device: times of the machine's kernels.
        types: the different layers of the model.
        kinds: the number of each layer's type.
        memory: memory of the model, which cuts it into the same stages.
        zero, schedules: times of the data axis, and of schedules.
    """

    def __init__(self, work: Work) -> None:
        self.work, self.machine = work, work.machine
        self.device = DeviceTime(work)
        self.on_cores, self.measured = self.device.on_cores, work.machine.measured
        self.memory = ModelMemory(
            *(work.config, work.precision),
            fused_attention=work.machine.fused_attention,
            fused_kernels=work.machine.fused_kernels,
            speeds=work.speeds,
            lend=work.lend,
            device="cpu" if self.on_cores else "cuda",
        )
        self.types, self.kinds = self.memory.stage_layers.kinds, self.memory.stage_layers.kind_of
        self.zero, self.schedules = ZeroTime(self.device, self.types), ScheduleTime()
        self.imbalance = None if work.rows is None else Imbalance(work.rows, work.batch, work.layers, work.balanced)

    # ------------------------------------------------------------------------------------------------ a layer

    def layer(self, kind: int, layout: ParallelLayout) -> LayerTime:
        """Return the times of one microbatch, or of one of its slices, in a layer of type ``self.types[kind]``."""
        return self._layer(kind, TimeSplit.of(layout))

    @cached_method
    def _layer(self, kind: int, split: TimeSplit) -> LayerTime:
        return LayerTimer(self.device, self.types[kind], split).time()

    def passes_of(self, kind: int, layout: ParallelLayout) -> PassTime:
        """Return the times of a layer of type ``self.types[kind]``, as the layout's schedule runs its passes."""
        split = RECIPES[layout.schedule].split and not self.on_cores
        return self._passes_of(kind, TimeSplit.of(layout), layout.recompute, split)

    @cached_method
    def _passes_of(self, kind: int, split: TimeSplit, recompute: str, split_backward: bool) -> PassTime:
        layer, again = self._layer(kind, split), 0.0
        if self.types[kind].kind == "block":
            seconds = {"none": 0.0, "selective": layer.attention.forward, "full": layer.forward, "mlp": layer.mlp}
            again = seconds[recompute]
        return PassTime.of(layer, again, split_backward)

    # ------------------------------------------------------------------------------------------------- a step

    def step(self, layout: ParallelLayout) -> StepTime:
        """Return the time of a step.

        Raises:
            ValueError: data x microbatch does not divide the batch, or the schedule does not exist for the layout.
        """
        if layout.changes != UNCHANGED and (self.work.speeds or self.on_cores):
            raise ValueError(
                f"{layout} has options of the schedule, which are not planned for ranks of several speeds (--speeds), "
                "or for ranks that share cores. Leave them out."
            )
        kinds = self._core_step(layout).kinds() if self.on_cores else self._pipelined_step(layout)
        return StepTime(sum(kinds.values()), {kind: kinds.get(kind, 0.0) for kind in KINDS})

    def _pipelined_step(self, layout: ParallelLayout) -> dict[str, float]:
        """Return the seconds of a step by kind, on ranks with a processor each."""
        ranks = self.rank_times(layout)
        kinds = self._until_last_backward(layout, ranks)
        if self.imbalance is not None:
            passes, bubble = sum(kinds.values()), kinds.get("bubble", 0.0)
            m = layout.microbatches(self.work.batch)
            kinds["imbalance"] = passes * (self.imbalance.factor(layout, m * bubble / (passes - bubble)) - 1)
        finish = self.zero.behind_the_passes(ranks, layout)
        kinds["data"] = kinds.get("data", 0.0) + finish.data
        kinds["optimizer"], kinds["offload"] = finish.optimizer, finish.offload
        if self.measured is not None:
            kinds["overhead"] += self.measured.step
        return kinds

    def _until_last_backward(self, layout: ParallelLayout, ranks: Sequence[RankTime]) -> dict[str, float]:
        """Return the busiest pipe rank's seconds by kind up to the last backward pass, and the bubble."""
        m, p, rank = layout.microbatches(self.work.batch), layout.pipe, busiest(ranks)
        kinds = {kind: m * layout.slices * seconds for kind, seconds in rank.kinds.items()}
        if self.work.speeds:
            kinds["bubble"] = max(0.0, self.schedules.makespan(layout, m, ranks) - m * rank.busy)
        elif layout.changes != UNCHANGED or (p > 1 and layout.hides_collectives):
            kinds = self._option_step(layout, rank).kinds(kinds)
        elif p > 1 and self.has_closed_form(layout, m, rank):
            kinds["bubble"] = sum(other.idle(layout) * other.count for other in ranks) - rank.idle(layout)
        elif p > 1:
            kinds["bubble"] = max(0.0, self.schedules.makespan(layout, m, [rank]) - m * rank.busy)
        return kinds

    @staticmethod
    def has_closed_form(layout: ParallelLayout, m: int, rank: RankTime) -> bool:
        """Return True if the schedule has a closed form, and it holds."""
        closed = RECIPES[layout.schedule].closed
        return closed is not None and closed.holds(layout.pipe, m, rank.forward, rank.inputs, rank.weights)

    def passes(self, layout: ParallelLayout) -> float:
        """Return the seconds of a step up to its last backward pass: of all ZeRO stages, if the layout's is 0 or 1."""
        if not self.on_cores:
            return sum(self._until_last_backward(layout, self.rank_times(layout)).values())
        assert self.measured is not None
        m, python = layout.microbatches(self.work.batch), layout.chunks * sum(self.measured.microbatch)
        ranks = [m * (rank.busy + python) for rank in self._core_step(layout).rank_times]
        return max(*ranks, sum(ranks) * layout.gpus / layout.pipe / self.speed_of_all(layout.gpus))

    def _core_step(self, layout: ParallelLayout) -> CoreStep:
        placement = layout.placement
        stage_kinds = [self.kinds[start:stop] for start, stop in pairwise(self.memory.cuts(len(placement)))]
        stages = [PassTime.total(self.passes_of(kind, layout) for kind in kinds) for kinds in stage_kinds]
        ranks = [
            PassTime.total(time for time, home in zip(stages, placement, strict=True) if home == rank)
            for rank in range(layout.pipe)
        ]
        return CoreStep(self.device, self.zero, layout, stage_kinds, stages, ranks)

    @cached_method
    def speed_of_all(self, processes: int) -> float:
        """Return the most that processes on shared cores compute together, over what one computes alone."""
        assert self.measured is not None
        return max(count * self.measured.speed(count) for count in range(1, processes + 1))

    # ---------------------------------------------------------------------------------------------- pipe ranks

    @cached_method
    def ranks(self, placement: tuple[int, ...]) -> list[tuple[tuple[int, ...], int]]:
        """Return the kinds of pipe ranks: the number of layers of each type, and how many ranks have them."""
        ranks = self.memory.stage_layers.ranks(placement)
        counts = [tuple(rank.counts.get(kind, 0) for kind in range(len(self.types))) for rank in ranks]
        return [(of_rank, 1) for of_rank in counts] if self.work.speeds else [*Counter(counts).items()]

    def rank_times(self, layout: ParallelLayout) -> list[RankTime]:
        """Return the times of a microbatch on each kind of pipe rank."""
        split = RECIPES[layout.schedule].split and not self.on_cores
        passes = self._passes_of_ranks(layout.placement, TimeSplit.of(layout), layout.recompute, split)
        hop = self._hop(layout)
        times = [
            RankTime(
                count=count,
                counts=counts,
                forward=time.forward + hop,
                inputs=time.inputs + time.recompute + hop,
                weights=time.weights,
                kinds=time.kinds() | {"recompute": time.recompute, "pipe": 2 * hop},
            )
            for (counts, count), time in zip(self.ranks(layout.placement), passes, strict=True)
        ]
        return times if layout.zero < 2 else [self.zero.in_each_pass(time, layout) for time in times]

    @cached_method
    def _passes_of_ranks(
        self, placement: tuple[int, ...], split: TimeSplit, recompute: str, split_backward: bool
    ) -> list[PassTime]:
        types = [self._passes_of(kind, split, recompute, split_backward) for kind in range(len(self.types))]
        return [
            PassTime.total(map(mul, types, counts)) / (self.work.speeds[rank] if self.work.speeds else 1.0)
            for rank, (counts, _) in enumerate(self.ranks(placement))
        ]

    def _hop(self, layout: ParallelLayout) -> float:
        """Return the seconds that a pass of all chunks of a rank waits for its messages."""
        if layout.pipe == 1 or RECIPES[layout.schedule].sends_ahead:
            return 0.0
        hop = layout.chunks * self.machine.message_overhead
        if self.machine.overlap_messages:
            return hop
        stride = layout.replicas.dense * layout.tensor
        return hop + layout.chunks * message(self._hidden_bytes(layout), stride, self.machine)

    def _hidden_bytes(self, layout: ParallelLayout) -> float:
        """Return the bytes of a message between two stages."""
        tokens = layout.microbatch * self.work.sequence / (layout.context * layout.slices)
        return self.device.bytes * tokens * self.work.config.hidden_size / layout.hidden_shards

    # ----------------------------------------------------------------------------------- schedules with options

    def option_step(self, layout: ParallelLayout) -> OptionStep:
        """Return the step of a layout whose schedule has options."""
        return self._option_step(layout, busiest(self.rank_times(layout)))

    def _option_step(self, layout: ParallelLayout, rank: RankTime) -> OptionStep:
        layers = [self.layer(kind, layout) for kind in range(len(self.types))]
        copy = self._activations(layout, rank) / self.machine.host_bandwidth if layout.offload_activations else 0.0
        costs = pass_costs(layout, rank, layers, copy)
        return OptionStep(self.schedules, layout, self.work.batch, rank, costs)

    def _activations(self, layout: ParallelLayout, rank: RankTime) -> float:
        """Return the bytes of a rank's activations of a microbatch."""
        tokens, sequence = layout.microbatch * self.work.sequence / layout.context, self.work.sequence
        return sum(
            count * self.memory.layer_activations(shape, tokens, sequence, layout)
            for count, shape in zip(rank.counts, self.types, strict=True)
            if count
        )

    def schedule_options(self, layout: ParallelLayout) -> ScheduleOptions:
        """Return the options of a layout's schedule, as a run has them."""
        if layout.changes == UNCHANGED:
            return ScheduleOptions(name=layout.schedule, chunks=layout.chunks)
        return self.option_step(layout).options

    # ------------------------------------------------------------------------------------------------- others

    def layer_costs(self, layout: ParallelLayout) -> LayerCosts:
        """Return the costs of each layer for whole microbatches, from which a cut is searched (pipe/cuts.py)."""
        layout = replace(layout, slices=1)
        tokens, replicas = layout.microbatch * self.work.sequence / layout.context, layout.replicas
        output = self._hidden_bytes(layout)
        stride = replicas.dense * layout.tensor
        latency, seconds = (message(size, stride, self.machine) for size in (0.0, output))
        layers = []
        for kind, shape in zip(self.kinds, self.work.layers, strict=True):
            time = self.passes_of(kind, layout)
            numels = self.zero.parameters(kind, layout.tensor, layout.expert)
            states = sum(
                model_states(numel, shards, layout.zero, self.work.precision).total
                for numel, shards in zip(numels, replicas, strict=True)
            )
            kept = self.memory.layer_activations(shape, tokens, self.work.sequence, layout)
            inputs = time.inputs + time.recompute
            layers.append(LayerCost(time.forward, inputs, time.weights, states, kept, output, shape.name))
        return LayerCosts(
            tuple(layers),
            latency + self.machine.message_overhead,
            max(0.0, seconds - latency) / output,
            self.work.speeds,
        )


def utilization(work: Work, layout: ParallelLayout, seconds: float) -> Mapping[str, float]:
    """Return TFLOP/s of the model on each rank, and their share of the peak."""
    speed = work.model_flops / seconds / layout.gpus
    return {"tflops_per_gpu": speed / 1e12, "mfu": speed / work.machine.peak_of(work.precision)}
