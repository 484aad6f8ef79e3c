"""A step's record from the marks of one rank, and the time of each part of the step.

The self time of a slice is the time that no slice within it takes, so the self times of all slices add up to the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ...pipe.program.ops import KINDS, Op
from .records import Slice, StepRecord, UnderWay

if TYPE_CHECKING:
    from ...grid.comm.clock import Clock, Mark

Parts = dict[str, dict[str, float]]  # axis -> part -> seconds

# Kind of a slice -> (axis, part) that its self time counts as. Tables show the parts in this order.
PARTS: dict[str, tuple[str, str]] = {
    "F": ("compute", "forward"),
    "forward": ("compute", "forward"),
    "B": ("compute", "backward"),
    "backward": ("compute", "backward"),
    "I": ("compute", "input gradient"),
    "W": ("compute", "weight gradient"),
    "C": ("compute", "recompute"),
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
_PARTS_OF_COLLECTIVES = {
    ("pipe", "barrier"): ("pipe", "idle"),
    ("data", "all_gather"): ("data", "gather"),
    ("data", "broadcast"): ("data", "gather"),
    ("data within", "all_gather"): ("data", "gather"),
}
_AXES = {"pipe": ("pipe", "tied weights"), "data": ("data", "reduce"), "tensor": ("tensor", "collectives")}
_AXES |= dict.fromkeys(("data within", "data between"), ("data", "reduce"))  # ZeRO++: within hosts, between hosts
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier")  # that are timed
WORLD = ("world", "agree")  # the world group, and groups over several axes
_ROUNDING = 1e-9  # seconds: the rounding error of times that were read back from a file in microseconds


class TimedSpan(NamedTuple):
    """A span that has ended, and its times as marks of a clock.

    Attributes:
        kind, about: as in ``OpenSpan``.
        start, end: its beginning and its end.
        turn: from then on the rank waited for an operation that it had started; an op had its inputs.
    """

    kind: str
    about: Any
    start: Mark
    turn: Mark
    end: Mark


def ops_of(timed: Sequence[TimedSpan]) -> Iterator[tuple[Op, Mark, Mark, Mark]]:
    """Yield each op with its times as in ``TimedSpan``. The times of the two ops of a pair are those of the pair."""
    paired = {op for span in timed if span.kind == "pair" for op in span.about}
    for span in timed:
        if span.kind == "pair":
            yield from ((op, span.start, span.turn, span.end) for op in span.about)
        elif span.kind in KINDS and span.about not in paired:
            yield span.about, span.start, span.turn, span.end


def step_record(step: int, clock: Clock, whole: tuple[Mark, Mark], timed: Sequence[TimedSpan]) -> StepRecord:
    """Build the record of a step from the marks of one rank.

    Args:
        step: number of the step.
        clock: the clock that made the marks.
        whole: begin and end of the step.
        timed: phases of the engine, ops of the program, and collectives.
    """
    clock.settle()
    at = clock.at
    slices = [Slice(f"step {step}", "step", at(whole[0]), at(whole[1]), {})]
    slices += [Slice(kind, kind, at(start), at(end), {}) for kind, about, start, _, end in timed if kind == about]
    ops = [*ops_of(timed)]
    received = {(op.kind, op.stage, op.microbatch) for op, *_ in ops}
    for op, entered, began, end in ops:
        named = {"stage": op.stage} | ({"microbatch": op.microbatch} if op.microbatch >= 0 else {})
        message = "RECV_F" if op.kind == "F" else "RECV_B" if op.kind in ("B", "I") else None
        if message is not None and (message, op.stage, op.microbatch) in received:
            source = f"{op.stage - 1}F" if op.kind == "F" else f"{op.stage + 1}B"
            slices.append(Slice(f"wait for {source}{op.microbatch}", "wait", at(entered), at(began), named))
        slices.append(Slice(str(op), op.kind, at(began), at(end), named))
    under_way = []
    for kind, call, begin, turn, over in timed:
        if kind in COLLECTIVES:
            axis, start, waited, end = call.axis.name, at(begin), at(turn), at(over)
            slices.append(Slice(kind, f"{axis}:{kind}", waited, end, {"axis": axis, "bytes": call.sent}))
            if start < waited:
                under_way.append(UnderWay(axis, kind, start, end, call.sent))
    begin, end = slices[0].start, slices[0].end
    within = [s for s in slices[1:] if begin <= s.start and s.end <= end]
    return StepRecord(step, (slices[0], *sorted(within, key=lambda s: (s.start, -s.end))), tuple(under_way))


def self_times(slices: Sequence[Slice]) -> list[float]:
    """Return the self time of each slice. Slices are ordered by start, the longer first where starts are equal."""
    own = [s.end - s.start for s in slices]
    open_: list[int] = []
    for i, (_, _, start, end, _) in enumerate(slices):
        while len(open_) > 1 and slices[open_[-1]].end <= start + _ROUNDING:
            open_.pop()
        if open_:
            # On a GPU the times come from two clocks: a slice may end a microsecond after the one that holds it.
            own[open_[-1]] -= min(end, slices[open_[-1]].end) - start
        open_.append(i)
    return own


def time_parts(record: StepRecord) -> Parts:
    """Return the seconds of each part of a step. They add up to the duration of the step."""
    seconds_of: Parts = {}
    for entry, seconds in zip(record.slices, self_times(record.slices), strict=True):
        axis, part = part_of(entry.kind)
        row = seconds_of.setdefault(axis, {})
        row[part] = row.get(part, 0.0) + seconds
    return seconds_of


def part_of(kind: str) -> tuple[str, str]:
    """Return the (axis, part) that the self time of a slice of this kind counts as."""
    if kind in PARTS:
        return PARTS[kind]
    axis, _, collective = kind.partition(":")
    return _PARTS_OF_COLLECTIVES.get((axis, collective)) or _AXES.get(axis, WORLD)
