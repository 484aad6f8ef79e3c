"""A step of all ranks in one file, as chrome://tracing and ui.perfetto.dev read it.

A rank is a process there, named by its coordinate. Its row has the step, in it what the engine does, in that the ops
of the program, and in those the collectives it waited for; collectives under way meanwhile have rows below. An arrow
leads from each send to the op that reads the message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..grid import Grid
from ..pipe.ops import Op
from .clocks import Offset, clock_offsets
from .slices import StepRecord, part_of


def gather_trace(grid: Grid, record: StepRecord, about: Mapping[str, Any]) -> dict[str, Any] | None:
    """The trace of a step, on rank 0; None elsewhere. Collective.

    Args:
        grid: of the ranks.
        record: this rank's.
        about: what else the file should say.
    """
    offsets = clock_offsets(grid)
    records = grid.world.all_gather_object(record)
    if grid.rank != 0:
        return None
    names = [grid.describe(rank) for rank in grid.world.ranks]
    places = [grid.topology.coordinate(rank)._asdict() for rank in range(grid.size)]
    return chrome_trace(records, names, places, offsets, about)


def chrome_trace(
    records: Sequence[StepRecord],
    names: Sequence[str],
    places: Sequence[Mapping[str, int]],
    offsets: Sequence[Offset],
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """Chrome's trace format, in microseconds since the first rank began.

    Args:
        records: of each rank.
        names: of each rank, for its row.
        places: of each rank on the grid.
        offsets: of each rank's clock.
        about: what else ``otherData`` should say.
    """
    begin = min(r.slices[0].start - o.ahead for r, o in zip(records, offsets, strict=True))
    events: list[dict[str, Any]] = []
    for rank, (record, name, offset) in enumerate(zip(records, names, offsets, strict=True)):
        zero = begin + offset.ahead
        common = {"pid": rank, "tid": 0}
        events.append({"ph": "M", "name": "process_name", "args": {"name": name}, **common})
        events.append({"ph": "M", "name": "process_sort_index", "args": {"sort_index": rank}, **common})
        events.append({"ph": "M", "name": "thread_name", "args": {"name": "step"}, **common})
        for s in record.slices:
            times = {"ts": 1e6 * (s.start - zero), "dur": 1e6 * (s.end - s.start)}
            args = {"counts as": " ".join(part_of(s.kind)), **s.args}
            events.append({"ph": "X", "name": s.name, "cat": s.kind, **times, "args": args, **common})
        for i, flight in enumerate(record.under_way):
            # Those under way at once overlap: pairs of events that share a number, and not slices of one row.
            both = {"name": flight.collective, "cat": f"{flight.axis} axis", "id": f"{rank}.{i}", **common}
            events.append({"ph": "b", "ts": 1e6 * (flight.start - zero), "args": {"bytes": flight.bytes}, **both})
            events.append({"ph": "e", "ts": 1e6 * (flight.end - zero), **both})
    events += _arrows(records, places, offsets, begin)
    error = max(offset.error for offset in offsets)
    clock = f"estimated, to {1e6 * error:.0f} us" if error else "one clock for all ranks"
    other = {"clock": clock, "clock_error_us": 1e6 * error, "ranks": [dict(place) for place in places], **about}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _arrows(
    records: Sequence[StepRecord], places: Sequence[Mapping[str, int]], offsets: Sequence[Offset], begin: float
) -> list[dict[str, Any]]:
    """From each SEND to the op that reads the message, on the rank of the same data and tensor coordinate."""
    readers: dict[tuple[int, int, str], tuple[int, float]] = {}
    for rank, (record, place) in enumerate(zip(records, places, strict=True)):
        for s in record.slices:
            if s.kind in ("F", "B", "I"):
                readers[place["data"], place["tensor"], s.name] = rank, s.start - offsets[rank].ahead
    arrows: list[dict[str, Any]] = []
    for rank, (record, place) in enumerate(zip(records, places, strict=True)):
        for s in record.slices:
            if s.kind not in ("SEND_F", "SEND_B"):
                continue
            _, stage, microbatch = Op.parse(s.name)
            to, kinds = (stage + 1, "F") if s.kind == "SEND_F" else (stage - 1, "BI")
            read = [(place["data"], place["tensor"], f"{to}{kind}{microbatch}") for kind in kinds]
            for reader, at in (readers[key] for key in read if key in readers):
                both = {"name": s.name, "cat": "message", "id": len(arrows), "tid": 0}
                sent = 1e6 * (s.start - offsets[rank].ahead - begin)
                arrows.append({"ph": "s", "ts": sent, "pid": rank, **both})
                arrows.append({"ph": "f", "bp": "e", "ts": 1e6 * (at - begin), "pid": reader, **both})
    return arrows


def write_trace(trace: Mapping[str, Any], file: Path) -> None:
    """Write it, whole or not at all."""
    part = file.with_name(f"{file.name}.part")
    part.write_text(json.dumps(trace))
    part.replace(file)
