"""Recomputation of activations as a pass over a schedule: it inserts C before backwards, and memory falls.

    1f1b                    0F0 0F1 0F2 0F3     0B0 ...
    with recomputation      0F0 0F1 0F2 0F3 0C0 0B0 ...

C runs directly before its backward: at no other time does it need less memory. It takes as long as a forward, and waits
for no message. If the rank waits for the gradient anyway, C costs no time.

    >>> schedule = recompute_pass(triax.make_schedule("1f1b", pipe=4, microbatches=8))
    >>> result = triax.simulate(schedule)
    >>> result.makespan, result.peak_activations
    (39.0, (1.0, 1.0, 1.0, 1.0))
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from .activations import peak_activations
from .costs import Costs
from .offload import chosen_activations
from .ops import BACKWARD, Op
from .schedule import Schedule
from .simulate import timeline_of


def recompute_pass(
    schedule: Schedule, fraction: float = 1.0, stages: Collection[int] | None = None, costs: Costs | None = None
) -> Schedule:
    """Insert recomputations of activations.

    Args:
        schedule: a schedule with backward ops.
        fraction: share of each rank's activations to recompute, 0 to 1: of the stages where they live longest, first.
        stages: the stages whose activations may be recomputed; None: all.
        costs: times of the ops, by which the stages are chosen; None: ``Costs()``.

    Returns:
        The schedule with C before backwards; a rank whose peak would not fall stays as it is.

    Raises:
        ValueError: the fraction is not from 0 to 1, a stage does not exist, or the schedule has pairs or recomputes
            already.
        ScheduleError: the schedule would hang.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"the fraction of activations to recompute is {fraction}: give a number from 0 to 1")
    if schedule.recomputes:
        raise ValueError(f"{schedule.name} recomputes activations already: give the schedule without C")
    if schedule.pairs:
        raise ValueError(f"{schedule.name} has pairs, and a C would come between their ops: give a schedule without")
    allowed = range(schedule.stages) if stages is None else sorted(set(stages))
    if wrong := [stage for stage in allowed if not 0 <= stage < schedule.stages]:
        raise ValueError(f"there is no stage {wrong[0]} to recompute: the stages are 0 to {schedule.stages - 1}")
    orders = []
    for row, order in zip(timeline_of(schedule, costs).rows, schedule.orders, strict=True):
        offloaded = {op[1:] for op in order if op.kind == "O"}
        chosen = set(chosen_activations(row, fraction, allowed)) - offloaded
        orders.append(
            tuple(
                new_op
                for op in order
                for new_op in ([Op("C", *op[1:])] if op.kind in BACKWARD and op[1:] in chosen else []) + [op]
            )
        )
    lower = peak_activations(replace(schedule, orders=tuple(orders)))
    peaks = zip(peak_activations(schedule), lower, strict=True)
    compared = zip(peaks, schedule.orders, orders, strict=True)
    return replace(schedule, orders=tuple(new if after < before else old for (before, after), old, new in compared))
