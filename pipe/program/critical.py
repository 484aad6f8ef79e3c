"""Reason for the start time of each op of a simulated step, and the critical path: the ops that set the makespan.

An op starts when its rank has ended the op before and its inputs have arrived: the later of the two is its cause. The
critical path goes from the last op of the step back along the causes to an op that starts at 0. Its ops and messages
follow each other without a gap, so their times add up to the makespan.

    >>> schedule = triax.make_schedule("1f1b", pipe=2, microbatches=2)
    >>> print(explain(schedule, Costs(), Op("B", 0, 0)))
    0B0 runs from 4 to 6 on rank 0. It starts when its gradient arrives, at 4: 1B0 of rank 1 ends at 4.
    Rank 0 was ready at 2, after 0F1, and idle for 2.
    It could start up to 1 later without a longer step.
"""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import NamedTuple

from .costs import Costs
from .ops import BACKWARD, MAKES, TRANSFERS, Op
from .schedule import Schedule
from .simulate import timeline_of
from .slices import slice_costs
from .timeline import Span

_NEAR = 1e-9  # relative; sums of floats in another order


class Cause(NamedTuple):
    """Reason for the time at which an op starts: another op that must end before.

    Attributes:
        op: the op that must end before.
        rank: its rank.
        end: its end.
        arrival: when its result arrives, after a message; ``end`` for the op before on the same rank.
        value: ``input`` or ``gradient``, what the op reads of it; ``copy`` for an offload or reload of the same rank;
            "" for the op before on the same rank.
    """

    op: Op
    rank: int
    end: float
    arrival: float
    value: str


