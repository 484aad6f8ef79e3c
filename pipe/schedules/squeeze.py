"""List scheduling under a memory limit: a rough order per rank -> orders without avoidable idle time.

A generator lays out a pattern: for each rank, its forwards and input gradients in the order of a steady
state, which ignores how a pipeline fills and drains. Here the pattern is run in unit time
(F = I = W = 1, B = 2). A rank whose next op is not ready may

    pull ahead   a later op of the pattern that is ready, if the memory limit still holds for
                 everything in between (this is "squeezing" in Qi 2024, and fills the warm-up)
    do a W       that was deferred, which also frees memory

so that the steady state stays and the ends become shorter. Within one stage microbatches keep their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..program.ops import Op

StageOp = tuple[str, int]  # (kind, stage): an op without its microbatch; its k-th use in a pattern is microbatch k
NEVER = 1 << 60


def squeeze(
    patterns: Sequence[Sequence[StageOp]],
    placement: Sequence[int],
    microbatches: int,
    limits: Sequence[int],
    ahead: bool,
    hold: Sequence[Sequence[int]] | None = None,
) -> tuple[int, list[list[Op]]] | None:
    """Run a pattern in unit time (see the module's docstring) and return the resulting orders.

    Args:
        patterns: for each rank, its F, I and B in a rough order, without microbatches. W is added here.
        placement: the rank of each stage.
        microbatches: number of microbatches of the step.
        limits: for each rank, the number of activations it may hold, each of one microbatch in one stage.
        ahead: let a rank run a later op of the pattern while its next op is not ready; otherwise the pattern's order is
            kept and only W moves.
        hold: for each op of each rank's pattern, the time in units before which it does not start; -1: it does not
            start before all ops in front of it in the pattern have.

    Returns:
        (makespan in units, orders), or None if the pattern needs more memory than `limits`.
    """
    hold = hold or [[0] * len(pattern) for pattern in patterns]
    ranks = [_RankState(*of_rank, microbatches, ahead) for of_rank in zip(patterns, limits, hold, strict=True)]
    arrival = {stage_op: times for rank in ranks for stage_op, times in rank.arrival.items()}
    arrival["F", 0][:] = [0] * microbatches
    # the reader of each result: F of the next stage, the last stage's own backward, the backward of the stage before
    for rank in ranks:
        for kind, stage in rank.arrival:
            reader: StageOp | None = None
            if kind == "F":
                reader = ("F", stage + 1) if stage + 1 < len(placement) else _backward(arrival, stage)
            elif stage:
                reader = _backward(arrival, stage - 1)
            rank.readers.append(arrival[reader] if reader else [0] * microbatches)
    active, now, end = ranks, 0, 0
    released = max((t for times in hold for t in times), default=0)  # the time from which no op is held back
    while active:
        for rank in active:
            if rank.busy <= now and rank.step(now):
                end = max(end, rank.busy)
        if max(end, released) <= now:  # nothing runs and nothing could start
            return None
        now += 1
        active = [rank for rank in active if rank.left]
    return end, [rank.order for rank in ranks]


def _backward(arrival: dict[StageOp, list[int]], stage: int) -> StageOp:
    return ("I", stage) if ("I", stage) in arrival else ("B", stage)


class _RankState:
    """State of one rank while its pattern is run."""

    def __init__(
        self, pattern: Sequence[StageOp], limit: int, hold: Sequence[int], microbatches: int, ahead: bool
    ) -> None:
        self.hold, self.ahead = hold, ahead
        self.stage_ops = sorted(set(pattern))
        index = {stage_op: i for i, stage_op in enumerate(self.stage_ops)}
        self.codes = [index[stage_op] for stage_op in pattern]
        self.places: list[list[int]] = [[] for _ in self.stage_ops]  # stage op -> its places in the pattern
        for place, i in enumerate(self.codes):
            self.places[i].append(place)
        self.arrival = {stage_op: [NEVER] * microbatches for stage_op in self.stage_ops}
        self.times = list(self.arrival.values())
        self.readers: list[list[int]] = []
        self.next = [0] * len(self.stage_ops)  # stage op -> its next microbatch
        self.holds = [1 if kind == "F" else -1 for kind, _ in self.stage_ops]
        self.head = 0  # the first place that is not done
        self.done = bytearray(len(pattern) + 1)
        self.microbatches, self.limit, self.held, self.busy = microbatches, limit, 0, 0
        self.deferred: deque[tuple[int, int]] = deque()  # (stage, microbatch) of the deferred Ws
        self.left = len(pattern) + sum(microbatches for kind, _ in self.stage_ops if kind == "I")
        self.order: list[Op] = []

    def step(self, now: int) -> bool:
        """Start one op at time `now`, if one can start; return True if one did."""
        while self.done[self.head]:
            self.head += 1
        place = self._choose(now)
        if place is None and not self.deferred:
            return False
        self.left -= 1
        self.busy = now + 1
        if place is None:
            self.order.append(Op("W", *self.deferred.popleft()))
            self.held -= 1
            return True
        i = self.codes[place]
        kind, stage = self.stage_ops[i]
        mb = self.next[i]
        self.next[i] = mb + 1
        self.done[place] = 1
        self.order.append(Op(kind, stage, mb))
        if kind == "F":
            self.held += 1
        elif kind == "I":
            self.deferred.append((stage, mb))
        else:
            self.held -= 1
            self.busy = now + 2
        self.readers[i][mb] = self.busy
        return True

    def _choose(self, now: int) -> int | None:
        """Return the place in the pattern of the op to start; None: do a W, if one is deferred."""
        ready = [
            self.places[i][mb] for i, mb in enumerate(self.next) if mb < self.microbatches and self.times[i][mb] <= now
        ]
        for place in sorted(ready):
            hold = self.hold[place]
            if hold > now or (place > self.head and (hold < 0 or not self.ahead)):
                continue
            if self.holds[self.codes[place]] < 0:
                return place
            if place > self.head and not self._fits_ahead(place):
                continue
            return place if self.held < self.limit else None
        return None

    def _fits_ahead(self, place: int) -> bool:
        """Return True if an F can be pulled ahead and all ops before it still fit, with every W done at once."""
        held = self.held - len(self.deferred)
        fits = held < self.limit
        for i in range(self.head, place):
            if not self.done[i]:
                held += self.holds[self.codes[i]]
                fits = fits and held < self.limit
        return fits
