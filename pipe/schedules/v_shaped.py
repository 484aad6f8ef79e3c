"""V-shaped schedules, with two stages per rank: ZB-V, V-Half, V-Min, DualPipe-V.

    stage   0 1 2 3 4 5 6 7
    rank    0 1 2 3 3 2 1 0

Rank r holds stage r, on the way down, and stage 2p-1-r, on the way up. Rank p-1 holds the two stages of the turn,
which therefore needs no message. A microbatch's activations are held long on rank 0 and short on rank p-1 on the way
down, and the other way round on the way up: so all ranks hold equally many.

The patterns of ZB-V, V-Half and V-Min are lists of ops per rank for a steady state, in units: each F, I and W takes
one. Two functions of squeeze.py shorten their beginnings and ends. `fill_idle` moves ops to earlier idle units, and
makes V-Half and V-Min. `squeeze` runs a pattern, in the ways that VARIANTS lists, and makes ZB-V and more candidates
for the search. Idle times and peaks are in the terms of classic.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ..program.costs import Costs
from ..program.ops import Op, Orders
from ..program.placement import zigzag
from ..program.schedule import Schedule
from ..program.simulate import timeline_of
from ..program.timeline import Timeline
from .classic import number
from .squeeze import StageOp, fill_idle, squeeze

Pattern = tuple[
    list[list[StageOp]], list[list[int]] | None
]  # each rank's ops in order, and the time before which each must not start (see squeeze)
Block = tuple[int, int, int, int]  # when a microbatch's F down, F up, I up and I down start on a rank, in units
PatternMaker = Callable[[int], Pattern]  # number of microbatches -> pattern
PERIOD = 6  # F, I and W of both stages: a rank's work for one microbatch, in units


def zb_v(pipe: int, microbatches: int, chunks: int = 2) -> Orders:
    """ZB-V (Qi 2023): idle only until the first microbatch has gone down.

    Idle (p-1)F/2 at F = I = W, peak p on every rank.

    rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2
    rank 1: 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2
    """
    return best_squeezed(*PATTERNS["zb-v"](pipe), microbatches)


def v_half(pipe: int, microbatches: int, chunks: int = 2) -> Orders:
    """V-Half (Qi 2024): half of 1F1B's memory.

    In the steady state a microbatch's F reaches the next rank two units later on the way down, and one unit later on
    the way up; its I likewise. Idle about (p-1)(F+B)/2 at F = I = W, peak p//2 + 1 on every rank.

    rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 3W1 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2
    rank 1: 1F0 2F0 1F1 2F1 2I0 2W0 1I0 1F2 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2
    """
    return _best_filled("v-half", pipe, microbatches)


def v_min(pipe: int, microbatches: int, chunks: int = 2) -> Orders:
    """V-Min (Qi 2024): a third of 1F1B's memory.

    In the steady state a microbatch's F and I reach the next rank one unit later, on the way down and on the way up.
    Idle about two thirds of (p-1)(F+B) at F = I = W, more where they differ; peak (p+4)//3.

    rank 0: 0F0 0F1 0F2 5F0 5I0 5W0 5F1 5I1 5W1 0I0 0W0 5F2 5I2 0I1 5W2 0W1 0I2 0W2
    rank 1: 1F0 1F1 4F0 4F1 4I0 4W0 1F2 1I0 4I1 1W0 4W1 4F2 1I1 4I2 1W1 4W2 1I2 1W2
    rank 2: 2F0 3F0 2F1 3F1 3I0 2I0 3W0 2F2 2W0 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2
    """
    return _best_filled("v-min", pipe, microbatches)


def dualpipe_v(pipe: int, microbatches: int, chunks: int = 2) -> Orders:
    """DualPipeV (DeepSeek 2025): a forward next to each backward, for an executor that overlaps the two.

    With F&B the cost of an overlapped pair, idle (p-1)(F&B + B - 3W)/2; peak p + 1/2. The pairs are
    adjacent in the order. Their backwards are whole; only those at the ends of the step are split.

    rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3
    rank 1: 1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3
    """
    orders = []
    for r in range(pipe):
        down, up, after = r, 2 * pipe - 1 - r, pipe - 1 - r  # `after`: the ranks below this one
        weight = ("W", r)  # of the first input gradient whose W is still deferred, see `number`
        ops = [("F", down)] * (2 * after)
        ops += [("F", down), ("F", up)] * (r + 1)
        ops += [("I", up), weight, ("F", up)] * after
        ops += [("F", down), ("B", up), ("F", up), ("B", down)] * (microbatches - 2 * pipe + r + 1)
        ops += [("B", up), ("F", up), ("B", down)] * after
        # from the middle on, W is deferred: on even ranks half a step later than on odd ones
        for i in range(r + 1):
            ops.append(("I" if i > (r + 1) // 2 or (i == (r + 1) // 2 and r % 2 == 1) else "B", up))
            ops.append(("I" if i >= (r + 1) // 2 else "B", down))
        ops += [weight, ("I", down)] * after
        split = sum(kind == "I" for kind, _ in ops)
        ops += [weight] * (split - ops.count(weight))
        orders.append(number(ops))
    return orders


def _zb_v(pipe: int) -> tuple[PatternMaker, int]:
    """Return (function that makes ZB-V's pattern for a number of microbatches, memory limit in microbatches per rank).

    Each rank runs as many forwards ahead as memory allows, then ops of its two stages in turn.
    """

    def make_pattern(count: int) -> Pattern:
        patterns = []
        for r in range(pipe):
            down, up = r, 2 * pipe - 1 - r
            f, g, i, j = ("F", down), ("F", up), ("I", down), ("I", up)
            warm = [f] * (2 * (pipe - r) - 1) + [g, f] * r + [g, j] * (pipe - r)
            ops = number(warm + [f, i, g, j] * count + [j, i] * pipe)
            patterns.append([(op.kind, op.stage) for op in ops if op.microbatch < count])
        return patterns, None

    return make_pattern, pipe


def _v_half(pipe: int) -> tuple[list[Block], int]:
    turn = 3 if pipe % 2 == 0 else 0  # units of waiting that keep a rank's ops apart in every period
    blocks = [(2 * r, 3 * pipe - r - 2, 3 * pipe + turn + 2 * r - 1, 6 * pipe + turn - r - 2) for r in range(pipe)]
    return blocks, (pipe + 2) // 2


def _v_min(pipe: int) -> tuple[list[Block], int]:
    turn = 2 if pipe % 3 == 0 else 0
    blocks = [(r, 2 * pipe - r - 1, 2 * pipe + turn + r, 4 * pipe + turn - r - 1) for r in range(pipe)]
    return blocks, (pipe + 4) // 3


# name -> (ranks -> each rank's block, and the memory limit)
BLOCKS: dict[str, Callable[[int], tuple[list[Block], int]]] = {"v-half": _v_half, "v-min": _v_min}


def _repeated(name: str, pipe: int) -> tuple[PatternMaker, int]:
    blocks, memory = BLOCKS[name](pipe)
    return lambda count: repeat_block(blocks, count), memory


# name -> (ranks -> the pattern to squeeze, and the memory limit)
PATTERNS: dict[str, Callable[[int], tuple[PatternMaker, int]]] = {
    "zb-v": _zb_v,
    "v-half": partial(_repeated, "v-half"),
    "v-min": partial(_repeated, "v-min"),
}


def repeat_block(blocks: Sequence[Block], microbatches: int) -> tuple[list[list[StageOp]], list[list[int]]]:
    """Repeat the ops of one microbatch every period: the pattern of a steady state without idle time.

    Args:
        blocks: each rank's ops of the first microbatch.
        microbatches: the number of repetitions.

    Returns:
        (patterns, hold), as `squeeze` takes them. `hold` keeps the steady state (from rank 0's first I of stage 0 to
        its last F of stage 0) at its times.
    """
    begin, end = blocks[0][3], blocks[0][0] + PERIOD * (microbatches - 1)
    patterns, hold = [], []
    for rank in _repeated_starts(blocks, microbatches):
        ops = sorted(rank, key=rank.__getitem__)
        patterns.append([(op.kind, op.stage) for op in ops])
        hold.append([rank[op] if begin <= rank[op] <= end else 0 for op in ops])
    return patterns, hold


def _repeated_starts(blocks: Sequence[Block], microbatches: int) -> list[dict[Op, int]]:
    """Return when each rank's F and I start if its block is repeated every period."""
    starts = []
    for r, block in enumerate(blocks):
        up = 2 * len(blocks) - 1 - r
        stage_ops = (("F", r), ("F", up), ("I", up), ("I", r))
        first = list(zip(stage_ops, block, strict=True))
        starts.append({Op(*a, m): t + PERIOD * m for m in range(microbatches) for a, t in first})
    return starts


def filled(name: str, pipe: int, microbatches: int) -> Schedule:
    """Make V-Half or V-Min: repeat its block, then twice fill the idle units of the beginning and the end.

    First each W has an idle unit and moves as other ops do. Then the W give way: they take the units that remain.
    """
    blocks, memory = BLOCKS[name](pipe)
    placement = zigzag(pipe, 2)
    starts = _repeated_starts(blocks, microbatches)
    for weights in (True, False):
        starts = fill_idle(starts, placement, 2 * memory, weights)
        orders = tuple(tuple(sorted(rank, key=rank.__getitem__)) for rank in starts)
        schedule = Schedule(name, pipe, microbatches, 2, placement, orders)
        rows = timeline_of(schedule, Costs(2, 2, 2)).rows
        starts = [{span.op: round(span.start) for span in row if span.op.kind != "W"} for row in rows]
    return schedule


def _best_filled(name: str, pipe: int, microbatches: int) -> Orders:
    """Return the filled pattern's orders, or the squeezed one's if it is shorter at F = I = W (V-Min of 2 or 5 ranks).

    At other costs, most squeezed patterns that are equal at F = I = W take longer.
    """
    schedule = filled(name, pipe, microbatches)
    squeezed_orders = best_squeezed(*PATTERNS[name](pipe), microbatches)
    other = replace(schedule, orders=tuple(map(tuple, squeezed_orders)))
    shortest = min((schedule, other), key=lambda made: round(timeline_of(made).makespan, 6))
    return [list(order) for order in shortest.orders]


def best_squeezed(make_pattern: PatternMaker, memory: int, microbatches: int) -> Orders:
    """Squeeze a pattern with the best entry of VARIANTS, and return the orders.

    Each variant is tried on a few microbatches. The shortest makespan at F = I = W wins; among equals, the shortest at
    uneven costs with messages.

    Args:
        make_pattern: number of microbatches -> pattern.
        memory: limit of each rank, in microbatches through 1/p of the model.
        microbatches: number of microbatches of the step.
    """
    pipe = len(make_pattern(1)[0])

    def rank(sample: Schedule) -> tuple[float, float]:
        uneven = Costs(1, 1, 0.75, 0.05)
        return round(timeline_of(sample).makespan, 6), round(timeline_of(sample, uneven).makespan, 6)

    few = min(microbatches, 2 * pipe)
    samples = [
        (rank(sample), variant)
        for variant in range(len(VARIANTS))
        if (sample := squeezed(make_pattern, memory, few, variant))
    ]
    schedule = squeezed(make_pattern, memory, microbatches, min(samples)[1])
    assert schedule is not None
    return [list(order) for order in schedule.orders]


def squeezed_variants(name: str, pipe: int, microbatches: int) -> list[Schedule]:
    """Return a named schedule squeezed with each entry of VARIANTS, and with a longer steady state, and filled.

    Variants that exceed the memory limit are left out. Which one is best depends on the costs.
    """
    make_pattern, memory = PATTERNS[name](pipe)
    made = [squeezed(make_pattern, memory, microbatches, variant) for variant in range(len(VARIANTS))]
    held = made[VARIANTS.index((True, "times"))]
    if held is not None:
        # The warm-up is shorter now, so the steady state may begin earlier: keep it at these times instead.
        made.append(_squeeze(hold_steady_state(timeline_of(held, Costs(2, 2, 2))), memory, microbatches, ahead=True))
    if name in BLOCKS:
        made.append(filled(name, pipe, microbatches))
    return [schedule for schedule in made if schedule is not None]


# (pull ops ahead, what the steady state keeps: its times, its order, or nothing)
VARIANTS = ((False, "nothing"), (True, "times"), (True, "order"), (True, "nothing"))


def squeezed(make_pattern: PatternMaker, memory: int, microbatches: int, variant: int) -> Schedule | None:
    """Squeeze a pattern as the entry ``variant`` of VARIANTS says; None if it needs more than the memory limit.

    Args:
        make_pattern: number of microbatches -> pattern.
        memory: limit of each rank, in microbatches through 1/p of the model.
        microbatches: number of microbatches of the step.
        variant: index into VARIANTS.
    """
    ahead, keep = VARIANTS[variant]
    patterns, hold = make_pattern(microbatches)
    if hold and keep == "order":
        hold = [[-1 if t else 0 for t in times] for times in hold]
    return _squeeze((patterns, None if keep == "nothing" else hold), memory, microbatches, ahead)


def _squeeze(pattern: Pattern, memory: int, microbatches: int, ahead: bool) -> Schedule | None:
    patterns, hold = pattern
    pipe = len(patterns)
    placement = zigzag(pipe, 2)
    result = squeeze(patterns, placement, microbatches, [2 * memory] * pipe, ahead, hold)
    return Schedule("", pipe, microbatches, 2, placement, tuple(map(tuple, result[1]))) if result else None


def hold_steady_state(times: Timeline) -> Pattern:
    """Return the pattern of a schedule's timeline whose steady state keeps its times when it is squeezed.

    The steady state is from rank 0's first I of stage 0 to its last F of stage 0. Start times are rounded to whole
    units.
    """
    start = {span.op: round(span.start) for row in times.rows for span in row if span.op.kind != "W"}
    begin = min(t for op, t in start.items() if op.kind == "I" and op.stage == 0)
    end = max(t for op, t in start.items() if op.kind == "F" and op.stage == 0)
    rows = [[span.op for span in row if span.op.kind != "W"] for row in times.rows]
    patterns = [[(op.kind, op.stage) for op in row] for row in rows]
    return patterns, [[start[op] if begin <= start[op] <= end else 0 for op in row] for row in rows]