class CriticalPath:
    """Causes, slack and critical path of a simulated step.

    Args:
        schedule: the schedule.
        costs: as for ``simulate``.
        keep_gathered: as for ``simulate``.

    Attributes:
        timeline: times of all ops.
        path: spans of the critical path, the first op first.

    Raises:
        ScheduleError: the schedule would hang.
    """

    def __init__(self, schedule: Schedule, costs: Costs | None = None, keep_gathered: bool = False) -> None:
        self._schedule = schedule
        self.timeline = timeline_of(schedule, costs, keep_gathered)
        self._hops = (costs or Costs()).hops(schedule.placement)
        self._shares = [tokens for tokens, _ in slice_costs(schedule.slices)]
        self._near = _NEAR * max(self.timeline.makespan, 1e-300)
        lanes = self.timeline.transfers
        self._spans: dict[Op, Span] = {span.op: span for row in (*self.timeline.rows, *lanes) for span in row}
        self._before: dict[Op, Span | None] = {}
        for row in self.timeline.rows:
            for i, span in enumerate(row):
                before = row[i - 1] if i else None
                paired = before is not None and before.op in schedule.pairs
                self._before[span.op] = self._before[row[i - 1].op] if paired else before
        self._partner: dict[Op, Op] = {}
        for order in schedule.orders if schedule.pairs else ():
            for op, after in pairwise(order):
                if op in schedule.pairs:
                    self._partner |= {op: after, after: op}
        self._copies = self._waits_of_copies()
        self.path = self._path()

    def span(self, op: Op) -> Span:
        """Return the span of an op.

        Raises:
            ValueError: the schedule has no such op; the message names one that it has.
        """
        if op in self._spans:
            return self._spans[op]
        other = op._replace(kind={"B": "I", "I": "B"}.get(op.kind, op.kind))
        shown = other if other in self._spans else next(iter(self._spans))
        raise ValueError(f"the schedule has no op {op}, but {shown}: give an op of the schedule")

    def causes(self, op: Op) -> list[Cause]:
        """Return what an op waits for: the op before on its rank, and the op whose result it reads on another stage."""
        causes_found = []
        if (before := self._before.get(op)) is not None:
            causes_found.append(Cause(before.op, self._rank(op), before.end, before.end, ""))
        both = [each for each in (op, self._partner.get(op)) if each is not None]  # a pair waits for what both wait for
        for other in [copy for member in both for copy in self._copies.get(member, ())]:
            end = self._spans[other].end
            causes_found.append(Cause(other, self._rank(op), end, end, "copy"))
        for member in both:
            if (source := self._source(member)) is not None:
                end = self._spans[source].end
                hop = self._hops[min(source.stage, member.stage)] * self._shares[member.microbatch % len(self._shares)]
                value = "input" if member.kind == "F" else "gradient"
                causes_found.append(Cause(source, self._rank(source), end, end + hop, value))
        return causes_found

    def slack(self) -> dict[Op, float]:
        """Return for each op how much later it could start without a longer step."""
        latest: dict[Op, float] = {}  # end
        last = max((span.end for span in self._spans.values()), default=0.0)
        graph = {op: {self._head(cause.op) for cause in self.causes(op)} for op in self._spans if op == self._head(op)}
        for op in reversed([*TopologicalSorter(graph).static_order()]):
            other = self._partner.get(op, op)
            latest[op] = latest[other] = min(latest.get(op, last), latest.get(other, last))
            span, end = self._spans[op], latest[op]
            for cause in self.causes(op):
                limit = end - (span.end - span.start) - (cause.arrival - cause.end)
                latest[cause.op] = min(latest.get(cause.op, last), limit)
        return {op: max(0.0, latest[op] - span.end) for op, span in self._spans.items()}

    def _head(self, op: Op) -> Op:
        """Return the first op of the pair of an op, or the op itself."""
        partner = self._partner.get(op)
        return partner if partner is not None and partner in self._schedule.pairs else op

    def explain(self, op: Op) -> str:
        """Return in words why an op starts when it does.

        Raises:
            ValueError: the schedule has no such op.
        """
        span, rank = self.span(op), self._rank(op)
        pair = f" as a pair with {self._partner[op]}" if op in self._partner else ""
        first = f"{op}{self._slice_of(op)} runs from {span.start:g} to {span.end:g} on rank {rank}{pair}."
        causes = self.causes(op)
        binding = [cause for cause in causes if cause.arrival >= span.start - self._near]
        if not binding:
            return f"{first} Nothing comes before it.\n{self._in_words(op)}"
        cause = binding[-1]
        if cause.value == "copy":
            why = f"when {cause.op} has ended, at {cause.end:g}."
        elif cause.value:
            message = f" and its message takes {cause.arrival - cause.end:g}" if cause.arrival > cause.end else ""
            why = f"when its {cause.value} arrives, at {cause.arrival:g}: {cause.op} of rank {cause.rank} ends at "
            why += f"{cause.end:g}{message}."
        else:
            why = f"when rank {rank} has ended {cause.op}, at {cause.end:g}."
        lines = [f"{first} It starts {why}"]
        for other in causes:
            wait = span.start - other.arrival
            if other is cause or wait < self._near:
                continue
            if other.value == "copy":
                lines.append(f"{other.op} had ended at {other.end:g}, {wait:g} before.")
            elif other.value:
                lines.append(f"Its {other.value} had arrived at {other.arrival:g}, {wait:g} before.")
            else:
                lines.append(f"Rank {rank} was ready at {other.end:g}, after {other.op}, and idle for {wait:g}.")
        return "\n".join([*lines, self._in_words(op)])

    def _slice_of(self, op: Op) -> str:
        if len(self._shares) == 1:
            return ""
        microbatch, number = divmod(op.microbatch, len(self._shares))
        return f" (slice {number} of microbatch {microbatch})"

    def _in_words(self, op: Op) -> str:
        slack = self.slack()[op]
        if slack <= self._near:
            return "It is on a critical path: the step would be longer if it started later."
        return f"It could start up to {slack:g} later without a longer step."

    def _path(self) -> list[Span]:
        return [*self._back()][::-1]

    def _back(self) -> Iterator[Span]:
        """Yield the critical path from its end."""
        span = max(self._spans.values(), key=lambda span: span.end, default=None)
        while span is not None:
            yield span
            start = span.start
            binding = [cause for cause in self.causes(span.op) if cause.arrival >= start - self._near]
            span = self._spans[binding[-1].op] if binding and start > self._near else None

    def _waits_of_copies(self) -> dict[Op, list[Op]]:
        """Return what transfers wait for, and the transfers that compute ops wait for (simulate.py)."""
        waits: dict[Op, list[Op]] = {}
        for order in self._schedule.orders if self._schedule.offloads else ():
            lane: Op | None = None
            computed: list[Op] = []
            started = 0  # compute ops before this op, or before its pair
            leaving: list[tuple[int, Op]] = []
            for op in order:
                if op.kind in TRANSFERS:
                    waits[op] = [before for before in (*computed[-1:], lane) if before is not None]
                    lane = op
                    leaving += [(len(computed), op)] if op.kind == "O" else []
                    continue
                if op.kind in MAKES:
                    waits[op] = [offload for before, offload in leaving if before < started]
                    leaving = [copy for copy in leaving if copy[0] == started]
                elif op.kind in BACKWARD and (reload := op._replace(kind="R")) in self._spans:
                    waits[op] = [reload]
                computed.append(op)
                started = len(computed) if op not in self._schedule.pairs else started
        return waits

    def _rank(self, op: Op) -> int:
        return self._schedule.placement[op.stage]

    def _source(self, op: Op) -> Op | None:
        """Return the op of another stage whose result an op reads; None if there is none."""
        if op.kind in "WORC":
            return None
        stage = op.stage - 1 if op.kind == "F" else op.stage + 1
        if not 0 <= stage < self._schedule.stages:
            return None
        if op.kind == "F":
            return Op("F", stage, op.microbatch)
        backward = Op("B", stage, op.microbatch)
        return backward if backward in self._spans else backward._replace(kind="I")


def explain(schedule: Schedule, costs: Costs, op: Op) -> str:
    """Return in words why an op of a schedule starts when it does; see ``CriticalPath.explain``."""
    return CriticalPath(schedule, costs).explain(op)
