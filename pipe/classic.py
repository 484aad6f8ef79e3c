"""Schedules with one backward op and a fixed pattern per rank. Each is drawn above its lines.

A generator returns the order of every rank. `F(s, m)` and `B(s, m)` make the ops.
"""

from __future__ import annotations

from .ops import Op

Orders = list[list[Op]]


def gpipe(pipe: int, microbatches: int, chunks: int = 1) -> Orders:
    """All forwards, then all backwards (Huang 2019). Idle (p-1)(F+B), peak m.

    rank 0: 0F0 0F1 0F2 0B0 0B1 0B2
    rank 1: 1F0 1F1 1F2 1B0 1B1 1B2
    """
    return [[Op(kind, r, m) for kind in "FB" for m in range(microbatches)] for r in range(pipe)]


def one_f_one_b(pipe: int, microbatches: int, chunks: int = 1) -> Orders:
    """A backward as soon as it can be (Narayanan 2019). Idle (p-1)(F+B), peak of rank r min(p-r, m).

    rank 0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
    rank 1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
    rank 2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
    """
    return [alternate(r, microbatches, ahead=pipe - r) for r in range(pipe)]


def eager_1f1b(pipe: int, microbatches: int, chunks: int = 1) -> Orders:
    """1F1B with twice the forwards ahead, which hides slow messages (Zhuang 2022).

    Idle (p-1)(F+B), peak of rank r min(2(p-r)-1, m).

    rank 0: 0F0 0F1 0F2 0B0 0F3 0B1 0F4 0B2 0B3 0B4
    rank 1: 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1F4 1B4
    """
    return [alternate(r, microbatches, ahead=2 * (pipe - r) - 1) for r in range(pipe)]


def alternate(stage: int, microbatches: int, ahead: int) -> list[Op]:
    """`ahead` forwards, then a backward and a forward in turn, then the backwards that are left."""
    order = [Op("F", stage, m) for m in range(min(ahead, microbatches))]
    for m in range(microbatches):
        order.append(Op("B", stage, m))
        if m + ahead < microbatches:
            order.append(Op("F", stage, m + ahead))
    return order
