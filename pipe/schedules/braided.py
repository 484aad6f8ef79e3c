"""STP: a V-shaped schedule whose passes run in pairs, so that collectives hide (Qi et al. 2025, arXiv:2510.27257).

Rank r holds stage r, on the way down, and stage 2p-1-r, on the way up (v_shaped.py). While one pass of a pair waits for
its collectives over the tensor axis, the other one computes. T_F, T_I, T_W and T_AR are the times of one stage. For
3p-1 microbatches or more the paper counts

    idle time of the pipeline    (p-1)(T_F + T_AR + T_I - T_W)
    collectives not hidden       (2p+1) T_AR: of the forwards before the steady state and the backwards after it

In each step of the steady state a rank runs F and B of its upper stage, then F and B of its lower stage. The authors'
generator (github.com/MICLAB-BUPT/STP) has the same order.
"""

from __future__ import annotations

from ..program.ops import Op, Orders
from .classic import number
from .squeeze import StageOp


def stp(pipe: int, microbatches: int, chunks: int = 2) -> Orders:
    """STP (Qi 2025): pairs of F with I, W, B and F.

    Idle (p-1)F/2 at F = I = W without collectives; peak 2p - 1/2.

    rank 0: 0F0 0F1 0F2 3F0 0F3 3F1&3I0 0F4&3W0 3F2&3B1 0B0 3F3&3I2 0B1 3F4&3I3 0B2 3B4 0B3 3W2 3W3 0B4
    rank 1: 1F0 2F0 1F1 2F1 1F2&1F3 2F2&2B0 1F4&1B0 2F3&2I1 1B1 2F4&2I2 1B2 2B3 1B3 2B4 1B4 2W1 2W2
    """
    return [number([op for cell in _cells(r, pipe, microbatches) for op in cell]) for r in range(pipe)]


def stp_pairs(pipe: int, microbatches: int, chunks: int = 2) -> frozenset[Op]:
    """Return the first op of each pair of STP."""
    firsts = []
    for r, order in enumerate(stp(pipe, microbatches)):
        after = iter(order)
        for cell in _cells(r, pipe, microbatches):
            first, *_ = (next(after) for _ in cell)
            firsts += [first] * (len(cell) > 1)
    return frozenset(firsts)


def stp_idle(forward: float, inputs: float, weights: float, collectives: float, pipe: int) -> float:
    """Return the idle time of STP, whose collectives run beside other passes (Qi 2025)."""
    idle = forward + inputs - weights + collectives  # halves of them are the times of a stage
    return ((pipe - 1) * idle + (2 * pipe + 1) * collectives) / 2


def _cells(r: int, pipe: int, microbatches: int) -> list[tuple[StageOp, ...]]:
    """Return the passes of one rank, alone or in pairs."""
    down, up, after = r, 2 * pipe - 1 - r, pipe - 1 - r  # `after`: the ranks below this one
    f, g, b, c, i, j = (("F", down), ("F", up), ("B", down), ("B", up), ("I", down), ("I", up))
    w = ("W", r)  # of the first input gradient whose weight gradient is still deferred, see `number`
    steady = 2 * (microbatches - 3 * pipe + 1) + 1 + r
    cells: list[tuple[StageOp, ...]] = [(f,)] * (2 * after)
    cells += [(f,), (g,)] * (r + 1)
    cells += [(f,)] * ((r + 1) % 2) + [(f, f)] * ((r + 1) // 2)
    cells += [(g, j), (f, w)] * after
    for k in range(steady + r):
        is_steady = k < steady
        cells.append((f, b if is_steady else i) if k % 2 else (g, c if is_steady else j))
    cells += [(b,), (g, j)] * (2 * pipe - 2 - r)
    cells += [(b,), (c,)] * (r + 1)
    cells += [(b,), *[(w,), (w,), (b,)] * after]
    return cells + [(w,)] * (2 * r)
