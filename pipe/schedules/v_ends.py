"""Short beginnings and ends for the steady states of the V-shaped schedules.

    steady state ---fill_idle---> ops in earlier idle units, twice: with W, then with W in the units that remain
                 ---squeeze-----> run again under the memory limit, in one of the ways of VARIANTS

Filled ones make V-Half and V-Min, squeezed ones ZB-V. All of them are candidates for the search. Both functions are in
squeeze.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ..program.costs import Costs
from ..program.ops import Orders
from ..program.placement import zigzag
from ..program.schedule import Schedule
from ..program.simulate import timeline_of
from ..program.timeline import Timeline
from .squeeze import fill_idle, squeeze
from .v_steady import STEADY_STATES, Pattern, SteadyState, repeated_starts


class Variant(NamedTuple):
    """Way to squeeze a pattern.

    Attributes:
        ahead: ops are pulled ahead of others.
        keep: what the steady state keeps: its ``times``, its ``order``, or ``nothing``.
    """

    ahead: bool
    keep: str


KEEP_TIMES = Variant(True, "times")
VARIANTS = (Variant(False, "nothing"), KEEP_TIMES, Variant(True, "order"), Variant(True, "nothing"))


def filled(name: str, pipe: int, microbatches: int) -> Schedule:
    """Make V-Half or V-Min: repeat its block, then twice fill the idle units of the beginning and the end.

    First each W has an idle unit and moves as other ops do. Then the W give way: they take the units that remain.
    """
    steady, placement = STEADY_STATES[name](pipe), zigzag(pipe, 2)
    starts = repeated_starts(steady.blocks, microbatches)
    for weights in (True, False):
        starts = fill_idle(starts, placement, 2 * steady.memory, weights)
        orders = tuple(tuple(sorted(rank, key=rank.__getitem__)) for rank in starts)
        schedule = Schedule(name, pipe, microbatches, 2, placement, orders)
        rows = timeline_of(schedule, Costs(2, 2, 2)).rows
        starts = [{span.op: round(span.start) for span in row if span.op.kind != "W"} for row in rows]
    return schedule


def best_filled(name: str, pipe: int, microbatches: int) -> Orders:
    """Return the filled pattern's orders, or the squeezed one's if it is shorter at F = I = W (V-Min of 2 or 5 ranks).

    At other costs, most squeezed patterns that are equal at F = I = W take longer.
    """
    schedule = filled(name, pipe, microbatches)
    squeezed_orders = best_squeezed(STEADY_STATES[name](pipe), pipe, microbatches)
    other = replace(schedule, orders=tuple(map(tuple, squeezed_orders)))
    shortest = min((schedule, other), key=lambda made: round(timeline_of(made).makespan, 6))
    return [list(order) for order in shortest.orders]


def best_squeezed(steady: SteadyState, pipe: int, microbatches: int) -> Orders:
    """Return the orders of a steady state that is squeezed by the best of VARIANTS.

    Each variant is tried on a few microbatches. The shortest makespan at F = I = W wins; among equals, the shortest at
    uneven costs with messages; then the first.
    """
    few = min(microbatches, 2 * pipe)
    samples: list[tuple[float, float, int]] = []
    for number, variant in enumerate(VARIANTS):
        sample = squeezed(steady, few, variant)
        if sample is not None:
            even, uneven = timeline_of(sample), timeline_of(sample, Costs(1, 1, 0.75, 0.05))
            samples.append((round(even.makespan, 6), round(uneven.makespan, 6), number))
    *_, best = min(samples)
    schedule = squeezed(steady, microbatches, VARIANTS[best])
    assert schedule is not None
    return [list(order) for order in schedule.orders]


def squeezed_variants(name: str, pipe: int, microbatches: int) -> list[Schedule]:
    """Return a named schedule squeezed with each entry of VARIANTS, and with a longer steady state, and filled.

    Variants that exceed the memory limit are left out. Which one is best depends on the costs.
    """
    steady = STEADY_STATES[name](pipe)
    made = {variant: squeezed(steady, microbatches, variant) for variant in VARIANTS}
    schedules = list(made.values())
    held = made[KEEP_TIMES]
    if held is not None:
        # The warm-up is shorter now, so the steady state may begin earlier: keep it at these times instead.
        pattern = hold_steady_state(timeline_of(held, Costs(2, 2, 2)))
        schedules.append(_squeeze(pattern, steady.memory, microbatches, ahead=True))
    if steady.blocks:
        schedules.append(filled(name, pipe, microbatches))
    return [schedule for schedule in schedules if schedule is not None]


def squeezed(steady: SteadyState, microbatches: int, variant: Variant) -> Schedule | None:
    """Squeeze a steady state; None if it needs more than the memory limit."""
    orders, hold = steady.pattern(microbatches)
    if variant.keep == "nothing":
        hold = None
    elif hold and variant.keep == "order":
        hold = [[-1 if time else 0 for time in times] for times in hold]
    return _squeeze(Pattern(orders, hold), steady.memory, microbatches, variant.ahead)


def _squeeze(pattern: Pattern, memory: int, microbatches: int, ahead: bool) -> Schedule | None:
    pipe = len(pattern.orders)
    placement = zigzag(pipe, 2)
    result = squeeze(pattern.orders, placement, microbatches, [2 * memory] * pipe, ahead, pattern.hold)
    return Schedule("", pipe, microbatches, 2, placement, tuple(map(tuple, result[1]))) if result else None


def hold_steady_state(times: Timeline) -> Pattern:
    """Return the pattern of a schedule's timeline whose steady state keeps its times when it is squeezed.

    The steady state is from rank 0's first I of stage 0 to its last F of stage 0. Start times are rounded to whole
    units.
    """
    rows = [[span for span in row if span.op.kind != "W"] for row in times.rows]
    starts = [[round(span.start) for span in row] for row in rows]
    first = [(span.op.kind, round(span.start)) for span in rows[0] if span.op.stage == 0]
    begin = min(time for kind, time in first if kind == "I")
    end = max(time for kind, time in first if kind == "F")
    orders = [[(span.op.kind, span.op.stage) for span in row] for row in rows]
    return Pattern(orders, [[time if begin <= time <= end else 0 for time in row] for row in starts])
