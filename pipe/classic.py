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
    return [in_turn(r, microbatches, ahead=pipe - r) for r in range(pipe)]


def eager_1f1b(pipe: int, microbatches: int, chunks: int = 1) -> Orders:
    """1F1B with twice the forwards ahead, which hides slow messages (Zhuang 2022).

    Idle (p-1)(F+B), peak of rank r min(2(p-r)-1, m).

    rank 0: 0F0 0F1 0F2 0B0 0F3 0B1 0F4 0B2 0B3 0B4
    rank 1: 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1F4 1B4
    """
    return [in_turn(r, microbatches, ahead=2 * (pipe - r) - 1) for r in range(pipe)]


def in_turn(stage: int, microbatches: int, ahead: int) -> list[Op]:
    forwards, backwards = ([Op(kind, stage, m) for m in range(microbatches)] for kind in "FB")
    return merge(forwards, backwards, ahead)


def interleaved(pipe: int, microbatches: int, chunks: int) -> Orders:
    """1F1B over groups of p microbatches, each group chunk by chunk (Narayanan 2021).

    Idle (p-1)(F+B)/v, peak p + (p-1)/v microbatches on rank 0, less on the others.

    rank 0: 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
    rank 1: 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
    """
    orders = []
    for r in range(pipe):
        forwards = [Op("F", c * pipe + r, m) for c, m in by_groups(pipe, microbatches, chunks)]
        backwards = [Op("B", (chunks - 1 - c) * pipe + r, m) for c, m in by_groups(pipe, microbatches, chunks)]
        ahead = 2 * (pipe - r - 1) + (chunks - 1) * min(pipe, microbatches) + 1
        orders.append(merge(forwards, backwards, ahead))
    return orders


def by_groups(pipe: int, microbatches: int, chunks: int) -> list[tuple[int, int]]:
    """(chunk, microbatch): p microbatches through one chunk, then the same through the next."""
    return [
        (c, m)
        for first in range(0, microbatches, pipe)
        for c in range(chunks)
        for m in range(first, min(first + pipe, microbatches))
    ]


def looped_bfs(pipe: int, microbatches: int, chunks: int) -> Orders:
    """Breadth first: all microbatches through a chunk, then all through the next (Lamy-Poirier 2023).

    Idle (p-1)(F+B)/v where m >= p, peak m. Each stage's ops are one run, so ZeRO 3 gathers it twice.

    rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    rank 1: 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
    """
    runs = [("F", c) for c in range(chunks)] + [("B", c) for c in reversed(range(chunks))]
    return [[Op(k, c * pipe + r, m) for k, c in runs for m in range(microbatches)] for r in range(pipe)]


def forward(pipe: int, microbatches: int, chunks: int) -> Orders:
    """Inference: forwards only, in groups of p, so that a result leaves as early as it can.

    Idle (p-1)F/v where p divides m.

    rank 0: 0F0 0F1 0F2
    rank 1: 1F0 1F1 1F2
    """
    groups = by_groups(pipe, microbatches, chunks)
    return [[Op("F", c * pipe + r, m) for c, m in groups] for r in range(pipe)]


def merge(forwards: list[Op], backwards: list[Op], ahead: int) -> list[Op]:
    """`ahead` forwards, then a backward and a forward in turn, then the backwards that are left."""
    order = forwards[:ahead]
    for i, op in enumerate(backwards):
        order.append(op)
        order += forwards[ahead + i : ahead + i + 1]
    return order
