"""A rough order per rank -> the orders of a schedule without avoidable idle time, within a memory limit.

A generator lays out a pattern: for each rank, its forwards and input gradients in the order of a steady
state, which knows nothing of how a pipeline fills and drains. Here the pattern is run in unit time
(F = I = W = 1, B = 2). A rank whose next op is not ready may

    pull ahead   a later op of the pattern that is ready, if the memory limit still holds for
                 everything in between (this is "squeezing" in Qi 2024, and fills the warm-up)
    weigh        do a W that was put off, which also frees memory

so that the steady state stays and the ends tighten. Within one stage microbatches keep their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from .ops import Op

Letter = tuple[str, int]  # (kind, stage): its k-th use in a pattern is microbatch k
NEVER = 1 << 60


def squeeze(
    patterns: Sequence[Sequence[Letter]],
    placement: Sequence[int],
    microbatches: int,
    limits: Sequence[int],
    ahead: bool,
    hold: Sequence[Sequence[int]] | None = None,
) -> tuple[int, list[list[Op]]] | None:
    """(makespan in units, orders), or None where the pattern needs more memory than `limits` (in stages).

    With `ahead`, ops may be pulled ahead; without, the pattern's order is kept and only W moves. What
    `hold` says of a letter of the pattern is the time before which it does not start; -1 is: not before the
    letters in front of it.
    """
    hold = hold or [[0] * len(pattern) for pattern in patterns]
    ranks = [_Rank(*of_rank, microbatches, ahead) for of_rank in zip(patterns, limits, hold, strict=True)]
    arrival = {letter: times for rank in ranks for letter, times in rank.arrival.items()}
    arrival["F", 0][:] = [0] * microbatches
    # where each letter's result goes: forward to the next stage, at the last one turn, then backward
    for rank in ranks:
        for kind, stage in rank.arrival:
            reader: Letter | None = None
            if kind == "F":
                reader = ("F", stage + 1) if stage + 1 < len(placement) else _backward(arrival, stage)
            elif stage:
                reader = _backward(arrival, stage - 1)
            rank.readers.append(arrival[reader] if reader else [0] * microbatches)
    active, now, end = ranks, 0, 0
    released = max((t for times in hold for t in times), default=0)  # from when on nothing is held
    while active:
        for rank in active:
            if rank.busy <= now and rank.step(now):
                end = max(end, rank.busy)
        if max(end, released) <= now:  # nothing runs and nothing could start
            return None
        now += 1
        active = [rank for rank in active if rank.left]
    return end, [rank.order for rank in ranks]


def _backward(arrival: dict[Letter, list[int]], stage: int) -> Letter:
    return ("I", stage) if ("I", stage) in arrival else ("B", stage)


class _Rank:
    """One rank's place in its pattern."""

    def __init__(
        self, pattern: Sequence[Letter], limit: int, hold: Sequence[int], microbatches: int, ahead: bool
    ) -> None:
        self.hold, self.ahead = hold, ahead
        self.letters = sorted(set(pattern))
        index = {letter: i for i, letter in enumerate(self.letters)}
        self.word = [index[letter] for letter in pattern]
        self.places: list[list[int]] = [[] for _ in self.letters]  # letter -> where it stands in the word
        for place, i in enumerate(self.word):
            self.places[i].append(place)
        self.arrival = {letter: [NEVER] * microbatches for letter in self.letters}
        self.times = list(self.arrival.values())
        self.readers: list[list[int]] = []
        self.next = [0] * len(self.letters)  # letter -> its next microbatch
        self.holds = [1 if kind == "F" else -1 for kind, _ in self.letters]
        self.head = 0  # the first place that is not done
        self.done = bytearray(len(pattern) + 1)
        self.microbatches, self.limit, self.held, self.busy = microbatches, limit, 0, 0
        self.put_off: deque[tuple[int, int]] = deque()  # (stage, microbatch) of the Ws to do
        self.left = len(pattern) + sum(microbatches for kind, _ in self.letters if kind == "I")
        self.order: list[Op] = []

    def step(self, now: int) -> bool:
        """Start one op at `now`, if there is one to start."""
        while self.done[self.head]:
            self.head += 1
        place = self._choose(now)
        if place is None and not self.put_off:
            return False
        self.left -= 1
        self.busy = now + 1
        if place is None:
            self.order.append(Op("W", *self.put_off.popleft()))
            self.held -= 1
            return True
        i = self.word[place]
        kind, stage = self.letters[i]
        mb = self.next[i]
        self.next[i] = mb + 1
        self.done[place] = 1
        self.order.append(Op(kind, stage, mb))
        if kind == "F":
            self.held += 1
        elif kind == "I":
            self.put_off.append((stage, mb))
        else:
            self.held -= 1
            self.busy = now + 2
        self.readers[i][mb] = self.busy
        return True

    def _choose(self, now: int) -> int | None:
        """The place in the word of the op to start, or None: then a W is next, if there is one."""
        ready = [
            self.places[i][mb] for i, mb in enumerate(self.next) if mb < self.microbatches and self.times[i][mb] <= now
        ]
        for place in sorted(ready):
            hold = self.hold[place]
            if hold > now or (place > self.head and (hold < 0 or not self.ahead)):
                continue
            if self.holds[self.word[place]] < 0:
                return place
            if place > self.head and not self._room(place):
                continue
            return place if self.held < self.limit else None
        return None

    def _room(self, place: int) -> bool:
        """Whether an F can be pulled ahead and all before it still fits, with every W done at once."""
        held = self.held - len(self.put_off)
        room = held < self.limit
        for i in range(self.head, place):
            if not self.done[i]:
                held += self.holds[self.word[i]]
                room = room and held < self.limit
        return room
