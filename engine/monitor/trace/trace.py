"""Trace of one step of all ranks in one file, for chrome://tracing and ui.perfetto.dev.

A rank is a process there, named by its coordinate. Its row shows the step, within it the engine's phases, within these
the ops of the program, and within those the collectives that the rank waited for. Collectives that overlapped other
work are rows below. An arrow leads from each send to the op that reads the message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ....base.records import Records
from ....grid import Grid
from ....pipe.program.chrome_trace import ChromeTrace, write_trace
from ....pipe.program.ops import SENDS, Op
from ..records import Slice, StepRecord, UnderWay
from ..step_record import part_of
from .clock_offsets import Offset, clock_offsets


def trace_step(grid: Grid, record: StepRecord, about: Mapping[str, Any], file: Path) -> None:
    """Write the trace of a step on rank 0. Collective. If the file cannot be written, rank 0 logs a warning.

    Args:
        grid: the ranks whose records are gathered.
        record: the step on this rank.
        about: further entries of ``otherData``, the part of a Chrome trace for the program's own values.
        file: file of the trace.
    """
    offsets = clock_offsets(grid)
    told = grid.world.all_gather_json((record.step, record.slices, record.under_way))
    if grid.rank != 0:
        return
    records = [
        StepRecord(step, tuple(Slice(*entry) for entry in slices), tuple(UnderWay(*entry) for entry in under_way))
        for step, slices, under_way in told
    ]
    names = [grid.describe(rank) for rank in grid.world.ranks]
    places = [grid.topology.coordinate(rank)._asdict() for rank in range(grid.size)]
    with Records().writing(str(file)):
        write_trace(chrome_trace(records, names, places, offsets, about), file)


def chrome_trace(
    records: Sequence[StepRecord],
    names: Sequence[str],
    places: Sequence[Mapping[str, int]],
    offsets: Sequence[Offset],
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a step as a Chrome trace, in microseconds since the first rank began.

    Args:
        records: the step on each rank.
        names: name of each rank, for its row.
        places: coordinate of each rank: axis -> position.
        offsets: offset of each rank's clock from that of rank 0.
        about: further entries of ``otherData``.
    """
    begin = min(r.slices[0].start - o.ahead for r, o in zip(records, offsets, strict=True))
    trace = ChromeTrace()
    for rank, (record, name, offset) in enumerate(zip(records, names, offsets, strict=True)):
        zero = begin + offset.ahead
        trace.name_process(rank, name)
        trace.name_thread(rank, 0, "step")
        for s in record.slices:
            args = {"counts as": " ".join(part_of(s.kind)), **s.args}
            trace.span(rank, 0, s.name, s.kind, s.start - zero, s.end - s.start, args)
        for i, call in enumerate(record.under_way):
            axis, identifier = f"{call.axis} axis", f"{rank}.{i}"
            trace.begin(rank, 0, call.collective, axis, identifier, call.start - zero, {"bytes": call.bytes})
            trace.end(rank, 0, call.collective, axis, identifier, call.end - zero)
    _add_arrows(trace, records, places, offsets, begin)
    error = max(offset.error for offset in offsets)
    clock = f"estimated, to {1e6 * error:.0f} us" if error else "one clock for all ranks"
    other = {"clock": clock, "clock_error_us": 1e6 * error, "ranks": [dict(at) for at in places], **about}
    return trace.to_dict(other)


def _add_arrows(
    trace: ChromeTrace,
    records: Sequence[StepRecord],
    places: Sequence[Mapping[str, int]],
    offsets: Sequence[Offset],
    begin: float,
) -> None:
    """Draw an arrow from each SEND to the op that reads the message, at the same data and tensor position."""
    readers: dict[tuple[int, int, str], tuple[int, float]] = {}
    for rank, (record, coordinates) in enumerate(zip(records, places, strict=True)):
        for s in record.slices:
            if s.kind in ("F", "B", "I"):
                readers[coordinates["data"], coordinates["tensor"], s.name] = rank, s.start - offsets[rank].ahead
    for rank, (record, coordinates) in enumerate(zip(records, places, strict=True)):
        for s in record.slices:
            if s.kind not in SENDS:
                continue
            _, stage, microbatch = Op.parse(s.name)
            to, kinds = (stage + 1, "F") if s.kind == "SEND_F" else (stage - 1, "BI")
            read = [(coordinates["data"], coordinates["tensor"], f"{to}{kind}{microbatch}") for kind in kinds]
            for reader, at in (readers[key] for key in read if key in readers):
                trace.arrow(s.name, "message", (rank, s.start - offsets[rank].ahead - begin), (reader, at - begin))
