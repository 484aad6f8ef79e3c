"""Costs of the ops from measured steps, and a simulation of the schedule with them to compare with a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median

from .costs import Costs
from .ops import COMPUTE, Op
from .schedule import Schedule
from .simulate import timeline_of
from .timeline import Timeline


def simulated(schedule: Schedule, measured: Timeline) -> Timeline:
    """Return the simulation of a schedule with the costs of a measured step.

    Each op takes the median time of its stage, and each message the median time of its boundary.
    """
    return timeline_of(schedule, costs_of([measured], schedule.placement, len(schedule.slices)))


def costs_of(steps: Sequence[Timeline], placement: Sequence[int], slices: int = 1) -> Costs:
    """Return the median time of each stage's ops and of each boundary's messages, in the unit of the timelines.

    A message's time is the time from the end of the op that made it to the start of the op that reads it, measured
    where the reading rank was idle. A whole backward counts as I, with W = 0.

    Args:
        steps: timelines of one schedule, each with all its ops.
        placement: the rank of each stage.
        slices: slices of each microbatch, of equal length. Then the costs are the mean of a slice's times this number.
    """
    average = median if slices == 1 else fmean
    stages = len(placement)
    took: dict[tuple[str, int], list[float]] = {}
    messages: list[list[float]] = [[] for _ in range(stages - 1)]
    for timeline in steps:
        spans = {span.op: span for row in timeline.rows for span in row if span.op.kind in COMPUTE}
        for op, span in spans.items():
            took.setdefault((op.kind, op.stage), []).append(span.end - span.start)
        for row in timeline.rows:
            for before, span in pairwise(s for s in row if s.op.kind in COMPUTE):
                kind, stage, microbatch = span.op
                if kind in "WC":
                    continue
                source = stage - 1 if kind == "F" else stage + 1
                if not 0 <= source < stages or placement[source] == placement[stage]:
                    continue
                made = spans[Op(kind, source, microbatch)]
                if before.end < made.end:
                    messages[min(stage, source)].append(span.start - made.end)

    def medians(kind: str) -> list[float]:
        return [slices * average(took[kind, stage]) if (kind, stage) in took else 0.0 for stage in range(stages)]

    input_gradients = [b or i for b, i in zip(medians("B"), medians("I"), strict=True)]
    comm = [max(0.0, slices * average(times)) if times else 0.0 for times in messages]
    return Costs(F=medians("F"), I=input_gradients, W=medians("W"), COMM=comm)
