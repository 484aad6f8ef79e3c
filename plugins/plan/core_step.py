"""Time of a step on ranks that share the cores of one machine.

    for each microbatch   ZeRO's gather and scatter, then the stage's passes, and Python
    behind a rank's ops   gradients of stages 0 and 1, and of a weight that embedding and head share
    behind all ranks      weights (stages 1 and 2), optimizer and norm

Nothing hides a collective, because the transport computes too. cores.py simulates the schedule with equal shares of the
cores: ``cores`` of the step is the time that this adds to a core for each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from ...pipe.schedules.registry import named_schedule
from .collectives import RankGroup, all_gather, all_reduce, message, reduce_scatter
from .cores import StageWork, makespan
from .device_time import DeviceTime
from .measured import MeasuredTimes, interpolated
from .parallel_layout import ParallelLayout
from .pass_time import PassTime
from .zero_time import ZeroTime


class StageZero(NamedTuple):
    """Seconds of ZeRO's collectives for one microbatch in a stage, which has a bucket a layer."""

    gather: float
    scatter: float


@dataclass(frozen=True)
class CoreStep:
    """One step of a layout on shared cores.

    Attributes:
        device: times of kernels.
        zero: times of collectives of the data axis.
        layout: the layout.
        stage_kinds: the kind of each layer of each stage.
        stage_times: passes of each stage.
        rank_times: passes of each pipe rank.
    """

    device: DeviceTime
    zero: ZeroTime
    layout: ParallelLayout
    stage_kinds: Sequence[Sequence[int]]
    stage_times: Sequence[PassTime]
    rank_times: Sequence[PassTime]

    @property
    def _measured(self) -> MeasuredTimes:
        assert self.device.measured is not None
        return self.device.measured

    @cached_property
    def _microbatches(self) -> int:
        return self.layout.microbatches(self.device.work.batch)

    @cached_property
    def _counts(self) -> list[tuple[int, ...]]:
        """Layers of each kind on each pipe rank."""
        counts = [[0] * len(self.zero.types) for _ in range(self.layout.pipe)]
        for kinds, rank in zip(self.stage_kinds, self.layout.placement, strict=True):
            for kind in kinds:
                counts[rank][kind] += 1
        return [tuple(of_rank) for of_rank in counts]

    def kinds(self) -> dict[str, float]:
        """Return the seconds of the step by kind."""
        layout, measured, placement = self.layout, self._measured, self.layout.placement
        ranks, copies = range(layout.pipe), layout.gpus // layout.pipe
        stages = [self._stage_zero(kinds) for kinds in self.stage_kinds]
        work = [self._stage_work(time, zero) for time, zero in zip(self.stage_times, stages, strict=True)]
        ends = [self._gradients(rank) + tied for rank, tied in zip(ranks, self._tied_gradients(), strict=True)]
        latency, sent = self._message()
        schedule = named_schedule(layout.schedule, layout.pipe, self._microbatches, layout.chunks)
        alone, shared = (
            makespan(schedule, work, ends, latency, sent, copies, speed)
            for speed in (lambda processes: 1.0, measured.speed)
        )
        kinds_of = [self._rank_kinds(rank, stages) for rank in ranks]
        busiest = max(ranks, key=lambda rank: ends[rank] + sum(kinds_of[rank].values()))
        kinds = kinds_of[busiest]
        kinds["data"] += ends[busiest]
        hops = [pair for pair in pairwise(placement) if pair[0] != pair[1]]
        kinds["pipe"] = 2 * self._microbatches * sent * sum(pair.count(busiest) for pair in hops)
        kinds["bubble"] = max(0.0, alone - sum(kinds.values()))
        weights, optimizer = max((self._finish(rank) for rank in ranks), key=sum)
        crowding = 1 / measured.speed(layout.gpus) - 1
        kinds["cores"] = shared - alone + (weights + optimizer) * crowding
        kinds["data"], kinds["optimizer"] = kinds["data"] + weights, optimizer
        kinds["overhead"] += measured.step
        return kinds

    # ------------------------------------------------------------------------------------------ each microbatch

    def _stage_zero(self, kinds: Sequence[int]) -> StageZero:
        layout, size, machine = self.layout, self.device.bytes, self.device.machine
        if layout.zero < 2:
            return StageZero(0.0, 0.0)
        call = self.device.call("data") if layout.replicas.dense > 1 else 0.0
        gather = scatter = 0.0
        for kind in kinds:
            counts = tuple(int(kind == other) for other in range(len(self.zero.types)))
            for numel, group, _ in self.zero.held(counts, layout):
                gather += call + all_gather(numel * size, group, machine) if layout.zero == 3 else 0.0
                scatter += call + reduce_scatter(numel * self.device.wide, group, machine)
        return StageZero(gather, scatter)

    def _stage_work(self, time: PassTime, zero: StageZero) -> StageWork:
        forward, backward = self._measured.microbatch
        return StageWork(
            time.forward + (forward + zero.gather),
            time.inputs + (time.recompute + backward + zero.gather + zero.scatter),
            time.weights,
        )

    def _rank_kinds(self, rank: int, stages: Sequence[StageZero]) -> dict[str, float]:
        """Return the seconds of a rank's microbatches by kind."""
        m, own = self._microbatches, [stage for stage, home in enumerate(self.layout.placement) if home == rank]
        kinds = self.rank_times[rank].kinds(m) | {"data": 0.0, "recompute": 0.0}
        for stage in own:
            kinds["data"] += m * (2 * stages[stage].gather + stages[stage].scatter)
            kinds["recompute"] += m * self.stage_times[stage].recompute
            kinds["overhead"] += m * sum(self._measured.microbatch)
        return kinds

    def _message(self) -> tuple[float, float]:
        """Return the seconds until a message arrives, and the seconds of a core that each end of it takes."""
        layout, machine = self.layout, self.device.machine
        if layout.pipe == 1:
            return 0.0, 0.0
        tokens = layout.microbatch * self.device.work.sequence / layout.context
        hidden = self.device.bytes * tokens * self.device.work.config.hidden_size / layout.hidden_shards
        latency = message(0.0, 1, machine)
        return latency, message(hidden, 1, machine) - latency

    # ------------------------------------------------------------------------------------------ behind the passes

    def _gradients(self, rank: int) -> float:
        """Return the seconds of the collectives of a rank's gradients behind its last op."""
        layout, wide, machine, seconds = self.layout, self.device.wide, self.device.machine, 0.0
        for numel, group, copies in self.zero.held(self._counts[rank], layout):
            if layout.zero < 2:
                seconds += (reduce_scatter if layout.zero else all_reduce)(numel * wide, group, machine)
            seconds += all_reduce(numel / group.size * wide, copies, machine)
        return seconds

    def _tied_gradients(self) -> list[float]:
        """Return for each rank the seconds in which the gradients of a weight on two ranks are added."""
        layout, kinds = self.layout, self.zero.types
        tied = {kind for kind, shape in enumerate(kinds) if shape.tie}
        shares = [[kind for kind in sorted(tied) if counts[kind]] for counts in self._counts]
        seconds = [0.0] * layout.pipe
        if sum(map(bool, shares)) > 1:
            group = RankGroup(2, layout.gpus // layout.pipe)
            for rank, own in enumerate(shares):
                for kind in own:
                    size = kinds[kind].parameters / layout.tensor * self.device.wide
                    seconds[rank] += all_reduce(size, group, self.device.machine)
        return seconds

    def _finish(self, rank: int) -> tuple[float, float]:
        """Return the seconds of a rank's gathered weights and of its optimizer, behind all ranks' gradients."""
        layout, measured = self.layout, self._measured
        weights = optimizer = 0.0
        for numel, group, _ in self.zero.held(self._counts[rank], layout):
            if layout.zero in (1, 2):
                weights += all_gather(numel * self.device.bytes, group, self.device.machine)
            share = max(1.0, numel / (group.size if layout.zero else 1))
            optimizer += share * interpolated(measured.optimizer, (share,))[0]
            if layout.gpus > 1:  # the norm of all gradients
                optimizer += measured.kernel("fp32", "square", share)[0]
        return weights, optimizer
