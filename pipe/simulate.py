"""Costs -> when every op runs, how long the step takes, how much is held in memory.

    >>> result = simulate(make_schedule("1f1b", pipe=4, microbatches=8), Costs(F=1, I=1, W=1, COMM=0))
    >>> result.makespan, round(result.bubble, 3), result.peak_activations
    (33.0, 0.273, (4.0, 3.0, 2.0, 1.0))

A rank runs its ops in order, each as soon as what it needs has arrived. A message takes COMM and keeps
nobody busy; between two stages of one rank there is no message.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .ops import Op
from .schedule import Schedule

Cost = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """What a forward, an input gradient, a weight gradient and a message cost, in any unit of time.

    A number of F, I, W is the cost of one rank's whole share of a microbatch, all its chunks together,
    so that schedules with different chunks compare: an op of one of v chunks costs 1/v of it.
    A sequence of F, I, W, GATHER gives each stage's own op instead, undivided: what one measures.
    COMM is one message's time; a sequence gives it for each boundary, stage 0 to 1 first.
    GATHER is ZeRO 3's: gathering the weights of one rank's whole share over the data axis. Layers are gathered
    ahead while others compute, so a pass that needs them (F, and I or B) takes no less than its gather, and
    counts as busy as long.
    """

    F: Cost = 1.0
    I: Cost = 1.0
    W: Cost = 1.0
    COMM: Cost = 0.0
    GATHER: Cost = 0.0

    def __post_init__(self) -> None:
        for field in ("F", "I", "W", "COMM", "GATHER"):
            value = getattr(self, field)
            if isinstance(value, Sequence):
                object.__setattr__(self, field, tuple(float(x) for x in value))
            values = value if isinstance(value, Sequence) else (value,)
            if not all(0 <= x < float("inf") for x in values):
                raise ValueError(f"a cost is a finite number of at least 0, but {field} = {value}")

    def op_costs(self, stages: int, chunks: int) -> dict[str, list[float]]:
        """For each compute kind, the cost of one op of each stage; its weights are gathered for each pass."""
        f, i, w, g = (self._per_stage(name, stages, chunks) for name in ("F", "I", "W", "GATHER"))
        b = [a + b for a, b in zip(i, w, strict=True)]
        return {"W": w} | {kind: list(map(max, cost, g)) for kind, cost in (("F", f), ("I", i), ("B", b))}

    def hops(self, placement: Sequence[int]) -> list[float]:
        """The time of a message across each boundary; none where both stages are on one rank."""
        boundaries = len(placement) - 1
        times = list(self.COMM) if isinstance(self.COMM, Sequence) else [float(self.COMM)] * boundaries
        if len(times) != boundaries:
            raise ValueError(f"COMM has {len(times)} values, but {len(placement)} stages have {boundaries} boundaries")
        return [0.0 if placement[s] == placement[s + 1] else t for s, t in enumerate(times)]

    def _per_stage(self, name: str, stages: int, chunks: int) -> list[float]:
        value = getattr(self, name)
        if not isinstance(value, Sequence):
            return [value / chunks] * stages
        if len(value) != stages:
            raise ValueError(f"{name} has {len(value)} values for {stages} stages: give each one, or one number")
        return list(value)


class Span(NamedTuple):
    """An op and the time it took."""

    op: Op
    start: float
    end: float


class Flight(NamedTuple):
    """A collective: until ``waited`` its rank did something else, from there to ``end`` it waited for it."""

    name: str
    start: float
    waited: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When each op of each rank ran: simulated here, or measured by the executor."""

    rows: tuple[tuple[Span, ...], ...]
    # Where they were measured: per rank, the collectives of the data axis that were under way meanwhile.
    flights: tuple[tuple[Flight, ...], ...] = ()

    @property
    def makespan(self) -> float:
        """From the first start to the last end, over all ranks."""
        spans = [span for row in self.rows for span in row]
        return max(s.end for s in spans) - min(s.start for s in spans) if spans else 0.0

    @property
    def bubble(self) -> float:
        """The idle share of the busiest rank: 1 - its busy time / makespan."""
        busiest = max((sum(s.end - s.start for s in row) for row in self.rows), default=0.0)
        return 1.0 - busiest / self.makespan if self.makespan else 0.0

    def to_json(self) -> str:
        return json.dumps([[[str(s.op), s.start, s.end] for s in row] for row in self.rows])

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        rows = json.loads(text)
        return cls(tuple(tuple(Span(Op.parse(op), start, end) for op, start, end in row) for row in rows))


