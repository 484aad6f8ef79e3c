"""What one rank did in one step, as slices of time, one within the other; and from them, what the time went to.

A slice's own time is what no slice within it takes, so the parts of a step add up to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ..grid.clock import Clock
    from ..grid.traffic import Flight
    from ..pipe.executor import Marked


class Slice(NamedTuple):
    """Something that a rank did, in seconds as ``time.perf_counter`` counts them."""

    name: str
    kind: str  # a key of PARTS, or axis:collective
    start: float
    end: float
    args: dict[str, Any]


class UnderWay(NamedTuple):
    """A collective that was under way while its rank did something else."""

    axis: str
    collective: str
    start: float
    end: float
    bytes: float


@dataclass(frozen=True)
class StepRecord:
    """One rank's step."""

    step: int
    slices: tuple[Slice, ...]  # a slice comes before those within it
    under_way: tuple[UnderWay, ...]

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.slices[0].end - self.slices[0].start


# What a slice's own time is: axis -> part. The order is that in which they are shown.
PARTS: dict[str, tuple[str, str]] = {
    "F": ("compute", "forward"),
    "forward": ("compute", "forward"),
    "B": ("compute", "backward"),
    "backward": ("compute", "backward"),
    "I": ("compute", "input gradient"),
    "W": ("compute", "weight gradient"),
    "optimizer": ("compute", "optimizer"),
    "wait": ("pipe", "idle"),
    "SEND_F": ("pipe", "send"),
    "SEND_B": ("pipe", "send"),
    "RECV_F": ("pipe", "receive"),
    "RECV_B": ("pipe", "receive"),
    "TIED": ("pipe", "tied weights"),
    "REDUCE": ("data", "reduce"),
    "reduce": ("data", "reduce"),
    "GATHER": ("data", "gather"),
    "RELEASE": ("data", "gather"),
    "batch": ("host", "batch"),
    "program": ("host", "other"),
    "step": ("host", "other"),
}
_COLLECTIVES = {
    ("pipe", "barrier"): ("pipe", "idle"),
    ("data", "all_gather"): ("data", "gather"),
    ("data", "broadcast"): ("data", "gather"),
    ("data within", "all_gather"): ("data", "gather"),
}
_AXES = {"pipe": ("pipe", "tied weights"), "data": ("data", "reduce"), "tensor": ("tensor", "collectives")}
_AXES |= dict.fromkeys(("data within", "data between"), ("data", "reduce"))  # of ZeRO++, within hosts and between them
WORLD = ("world", "agree")  # and the groups that join several axes
_ROUNDING = 1e-9  # seconds, that a file's microseconds may be off


def step_record(
    step: int,
    clock: Clock,
    whole: tuple[Any, Any],
    phases: Iterable[tuple[str, Any, Any]],
    ops: Sequence[Marked],
    flights: Iterable[Flight],
) -> StepRecord:
    """Put together what was marked.

    Args:
        step: its number.
        clock: that marked it.
        whole: where the step begins and ends.
        phases: kind, start and end of what the engine did.
        ops: of the program.
        flights: collectives.
    """
    clock.settle()
    at = clock.at
    slices = [Slice(f"step {step}", "step", at(whole[0]), at(whole[1]), {})]
    slices += [Slice(kind, kind, at(start), at(end), {}) for kind, start, end in phases]
    received = {(op.kind, op.stage, op.microbatch) for op, *_ in ops}
    for op, entered, began, end in ops:
        named = {"stage": op.stage} | ({"microbatch": op.microbatch} if op.microbatch >= 0 else {})
        message = "RECV_F" if op.kind == "F" else "RECV_B" if op.kind in ("B", "I") else None
        if message is not None and (message, op.stage, op.microbatch) in received:
            source = f"{op.stage - 1}F" if op.kind == "F" else f"{op.stage + 1}B"
            slices.append(Slice(f"wait for {source}{op.microbatch}", "wait", at(entered), at(began), named))
        slices.append(Slice(str(op), op.kind, at(began), at(end), named))
    under_way = []
    for flight in flights:
        start, waited, end = at(flight.start), at(flight.waited), at(flight.end)
        size = {"axis": flight.axis, "bytes": flight.bytes}
        slices.append(Slice(flight.collective, f"{flight.axis}:{flight.collective}", waited, end, size))
        if start < waited:
            under_way.append(UnderWay(flight.axis, flight.collective, start, end, flight.bytes))
    begin, end = slices[0].start, slices[0].end
    within = [s for s in slices[1:] if begin <= s.start and s.end <= end]
    return StepRecord(step, (slices[0], *sorted(within, key=lambda s: (s.start, -s.end))), tuple(under_way))


def own_times(slices: Sequence[Slice]) -> list[float]:
    """Of each slice the time that none within it takes. Slices come in order of their start, the longer one first."""
    own = [s.end - s.start for s in slices]
    open_: list[int] = []
    for i, (_, _, start, end, _) in enumerate(slices):
        while len(open_) > 1 and slices[open_[-1]].end <= start + _ROUNDING:
            open_.pop()
        if open_:
            # (Two clocks meet on a GPU: what sticks out of a slice by a microsecond is cut.)
            own[open_[-1]] -= min(end, slices[open_[-1]].end) - start
        open_.append(i)
    return own


def parts(record: StepRecord) -> dict[str, dict[str, float]]:
    """Axis -> part -> seconds; they add up to the step."""
    found: dict[str, dict[str, float]] = {}
    for entry, seconds in zip(record.slices, own_times(record.slices), strict=True):
        axis, part = part_of(entry.kind)
        row = found.setdefault(axis, {})
        row[part] = row.get(part, 0.0) + seconds
    return found


def part_of(kind: str) -> tuple[str, str]:
    """The axis and the part that a slice's own time counts to."""
    if kind in PARTS:
        return PARTS[kind]
    axis, _, collective = kind.partition(":")
    return _COLLECTIVES.get((axis, collective)) or _AXES.get(axis, WORLD)
