"""Zero-bubble schedules with one stage per rank: ZB-H1, ZB-H2. The backward is split, and W fills idle time.

I is the input gradient, which the stage before waits for. W is the weight gradient, which no rank waits for.
Idle times and peaks are in the terms of classic.py.
"""

from __future__ import annotations

from ..program.ops import Op, Orders
from .classic import merge
from .squeeze import squeeze


def zb_h1(pipe: int, microbatches: int, chunks: int = 1, slices: int = 1) -> Orders:
    """1F1B with deferred W, within 1F1B's memory (Qi 2023).

    Idle (p-1)(F+I-W) where m >= p and W <= F, I; peak p on every rank.
    Over n slices (Seq1F1B, Sun 2024): idle (p-1)(F+I-W)/n, peak 1 + (p-1)/n.

    rank 0: 0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1: 1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    rank 2: 2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
    """
    return [defer_weights(r, microbatches, ahead=pipe - r + slices - 1, late=r) for r in range(pipe)]


def zb_h2(pipe: int, microbatches: int, chunks: int = 1) -> Orders:
    """Twice the forwards ahead; idle only until the first microbatch arrives (Qi 2023).

    Idle (p-1)F at F = I = W where m >= 2p-1; peak 2p-1 on every rank.

    rank 0: 0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1: 1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3
    """
    if microbatches >= 2 * pipe - 1:
        return [defer_weights(r, microbatches, ahead=2 * (pipe - r) - 1, late=2 * r) for r in range(pipe)]
    # too few microbatches for that: take the number of additional forwards ahead (beyond ZB-H1) that is fastest
    results = []
    for additional in range(pipe):
        ahead = [min(pipe - r + additional, 2 * (pipe - r) - 1) for r in range(pipe)]
        patterns = [merge([("F", r)] * microbatches, [("I", r)] * microbatches, n) for r, n in enumerate(ahead)]
        results.append(squeeze(patterns, range(pipe), microbatches, [2 * pipe - 1] * pipe, ahead=False))
    return min((result for result in results if result), key=lambda result: result[0])[1]


def defer_weights(stage: int, microbatches: int, ahead: int, late: int) -> list[Op]:
    """Return one stage's order: `ahead` forwards, then I and F in turn, with each W `late` microbatches after its I."""
    order = [Op("F", stage, m) for m in range(min(ahead, microbatches))]
    for m in range(microbatches + late):
        if m < microbatches:
            order.append(Op("I", stage, m))
        if m >= late:
            order.append(Op("W", stage, m - late))
        if m + ahead < microbatches:
            order.append(Op("F", stage, m + ahead))
    return order
