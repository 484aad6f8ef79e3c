"""Schedules as the zero-bubble repository prints them (sail-sg/zero-bubble-pipeline-parallelism, ``print_schedule``).

    f0 f1 F0 B0 W0 ...    one line per rank; the letter is the op, the number the microbatch

A small letter is an op of a rank's first chunk, a capital one of its second. f, b and w are F, I and W; a b whose w
does not come is a whole backward, B. Messages (SF0, RF0, SB0, RB0), post-validation (PV0, SPV0, RPV0) and offload
(OSS0, OSE0, ORP0, ORS0, ORE0, OB0) are skipped, as messages of torch's CSV are: passes insert triax's own.
"""

from __future__ import annotations

import re

from .deadlock import ScheduleError
from .ops import Op
from .placement import loop, zigzag
from .schedule import Schedule
from .simulate import timeline_of

_TOKEN = re.compile(r"([fbw])(\d+)", re.IGNORECASE)
_SKIPPED = re.compile(r"([sr][fb]|[sr]?pv|oss|ose|orp|ors|ore|ob)\d+", re.IGNORECASE)
_KINDS = {"F": "f", "B": "b", "I": "b", "W": "w"}


def to_zero_bubble(schedule: Schedule) -> str:
    """Return one line per rank, as the zero-bubble repository prints its schedules.

    Raises:
        ValueError: the schedule has more than two chunks, or ops that the format does not have.
    """
    if schedule.chunks > 2:
        raise ValueError(
            f"{schedule.name} has {schedule.chunks} chunks, but the zero-bubble repository's lines tell two apart: "
            "write .csv or .json"
        )
    if schedule.pairs:
        raise ValueError(
            f"{schedule.name} has pairs of ops, which the zero-bubble repository's lines cannot say: write .csv"
        )
    lines = []
    for rank, order in enumerate(schedule.orders):
        first = schedule.placement.index(rank)
        if wrong := [op for op in order if op.kind not in _KINDS]:
            raise ValueError(f"the zero-bubble repository's lines have no op for {wrong[0]}: write a .json file")
        cells = [_KINDS[op.kind] + str(op.microbatch) for op in order]
        lines.append(
            " ".join(cell if op.stage == first else cell.upper() for cell, op in zip(cells, order, strict=True))
        )
    return "\n".join(lines) + "\n"


def from_zero_bubble(text: str, name: str = "file") -> Schedule:
    """Read lines of the zero-bubble repository.

    The lines do not say on which rank the second chunk begins: the placement is the loop (0 1 0 1) or the zigzag
    (0 1 1 0). The result has the placement with which the schedule runs; if it runs with both, the faster one.

    Raises:
        ValueError: a cell is not an op, an op comes twice, the ranks have different numbers of chunks, or the schedule
            runs with neither placement.
    """
    rows = [[cell for cell in line.split() if not _SKIPPED.fullmatch(cell)] for line in text.splitlines()]
    rows = [row for row in rows if row]
    chunks = {1 + any(cell[0].isupper() for cell in row) for row in rows}
    if len(chunks) != 1:
        raise ValueError(
            f"{len(rows)} lines have ops of 1 or 2 chunks: give one line per rank, all with the same number of chunks"
        )
    count, pipe = chunks.pop(), len(rows)
    candidates: list[tuple[float, Schedule]] = []
    for placement in dict.fromkeys((loop(pipe, count), zigzag(pipe, count))):
        orders = tuple(_order(row, rank, placement) for rank, row in enumerate(rows))
        microbatches = 1 + max(op.microbatch for order in orders for op in order)
        schedule = Schedule(name, pipe, microbatches, count, placement, orders)
        try:
            candidates.append((timeline_of(schedule).makespan, schedule))
        except ScheduleError as error:
            reason = error
    if not candidates:
        raise ValueError(f"the schedule runs neither in a loop nor in a zigzag of stages: {reason}")
    return min(candidates, key=lambda candidate: candidate[0])[1]


def _order(row: list[str], rank: int, placement: tuple[int, ...]) -> tuple[Op, ...]:
    """Return the ops of one line."""
    if len(set(row)) < len(row):
        twice = next(cell for i, cell in enumerate(row) if cell in row[:i])
        raise ValueError(
            f"line {rank + 1} has {twice} twice: more than two chunks, and slices of sequences, cannot be told apart"
        )
    stages, order, cells = [s for s, home in enumerate(placement) if home == rank], [], set(row)
    for cell in row:
        token = _TOKEN.fullmatch(cell)
        if token is None:
            raise ValueError(f"{cell!r} on line {rank + 1} is not an op: the ops are f, b and w, as in f0 b0 w0 or F0")
        letter, microbatch = token[1], int(token[2])
        kind = letter.upper() if letter in "fFwW" else "I"
        weights = ("W" if letter.isupper() else "w") + token[2]
        if kind == "I" and weights not in cells:
            kind = "B"
        order.append(Op(kind, stages[letter.isupper()], microbatch))
    return tuple(order)