@dataclass(frozen=True)
class Simulation:
    makespan: float
    bubble: float  # 1 - busy time of the busiest rank / makespan
    peak_activations: tuple[float, ...]  # per rank, in microbatches through 1/pipe of the model
    timeline: Timeline


def simulate(schedule: Schedule, costs: Costs | None = None, keep_gathered: bool = False) -> Simulation:
    """How long a step of `schedule` takes at `costs` (F = I = W = 1, COMM = GATHER = 0 unless told).

    With `keep_gathered` a stage's weights are gathered for its first F of the step only, and stay whole.
    """
    times = timeline(schedule, costs, keep_gathered)
    return Simulation(times.makespan, times.bubble, peak_activations(schedule), times)


def peak_activations(schedule: Schedule) -> tuple[float, ...]:
    """The most activations each rank holds at once, in microbatches through 1/pipe of the model.

    An activation is held from the start of its F to the end of its W or B. Where nothing ever goes
    backward (inference), it is held during its F only.
    """
    forward_only = not any(op.kind != "F" for order in schedule.orders for op in order)
    peaks = []
    for order in schedule.orders:
        held = peak = 0
        for kind, _, _ in order:
            if kind == "F":
                held += 1
                peak = max(peak, held)
            if kind == "W" or kind == "B" or forward_only:
                held -= 1
        peaks.append(peak / schedule.chunks)
    return tuple(peaks)


def timeline(schedule: Schedule, costs: Costs | None = None, keep_gathered: bool = False) -> Timeline:
    """When every op runs. A schedule that would hang raises `ScheduleError`, as `verify` does."""
    stages, mbs, placement = len(schedule.placement), schedule.microbatches, schedule.placement
    costs = costs or Costs()
    first_f = costs.op_costs(stages, schedule.chunks)["F"]  # of each stage's first microbatch
    if keep_gathered:
        costs = replace(costs, GATHER=0.0)
    cost, hop = costs.op_costs(stages, schedule.chunks), costs.hops(placement)
    cost_f, cost_b, cost_i, cost_w = (cost[kind] for kind in "FBIW")
    # ready_f[s * mbs + m]: when the input of stage s is there; ready_b[(s + 1) * mbs + m]: when the
    # gradient of its output is. The data is there from the start, and so is the loss.
    ready_f = [0.0] * mbs + [-1.0] * (stages * mbs)
    ready_b = [-1.0] * (stages * mbs) + [0.0] * mbs
    hop_f, hop_b = [*hop, 0.0], [0.0, *hop]  # where the output of a stage goes, and its input gradient
    rows: list[list[Span]] = [[] for _ in schedule.orders]
    clock = [0.0] * len(rows)
    waiting: dict[tuple[bool, int], int] = {}  # the arrival that a rank waits for -> the rank
    runnable = list(range(len(rows)))[::-1]
    while runnable:
        rank = runnable.pop()
        order, row, now = schedule.orders[rank], rows[rank], clock[rank]
        for i in range(len(row), len(order)):
            op = order[i]
            kind, stage, mb = op
            at = stage * mbs + mb
            if kind == "W":
                row.append(Span(op, now, now + cost_w[stage]))
                now += cost_w[stage]
                continue
            if kind == "F":
                start = ready_f[at]
                if start < 0:
                    waiting[True, at] = rank
                    break
                start = max(now, start)
                now = start + (cost_f[stage] if mb else first_f[stage])
                ready_f[at + mbs] = now + hop_f[stage]
                arrival = (True, at + mbs)
            else:
                start = ready_b[at + mbs]
                if start < 0 or ready_f[at + mbs] < 0:
                    waiting[False, at + mbs] = rank
                    break
                start = max(now, start)
                now = start + (cost_b[stage] if kind == "B" else cost_i[stage])
                ready_b[at] = now + hop_b[stage]
                arrival = (False, at)
            row.append(Span(op, start, now))
            if arrival in waiting:
                runnable.append(waiting.pop(arrival))
        clock[rank] = now
    if any(len(row) < len(order) for row, order in zip(rows, schedule.orders, strict=True)):
        from .verify import verify  # it names the ranks and the ops that wait for each other

        verify(schedule)
    return Timeline(tuple(map(tuple, rows)))
