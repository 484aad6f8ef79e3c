"""Forward-only schedule for any placement: inference, and evaluation between training steps."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from .ops import Op
from .schedule import Schedule


def forward_only(placement: Sequence[int], microbatches: int) -> Schedule:
    """Make a forward-only schedule in which each rank runs the last one of its stages whose input is ready.

    Outputs are then ready early, and few activations wait between stages.

    rank 0: 0F0 0F1 0F2 3F0 3F1 3F2
    rank 1: 1F0 2F0 1F1 2F1 1F2 2F2         placement (0, 1, 1, 0)
    """
    pipe, stages = max(placement) + 1, len(placement)
    orders: list[list[Op]] = [[] for _ in range(pipe)]
    ready: list[list[tuple[int, int]]] = [[] for _ in range(pipe)]  # per rank, (-stage, microbatch)
    ready[placement[0]] = [(0, mb) for mb in range(microbatches)]
    remaining = stages * microbatches
    while remaining:
        # One tick: every rank with something ready runs it; results are read from the next tick on.
        made = [(rank, *heapq.heappop(queue)) for rank, queue in enumerate(ready) if queue]
        for rank, minus, mb in made:
            stage = -minus
            orders[rank].append(Op("F", stage, mb))
            remaining -= 1
            if stage + 1 < stages:
                heapq.heappush(ready[placement[stage + 1]], (-stage - 1, mb))
    return Schedule("forward", pipe, microbatches, stages // pipe, tuple(placement), tuple(map(tuple, orders)))
