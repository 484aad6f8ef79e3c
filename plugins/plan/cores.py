"""Time of a schedule whose ranks share the cores of one machine: those that compute get equal shares of the cores.

A rank that waits for a message takes no core, so that fewer ranks than all compare with a bubble: with 4 ranks on
2 cores the others compute faster while one is idle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...pipe.program.schedule import Schedule


class StageWork(NamedTuple):
    """Seconds of a core that one stage takes for a microbatch: F, I, W, and for what follows its last backward pass."""

    forward: float
    inputs: float
    weights: float

    def of(self, kind: str) -> float:
        """Return the seconds of an op."""
        return {"F": self.forward, "I": self.inputs, "W": self.weights, "B": self.inputs + self.weights}[kind]


def makespan(
    schedule: Schedule,
    work: Sequence[StageWork],
    ends: Sequence[float],
    latency: float,
    message: float,
    copies: int,
    speed: Callable[[int], float],
) -> float:
    """Return the seconds from the first op to the end of the last rank.

    Args:
        schedule: the ops of each pipe rank.
        work: of each stage.
        ends: seconds of a core that each pipe rank takes behind its last op.
        latency: seconds until a message arrives, in which no core is busy.
        message: seconds of a core that the ranks on both ends of a message take.
        copies: processes with the same ops at the same time for each pipe rank.
        speed: number of processes that compute -> speed of each, over that of a process alone.
    """
    placement, ranks = schedule.placement, range(len(schedule.orders))
    last = len(placement) - 1
    arrived: dict[tuple[str, int, int], float] = {}  # (direction, stage, microbatch) -> time
    place, left, busy = [0] * len(ranks), [0.0] * len(ranks), [False] * len(ranks)
    ended = [False] * len(ranks)
    now = 0.0

    def start(rank: int) -> float | None:
        """Begin the next op if its inputs are there; else return the time at which they will be, if it is known."""
        order = schedule.orders[rank]
        if place[rank] == len(order):
            if not ended[rank]:
                ended[rank], left[rank], busy[rank] = True, ends[rank], True
            return None
        kind, stage, microbatch = order[place[rank]]
        source = stage - 1 if kind == "F" else stage + 1
        extra = 0.0
        if kind != "W" and 0 <= source <= last:
            time = arrived.get((kind if kind == "F" else "B", stage, microbatch))
            if time is None or time > now:
                return time
            extra = message if placement[source] != placement[stage] else 0.0
        to = stage + 1 if kind == "F" else stage - 1
        if kind != "W" and 0 <= to <= last and placement[to] != placement[stage]:
            extra += message
        busy[rank], left[rank] = True, work[stage].of(kind) + extra
        return None

    while True:
        waits = [start(rank) for rank in ranks if not busy[rank]]
        active = [rank for rank in ranks if busy[rank]]
        future = [time for time in waits if time is not None and time > now]
        if not active:
            if not future:
                return now
            now = min(future)
            continue
        rate = speed(len(active) * copies)
        step = min(left[rank] for rank in active) / rate
        if future:
            step = min(step, min(future) - now)
        now += step
        for rank in active:
            left[rank] -= step * rate
            if left[rank] > 1e-15:
                continue
            busy[rank] = False
            if ended[rank]:
                continue
            kind, stage, microbatch = schedule.orders[rank][place[rank]]
            place[rank] += 1
            to = stage + 1 if kind == "F" else stage - 1
            if kind != "W" and 0 <= to <= last:
                hop = latency if placement[to] != placement[stage] else 0.0
                arrived["F" if kind == "F" else "B", to, microbatch] = now + hop
