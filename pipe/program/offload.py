"""Offload of activations to host memory as a pass over a schedule: it inserts O and R where their copies cost no time.

    1f1b                    0F0 0F1     0F2         0B0 ...
    with offload            0F0 0O0 0F1 0O1 0F2 0R0 0B0 ...

The copies of a rank run one after the other in a lane of their own (simulate.py). The pass plans a reload as late as
its backward allows, and an offload as early as the lane is free. Activations whose copies do not fit between their
forward and their backward stay on the device. All activations of a rank stay if its peak would not fall, because of the
buffers of the copies. So no op starts later than without offload, at the costs that the pass was given.

If a part is offloaded, the stages of a rank whose activations live longest come first, as in PipeOffload (Wan et al.
2025, arXiv:2503.01328, section 4). Of the last such stage, every n-th microbatch is offloaded.

    >>> schedule = offload_pass(triax.make_schedule("1f1b", pipe=4, microbatches=16))
    >>> result = triax.simulate(schedule, Costs(F=1, I=1, W=1, O=1, R=1))
    >>> result.makespan, result.peak_activations
    (57.0, (3.0, 3.0, 2.0, 1.0))
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from .activations import peak_activations
from .costs import Costs
from .ops import BACKWARD, Op
from .schedule import Schedule
from .simulate import timeline_of
from .timeline import Span

_NEAR = 1e-9


class _Copy(NamedTuple):
    start: float
    end: float
    op: Op


def offload_pass(
    schedule: Schedule, fraction: float = 1.0, stages: Collection[int] | None = None, costs: Costs | None = None
) -> Schedule:
    """Insert offloads and reloads of activations.

    Args:
        schedule: a schedule with backward ops.
        fraction: share of each rank's activations to offload, 0 to 1. Those whose copies would not fit stay.
        stages: the stages whose activations may be offloaded; None: all.
        costs: times of the ops, by which the copies are placed; None: ``Costs()``.

    Returns:
        The schedule with the same compute ops, and O and R between them.

    Raises:
        ValueError: the fraction is not from 0 to 1, a stage does not exist, or the schedule offloads already.
        ScheduleError: the schedule would hang.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"the fraction of activations to offload is {fraction}: give a number from 0 to 1")
    if schedule.recomputes:
        raise ValueError(f"{schedule.name} recomputes activations: offload them first, by offload_pass, then recompute")
    if schedule.offloads:
        raise ValueError(f"{schedule.name} offloads activations already: give the schedule without O and R")
    allowed = range(schedule.stages) if stages is None else sorted(set(stages))
    if wrong := [stage for stage in allowed if not 0 <= stage < schedule.stages]:
        raise ValueError(f"there is no stage {wrong[0]} to offload: the stages are 0 to {schedule.stages - 1}")
    costs = costs or Costs()
    took = costs.op_costs(schedule.stages, schedule.chunks)
    rows = timeline_of(schedule, costs).rows
    orders = [tuple(_with_copies(row, fraction, allowed, took["O"], took["R"])) for row in rows]
    offloaded = replace(schedule, orders=tuple(orders))
    peaks = zip(peak_activations(schedule), peak_activations(offloaded), strict=True)
    orders = [
        new if after < before else old for (before, after), old, new in zip(peaks, schedule.orders, orders, strict=True)
    ]
    return replace(schedule, orders=tuple(orders))


def _with_copies(
    row: Sequence[Span], fraction: float, allowed: Collection[int], offload: Sequence[float], reload: Sequence[float]
) -> list[Op]:
    """Return the ops of one rank with O and R."""
    made, used = _lives(row)
    chosen = chosen_activations(row, fraction, allowed)
    reloads: dict[tuple[int, int], _Copy] = {}
    free = float("inf")
    for key in sorted(chosen, key=lambda key: used[key], reverse=True):
        stage, microbatch = key
        end = min(used[key], free)
        start = end - reload[stage]
        if start - offload[stage] < made[key] - _NEAR:
            continue
        free = start
        reloads[key] = _Copy(start, end, Op("R", stage, microbatch))
    copies = sorted(reloads.values())
    ends = [span.end for span in row]
    for key in sorted(reloads, key=lambda key: made[key]):
        stage, microbatch = key
        begin = _gap(copies, row, ends, made[key], offload[stage], reloads[key].start)
        if begin is None:
            copies.remove(reloads[key])
        else:
            copies.append(_Copy(begin, begin + offload[stage], Op("O", stage, microbatch)))
            copies.sort()
    before: list[list[Op]] = [[] for _ in range(len(row) + 1)]
    for copy in copies:
        before[_slot(ends, copy.start)].append(copy.op)
    return [op for i, ops in enumerate(before) for op in (*ops, *(span.op for span in row[i : i + 1]))]


Times = dict[tuple[int, int], float]  # (stage, microbatch) -> a time


def _lives(row: Sequence[Span]) -> tuple[Times, Times]:
    """Return the end of each forward of a rank, and the start of its backward."""
    made = {span.op[1:]: span.end for span in row if span.op.kind == "F"}
    return made, {span.op[1:]: span.start for span in row if span.op.kind in BACKWARD}


def chosen_activations(row: Sequence[Span], fraction: float, allowed: Collection[int]) -> list[tuple[int, int]]:
    """Return (stage, microbatch) of the activations to give up: of the stages where they live longest, first.

    Args:
        row: spans of one rank.
        fraction: share of the rank's activations.
        allowed: stages whose activations may be given up.
    """
    made, used = _lives(row)
    keys: dict[int, list[tuple[int, int]]] = {}
    for key in made:
        if key in used:
            keys.setdefault(key[0], []).append(key)
    lives = {stage: fmean(used[key] - made[key] for key in own) for stage, own in keys.items()}
    chosen, left = [], fraction * len(keys)
    for stage in sorted(set(keys) & set(allowed), key=lambda stage: (-lives[stage], stage)):
        share = min(1.0, left)
        left -= share
        # Evenly over the microbatches: at 1/2 every second one.
        chosen += [key for i, key in enumerate(keys[stage]) if int((i + 1) * share + 1e-6) > int(i * share + 1e-6)]
    return chosen


def _slot(ends: Sequence[float], time: float) -> int:
    """Return the index of the op before which a copy is issued that shall start at a time."""
    return bisect_right(ends, time + _NEAR)


def _gap(
    copies: Sequence[_Copy], row: Sequence[Span], ends: Sequence[float], earliest: float, length: float, latest: float
) -> float | None:
    """Return the earliest start of an offload in the lane, so that no F waits for it; None if there is none."""
    starts = sorted(
        {earliest, *(copy.end for copy in copies if copy.end > earliest), *(e for e in ends if e > earliest)}
    )
    for start in starts:
        if start + length > latest + _NEAR:
            return None
        if any(copy.start < start + length - _NEAR and start < copy.end - _NEAR for copy in copies):
            continue
        # The first F after the compute op before which the offload is issued waits for its end.
        waiting = next((span for span in row[_slot(ends, start) + 1 :] if span.op.kind == "F"), None)
        if waiting is None or start + length <= waiting.start + _NEAR:
            return start
    return None
