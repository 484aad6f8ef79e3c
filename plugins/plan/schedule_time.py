"""Seconds of a schedule by simulation, and the schedules that the options of a layout make.

A plain schedule has the seconds of each pass on each rank. A schedule with options (slices, pairs, recomputation or
offload by ops) also has the seconds of collectives that may hide, and of copies: ``PassCosts``. A long schedule
repeats, so that a short one gives the seconds of each further microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...engine.setup.asked_schedule import with_passes
from ...options.schedule import OffloadActivations, ScheduleOptions
from ...pipe.program.costs import Costs
from ...pipe.program.schedule import Schedule
from ...pipe.program.simulate import timeline_of
from ...pipe.program.slices import equal_cost_slices
from ...pipe.program.timeline import Timeline
from ...pipe.schedules.registry import named_schedule
from .cached import cached_method
from .parallel_layout import ParallelLayout
from .pass_time import RankTime


class PassCosts(NamedTuple):
    """Seconds of a whole microbatch on a rank whose schedule has options.

    Attributes:
        forward, inputs, weights: seconds of the passes without the collectives that may hide.
        copy: seconds of a copy of its activations to the host, or back.
        reduce: seconds of the collectives of the tensor axis in a forward pass or an input gradient, that may hide.
        exchange: seconds of those of the expert axis.
        attention: share of causal attention, for slices.
    """

    forward: float
    inputs: float
    weights: float
    copy: float
    reduce: float
    exchange: float
    attention: float

    @property
    def products(self) -> float:
        """Seconds of all passes without the collectives that may hide."""
        return self.forward + self.inputs + self.weights

    @property
    def costs(self) -> Costs:
        """The costs for a simulation."""
        passes = self.forward, self.inputs, self.weights
        return Costs(*passes, O=self.copy, R=self.copy, AR=self.reduce, A2A=self.exchange, attention=self.attention)

    def options(self, layout: ParallelLayout) -> ScheduleOptions:
        """Return the options of a layout's schedule, as a run has them: these costs in units of ``forward``."""
        given: dict[str, Any] = {"name": layout.schedule, "chunks": layout.chunks}
        if layout.slices > 1:
            lengths = equal_cost_slices(layout.slices, self.attention)
            given["slices"] = tuple(round(length, 4) for length in lengths)
        if layout.pairs or layout.recompute_ops or layout.offload_activations:
            given["costs"] = (1.0, _short(self.inputs / self.forward), _short(self.weights / self.forward))
        if layout.pairs:
            given["pairs"] = _short((self.reduce + self.exchange) / self.forward)
        if layout.recompute_ops:
            given["recompute"] = layout.recompute_ops
        if layout.offload_activations:
            share, copy = layout.offload_activations, _short(self.copy / self.forward)
            given["offload"] = OffloadActivations(device="cpu", pin_memory=True, fraction=share, copy_time=copy)
        return ScheduleOptions(**given)


class ScheduleTime:
    """Simulated seconds of schedules, each simulated once."""

    def makespan(self, layout: ParallelLayout, m: int, ranks: Sequence[RankTime]) -> float:
        """Return the seconds of ``m`` microbatches, of these ranks or of ranks that are all like a single one."""
        forward, inputs, weights = zip(*((rank.forward, rank.inputs, rank.weights) for rank in ranks), strict=True)
        costs = Costs(forward, inputs, weights) if len(ranks) > 1 else Costs(forward[0], inputs[0], weights[0])
        plain = layout.schedule, layout.pipe, layout.chunks
        return extrapolated(lambda count: self._makespan(*plain, count, costs), m, layout.pipe)

    @cached_method
    def _makespan(self, name: str, pipe: int, chunks: int, microbatches: int, costs: Costs) -> float:
        return timeline_of(named_schedule(name, pipe, microbatches, chunks), costs).makespan

    def makespan_and_idle(self, layout: ParallelLayout, m: int, costs: PassCosts) -> tuple[float, float]:
        """Return the seconds of a schedule with options, and those in which its busiest rank is idle."""
        p, options, recomputes = layout.pipe, costs.options(layout), layout.recompute != "none"

        def timeline(count: int) -> Timeline:
            return self._timeline(p, count, options, recomputes, costs)

        def idle(count: int) -> float:
            return timeline(count).bubble * timeline(count).makespan

        return extrapolated(lambda count: timeline(count).makespan, m, p), extrapolated(idle, m, p)

    @cached_method
    def _timeline(
        self, pipe: int, microbatches: int, options: ScheduleOptions, recomputes: bool, costs: PassCosts
    ) -> Timeline:
        return timeline_of(self._schedule(pipe, microbatches, options, recomputes), costs.costs)

    def schedule(self, layout: ParallelLayout, options: ScheduleOptions, microbatches: int) -> Schedule:
        """Return the schedule that a run of a layout makes of these options."""
        return self._schedule(layout.pipe, microbatches, options, layout.recompute != "none")

    @cached_method
    def _schedule(self, pipe: int, microbatches: int, options: ScheduleOptions, recomputes: bool) -> Schedule:
        plain = named_schedule(options.name, pipe, microbatches, options.chunks, options.slices)
        return with_passes(plain, options, recomputes)[0]


def extrapolated(makespan: Callable[[int], float], m: int, pipe: int) -> float:
    """Return the makespan of m microbatches: a long schedule repeats, so much for each further microbatch.

    Args:
        makespan: number of microbatches -> makespan.
        m, pipe: microbatches, and ranks of the pipe axis.
    """
    short = 3 * pipe + m % pipe
    if m <= short + 2 * pipe:
        return makespan(m)
    return makespan(short) + (m - short) / pipe * (makespan(short + pipe) - makespan(short))


def _short(value: float) -> float:
    """Return a number with four digits, as a training file has it."""
    return float(f"{value:.4g}")
