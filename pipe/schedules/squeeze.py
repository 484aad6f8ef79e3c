"""List scheduling under a memory limit: a rough order per rank -> orders without avoidable idle time.

A generator lays out a pattern: for each rank, its forwards and input gradients in the order of a steady
state, which ignores how a pipeline fills and drains. Here the pattern is run in unit time
(F = I = W = 1, B = 2). A rank whose next op is not ready may

    pull ahead   a later op of the pattern that is ready, if the memory limit still holds for
                 everything in between (this is "squeezing" in Qi 2024, and fills the warm-up)
    do a W       that was deferred, which also frees memory

so that the steady state stays and the ends become shorter. Within one stage microbatches keep their order.

`fill_idle` starts from the times of the ops, and no op moves to a later one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

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
        for position, i in enumerate(self.codes):
            self.places[i].append(position)
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
        position = self._choose(now)
        if position is None and not self.deferred:
            return False
        self.left -= 1
        self.busy = now + 1
        if position is None:
            self.order.append(Op("W", *self.deferred.popleft()))
            self.held -= 1
            return True
        i = self.codes[position]
        kind, stage = self.stage_ops[i]
        mb = self.next[i]
        self.next[i] = mb + 1
        self.done[position] = 1
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
        for position in sorted(ready):
            hold = self.hold[position]
            if hold > now or (position > self.head and (hold < 0 or not self.ahead)):
                continue
            if self.holds[self.codes[position]] < 0:
                return position
            if position > self.head and not self._fits_ahead(position):
                continue
            return position if self.held < self.limit else None
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


def fill_idle(
    starts: Sequence[Mapping[Op, int]], placement: Sequence[int], limit: int, weights: bool
) -> list[dict[Op, int]]:
    """Move ops before and after the steady state to earlier idle units of their ranks ("reordering" in Qi 2024).

    The steady state is from rank 0's first I of stage 0 to its last F of stage 0. In order of time, each other op takes
    the first idle unit after the ops that it needs in which the rank's memory stays within its limit.

    Args:
        starts: for each rank, the unit in which each F and I starts.
        placement: the rank of each stage.
        limit: the number of activations that a rank may hold, each of one microbatch in one stage.
        weights: give each W an idle unit first, from which it moves too; otherwise only ops after the steady state
            move, and each W takes the first unit that they leave.

    Returns:
        For each rank, the unit in which each F, I and W starts.
    """
    moved = [_with_weights(rank) if weights else dict(rank) for rank in starts]
    memory = [_UnitMemory(rank, not weights) for rank in moved]
    begin = moved[0][Op("I", 0, 0)]
    end = max(t for op, t in moved[0].items() if op.kind == "F" and op.stage == 0)
    for t, r, op in sorted((t, r, op) for r, rank in enumerate(moved) for op, t in rank.items()):
        if (begin, 0) <= (t, r) <= (end, 0) or (t < begin and not weights):
            continue
        needed = [(r, op._replace(microbatch=op.microbatch - 1)), (r, Op("I", op.stage, op.microbatch))]
        if op.kind == "F":
            needed[1] = placement[op.stage - 1], Op("F", op.stage - 1, op.microbatch)
        elif op.kind == "I" and op.stage + 1 < len(placement):
            needed[1] = placement[op.stage + 1], Op("I", op.stage + 1, op.microbatch)
        elif op.kind == "I":
            needed[1] = r, Op("F", op.stage, op.microbatch)
        earliest = 1 + max(moved[q].get(other, -1) for q, other in needed)
        for unit in range(earliest, t):
            if memory[r].kinds[unit] is None and memory[r].move(t, unit, limit):
                moved[r][op] = unit
                break
    return [_with_weights(rank) for rank in moved]


class _UnitMemory:
    """Activations that one rank holds before each unit, and the Ws that wait for an idle unit."""

    def __init__(self, starts: Mapping[Op, int], defer: bool) -> None:
        """Record the ops of a rank; `defer`: each I leaves a W, which takes the first idle unit after it."""
        self.kinds: list[str | None] = [None] * (max(starts.values()) + 1)
        for op, t in starts.items():
            self.kinds[t] = op.kind
        self.defer = defer
        self.states = self._states_from(0, (0, 0), NEVER)

    def move(self, start: int, unit: int, limit: int) -> bool:
        """Move the op at `start` to the earlier idle `unit`, unless the rank then holds more than `limit`."""
        kinds = self.kinds
        kinds[start], kinds[unit] = None, kinds[start]
        states = self._states_from(unit, self.states[unit], start)
        if max(states)[0] > limit:
            kinds[start], kinds[unit] = kinds[unit], None
            return False
        self.states[unit : unit + len(states)] = states
        return True

    def _states_from(self, unit: int, state: tuple[int, int], changed: int) -> list[tuple[int, int]]:
        """Return (held, waiting) before each unit from `unit` on, until nothing differs after the unit `changed`."""
        states = [state]
        held, waiting = state
        for at in range(unit, len(self.kinds)):
            kind = self.kinds[at]
            if kind == "F":
                held += 1
            elif kind == "W":
                held -= 1
            elif kind is not None:
                waiting += self.defer
            elif waiting:
                held, waiting = held - 1, waiting - 1
            if at >= changed and (held, waiting) == self.states[at + 1]:
                break
            states.append((held, waiting))
        return states


def _with_weights(starts: Mapping[Op, int]) -> dict[Op, int]:
    """Put each W of a rank that has no unit yet into the first idle one."""
    at = {t: op for op, t in starts.items()}
    complete = dict(starts)
    late: deque[Op] = deque()
    now, last = 0, max(at)
    while now <= last or late:
        op = at.get(now)
        if op is None and late:
            complete[late.popleft()] = now
        elif op is not None and op.kind == "I" and (weight := Op("W", op.stage, op.microbatch)) not in starts:
            late.append(weight)
        now += 1
    return complete
