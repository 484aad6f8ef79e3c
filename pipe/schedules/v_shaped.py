"""V-shaped schedules, with two stages per rank: ZB-V, V-Half, V-Min, DualPipe-V.

    stage   0 1 2 3 4 5 6 7
    rank    0 1 2 3 3 2 1 0

Rank r holds stage r, on the way down, and stage 2p-1-r, on the way up. Rank p-1 holds the two stages of the turn,
which therefore needs no message. A microbatch's activations are held long on rank 0 and short on rank p-1 on the way
down, and the other way round on the way up: so all ranks hold equally many.

The steady states of ZB-V, V-Half and V-Min are in v_steady.py, and how their beginnings and ends become short in
v_ends.py. Idle times and peaks are in the terms of classic.py.
"""

from __future__ import annotations

from ..program.ops import Orders
from .classic import number
from .v_ends import best_filled, best_squeezed
from .v_steady import zb_v_steady


def zb_v(pipe: int, microbatches: int, chunks: int = 2) -> Orders:
    """ZB-V (Qi 2023): idle only until the first microbatch has gone down.

    Idle (p-1)F/2 at F = I = W, peak p on every rank.

    rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2
    rank 1: 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2
    """
    return best_squeezed(zb_v_steady(pipe), pipe, microbatches)


def v_half(pipe: int, microbatches: int, chunks: int = 2) -> Orders:
    """V-Half (Qi 2024): half of 1F1B's memory.

    In the steady state a microbatch's F reaches the next rank two units later on the way down, and one unit later on
    the way up; its I likewise. Idle about (p-1)(F+B)/2 at F = I = W, peak p//2 + 1 on every rank.

    rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 3W1 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2
    rank 1: 1F0 2F0 1F1 2F1 2I0 2W0 1I0 1F2 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2
    """
    return best_filled("v-half", pipe, microbatches)


def v_min(pipe: int, microbatches: int, chunks: int = 2) -> Orders:
    """V-Min (Qi 2024): a third of 1F1B's memory.

    In the steady state a microbatch's F and I reach the next rank one unit later, on the way down and on the way up.
    Idle about two thirds of (p-1)(F+B) at F = I = W, more where they differ; peak (p+4)//3.

    rank 0: 0F0 0F1 0F2 5F0 5I0 5W0 5F1 5I1 5W1 0I0 0W0 5F2 5I2 0I1 5W2 0W1 0I2 0W2
    rank 1: 1F0 1F1 4F0 4F1 4I0 4W0 1F2 1I0 4I1 1W0 4W1 4F2 1I1 4I2 1W1 4W2 1I2 1W2
    rank 2: 2F0 3F0 2F1 3F1 3I0 2I0 3W0 2F2 2W0 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2
    """
    return best_filled("v-min", pipe, microbatches)


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
