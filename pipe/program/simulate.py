"""Simulation of a schedule: costs of the ops -> timeline, makespan, bubble, peak activations.

    >>> result = triax.simulate(triax.make_schedule("1f1b", pipe=4, microbatches=8), triax.Costs(F=1, I=1, W=1))
    >>> result.makespan, round(result.bubble, 3), result.peak_activations
    (33.0, 0.273, (4.0, 3.0, 2.0, 1.0))

A rank runs its ops in order, each as soon as its inputs have arrived. A message takes COMM and keeps no
rank busy; between two stages of one rank there is no message. Transfers of activations (O, R) run one after the other
in a lane of their rank, beside its compute ops. A backward waits for the reload of its activations, and an F for the
offloads that were issued before the compute op before it, so that memory is bounded whatever the speed of the lane.

The two ops of a pair (pairs.py) start together, when the inputs of both have arrived, and end together. Both have the
same span.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .activations import counts_in_flight, peak_offloaded, rank_peaks, stage_peaks
from .costs import Costs
from .deadlock import Wait, deadlock
from .ops import BACKWARD, MAKES, TRANSFERS, Op
from .orders import Orders
from .slices import slice_costs
from .timeline import Span, Timeline

Arrival = tuple[bool, int, int]  # an input (True) or a gradient, and the stage and microbatch that it is for


@dataclass(frozen=True)
class Simulation:
    """Result of `simulate`: the times of all ops, and the makespan, bubble and peak memory that follow from them.

    Attributes:
        makespan: time of the step, in the unit of the costs.
        bubble: idle share of the busiest rank, 1 - (its busy time) / makespan.
        peak_activations: for each rank the activations that it holds at most, in microbatches through 1/pipe of the
            model.
        peak_of_stages: the same for each stage; the stages of a rank may hold their most at different times.
        timeline: start and end of each op.
        peak_offloaded: for each rank the activations in host memory at most, in the same unit; () if the schedule
            offloads none.
    """

    makespan: float
    bubble: float
    peak_activations: tuple[float, ...]
    peak_of_stages: tuple[float, ...]
    timeline: Timeline
    peak_offloaded: tuple[float, ...] = ()


def simulate(schedule: Orders, costs: Costs | None = None, keep_gathered: bool = False) -> Simulation:
    """Simulate a step of `schedule`.

    >>> result = triax.simulate(triax.make_schedule("zb-h1", pipe=4, microbatches=8))
    >>> result.makespan, round(result.bubble, 3), result.peak_activations
    (27.0, 0.111, (4.0, 4.0, 4.0, 4.0))

    Args:
        schedule: the schedule.
        costs: by default F = I = W = 1, COMM = GATHER = 0.
        keep_gathered: under ZeRO-3, gather a stage's weights only before its first F of the step, and keep them
            gathered until the end of the step.

    Raises:
        ScheduleError: the schedule would hang.
        ValueError: the costs do not fit the schedule's stages or microbatches.
    """
    times = timeline_of(schedule, costs, keep_gathered)
    offloaded = peak_offloaded(schedule) if schedule.offloads else ()
    counts = counts_in_flight(schedule)
    stages = stage_peaks(schedule, counts)
    return Simulation(times.makespan, times.bubble, rank_peaks(schedule, counts), stages, times, offloaded)


def timeline_of(schedule: Orders, costs: Costs | None = None, keep_gathered: bool = False) -> Timeline:
    """Return the times of every op; arguments and errors as for `simulate`."""
    clock = _SimulatedClock(schedule, costs or Costs(), keep_gathered)
    clock.run()
    return clock.timeline()


class _SimulatedClock:
    """State of a simulation: what has run, what has arrived, and which rank waits for what.

    Single ops and pairs take the same way: a rank runs groups of ops that start together, of one op or of two.

    Attributes:
        now: for each rank, the time until which its compute ops are busy.
        done: for each rank, the number of its groups that have run.
        rows: for each rank, the spans of its compute ops.
        lanes: for each rank, the spans of its transfers, which run beside its compute ops.
        inputs, gradients: for each stage and microbatch, at stage * microbatches + microbatch: when the input of the
            stage, and when the gradient of its output, has arrived. Below 0: not yet. The data and the loss's gradient
            are there from the start, as the input of stage 0 and the gradient of the last stage.
        reloaded: for each stage and microbatch whose activations were reloaded, when they are back.
        leaving: for each rank, its offloads under way: the number of compute ops before it, and its end.
        waiting: for each arrival that a rank waits for, the rank.
        runnable: the ranks that may go on.
    """

    def __init__(self, schedule: Orders, costs: Costs, keep_gathered: bool) -> None:
        self.schedule, self.passes, stages = schedule, schedule.passes, schedule.stages
        work = _work_of(schedule, costs)
        shares = [
            (size * tokens, size * forward)
            for size in work
            for tokens, forward in slice_costs(schedule.slices, costs.attention)
        ]
        self.first_forward = costs.op_costs(stages, schedule.chunks, *shares[0])["F"]  # with the gather of the weights
        if keep_gathered:
            costs = replace(costs, GATHER=0.0)
        self.costs = [costs.op_costs(stages, schedule.chunks, *share) for share in shares]  # of the ops of each pass
        self.costs_of_pairs = costs.pair_costs(schedule)
        hops = costs.hops(schedule.placement)
        # For each pass, the time of a message from each stage to the next.
        self.hops = [[hop * tokens for hop in (*hops, 0.0)] for tokens, _ in shares]

        self.groups = [schedule.groups(rank) for rank in range(schedule.pipe)]
        self.now, self.done = [0.0] * schedule.pipe, [0] * schedule.pipe
        self.rows: list[list[Span]] = [[] for _ in self.groups]
        self.lanes: list[list[Span]] = [[] for _ in self.groups]
        self.inputs = [0.0] * self.passes + [-1.0] * (stages * self.passes)
        self.gradients = [-1.0] * ((stages - 1) * self.passes) + [0.0] * self.passes
        self.reloaded: dict[int, float] = {}
        self.leaving: list[deque[tuple[int, float]]] = [deque() for _ in self.groups]
        self.waiting: dict[Arrival, int] = {}
        self.runnable = list(range(schedule.pipe))[::-1]

    def run(self) -> None:
        """Run all ops of all ranks."""
        while self.runnable:
            self._run_rank(self.runnable.pop())
        if any(done < len(groups) for done, groups in zip(self.done, self.groups, strict=True)):
            at = [sum(map(len, groups[:done])) for done, groups in zip(self.done, self.groups, strict=True)]
            raise deadlock(self.schedule.orders, at, lambda op: _source(self.schedule, op))

    def timeline(self) -> Timeline:
        """Return the times of the ops that have run."""
        transfers = tuple(map(tuple, self.lanes)) if any(self.lanes) else ()
        return Timeline(tuple(map(tuple, self.rows)), transfers=transfers)

    def _run_rank(self, rank: int) -> None:
        """Run the ops of a rank until one waits for an arrival."""
        groups = self.groups[rank]
        for number in range(self.done[rank], len(groups)):
            ops = groups[number]
            if ops[0].kind in TRANSFERS:
                self._transfer(ops[0], rank)
            elif not self._compute(ops, rank):
                return
            self.done[rank] += 1

    def _compute(self, ops: tuple[Op, ...], rank: int) -> bool:
        """Run compute ops that start together. Return False if one waits for an arrival."""
        start = self.now[rank]
        for op in ops:
            arrival = self._arrival(op)
            if arrival < 0:
                self.waiting[op.kind == "F", op.stage, op.microbatch] = rank
                return False
            if arrival > start:
                start = arrival
        row, leaving = self.rows[rank], self.leaving[rank]
        if leaving and (ops[0].kind in MAKES or ops[-1].kind in MAKES):  # memory that offloads free
            while leaving and leaving[0][0] < len(row):
                start = max(start, leaving.popleft()[1])
        end = start + (self._cost(*ops[0]) if len(ops) == 1 else self._pair_cost(*ops))
        for op in ops:
            row.append(Span(op, start, end))
            self._publish(op, end)
        self.now[rank] = end
        return True

    def _transfer(self, op: Op, rank: int) -> None:
        """Start an offload or a reload: after the one before it, and not before the compute op before it has ended."""
        lane = self.lanes[rank]
        start = max(self.now[rank], lane[-1].end if lane else 0.0)
        end = start + self._cost(*op)
        lane.append(Span(op, start, end))
        if op.kind == "O":
            self.leaving[rank].append((len(self.rows[rank]), end))
        else:
            self.reloaded[op.stage * self.passes + op.microbatch] = end

    def _arrival(self, op: Op) -> float:
        """Return when the inputs of an op have arrived; below 0: that is not known yet."""
        kind, stage, microbatch = op
        at = stage * self.passes + microbatch
        if kind == "F":
            return self.inputs[at]
        if kind not in BACKWARD:
            return 0.0
        if self.inputs[at + self.passes] < 0 or self.gradients[at] < 0:  # its F, or the backward before it, has not run
            return -1.0
        return max(self.gradients[at], self.reloaded[at]) if at in self.reloaded else self.gradients[at]

    def _cost(self, kind: str, stage: int, microbatch: int) -> float:
        if kind == "F" and not microbatch:
            return self.first_forward[stage]
        return self.costs[microbatch % len(self.costs)][kind][stage]

    def _pair_cost(self, first: Op, second: Op) -> float:
        gathers = [self.first_forward[op.stage] for op in (first, second) if op.kind == "F" and not op.microbatch]
        return max((self.costs_of_pairs(first, second), *gathers))

    def _publish(self, op: Op, end: float) -> None:
        """Send the result of an op that ends, and let the rank go on that waits for it."""
        kind, stage, microbatch = op
        if kind == "F":
            there, arrivals, forward = stage + 1, self.inputs, True
        elif kind in BACKWARD and stage:
            there, arrivals, forward = stage - 1, self.gradients, False
        else:
            return
        hop = self.hops[microbatch % len(self.hops)][min(stage, there)]
        arrivals[there * self.passes + microbatch] = end + hop
        if (forward, there, microbatch) in self.waiting:
            self.runnable.append(self.waiting.pop((forward, there, microbatch)))


def _work_of(schedule: Orders, costs: Costs) -> Sequence[float]:
    """Return the relative work of each microbatch, or (1.0,) if it is the same for all."""
    if costs.work and len(costs.work) != schedule.microbatches:
        count = schedule.microbatches
        raise ValueError(f"work has {len(costs.work)} values for {count} microbatches: give one for each")
    return costs.work or (1.0,)


def _source(schedule: Orders, op: Op) -> Wait | None:
    """Return the op whose result an F or a backward reads, and its rank; None if it reads data or the loss."""
    kind, stage, microbatch = op
    source = stage - 1 if kind == "F" else stage + 1
    if not 0 <= source < schedule.stages:
        return None
    rank = schedule.placement[source]
    made = Op("F" if kind == "F" else "B", source, microbatch)
    if kind in "BI" and made not in schedule.orders[rank]:
        made = made._replace(kind="I")  # its backward is split
    return made, rank
