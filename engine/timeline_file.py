"""One timeline of the parts that ranks wrote (``grid/timeline.py``), in Chrome's trace format. No torch.

A rank is a process there, with a row for each of its threads: what an engine or an optimizer does, and in that where it
waited for others. Below are the collectives as Horovod's timeline has them, each under its tensor's name:
``NEGOTIATE_ALLREDUCE`` until the last rank is there, then ``ALLREDUCE``. The k-th collective on a group is the k-th on
every rank of it, so when the last rank came is known from the parts; nothing is sent for it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..grid.environment import TIMELINE
from .config_base import ConfigError

_MESSAGES = ("send", "receive")  # of two ranks, each on its own


@dataclass
class Call:
    """A collective or message of one rank, in seconds."""

    axis: int
    op: str
    bytes: int
    label: str
    phase: str
    start: float
    waited: float | None = None
    end: float | None = None  # None: the rank ended before it did, or nobody waited for it
    thread: int = 0
    arrived: dict[int, float] = field(default_factory=dict)  # rank -> when it was there


@dataclass
class Part:
    """What one rank wrote."""

    rank: int
    name: str
    attempt: int
    grid: int
    axes: dict[int, tuple[Any, ...]] = field(default_factory=dict)  # number -> what names it on all its ranks
    calls: dict[int, Call] = field(default_factory=dict)
    spans: list[tuple[str, str, float, float, int]] = field(default_factory=list)
    last: float = 0.0


@contextlib.contextmanager
def recorded(file: Path | None, node: int) -> Iterator[dict[str, str]]:
    """Ranks that are started within are recorded; what they left is one file at the end, whatever became of them.

    Args:
        file: the timeline; of a host other than the first, ``timeline.host-1.json`` and so on: clocks of hosts differ.
            None: nothing is recorded.
        node: this host's number.

    Yields:
        The variables that ranks need.

    Raises:
        ConfigError: the file cannot be written.
    """
    if file is None:
        yield {}
        return
    if node:
        file = file.with_name(f"{file.stem}.host-{node}{file.suffix}")
    file = file.absolute()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix=f"{file.name}.parts-", dir=file.parent)
    except OSError as error:
        raise ConfigError(f"--timeline {file} cannot be written: {error}") from error
    try:
        yield {TIMELINE: folder}
    finally:
        if not merge(Path(folder), file):
            said = (
                "no rank made a triax.Grid, so it is empty: it shows what goes through grids (triax.init() makes one)"
            )
            print(f"triax run: --timeline {file}: {said}", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)


def merge(folder: Path, file: Path) -> int:
    """Write the timeline of the parts in a folder; returns how many ranks wrote one."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("rank-*.jsonl"))]
    trace = merged(texts)
    part = file.with_name(f"{file.name}.part")
    part.write_text(json.dumps(trace))
    part.replace(file)
    return len(trace["otherData"]["ranks"])


def merged(texts: Iterable[str]) -> dict[str, Any]:
    """Chrome's trace, of the text of each part; times in microseconds since the first entry.

    ``otherData`` has ``ranks`` (their names) and ``unfinished``: what ranks were in when they ended.
    """
    parts = [part for part in map(_read, texts) if part is not None]
    for group in _together(parts):
        arrived = {rank: call.start for rank, call in group.items()}
        for call in group.values():
            call.arrived = arrived
    begin = min((entry for part in parts for entry in _starts(part)), default=0.0)
    events: list[dict[str, Any]] = []
    unfinished: list[dict[str, Any]] = []
    names: dict[int, str] = {}
    rows: dict[tuple[int, int], int] = {}  # rank and thread -> row
    for number, part in enumerate(parts):
        names[part.rank] = part.name
        for name, kind, start, end, thread in part.spans:
            times = {"ts": 1e6 * (start - begin), "dur": 1e6 * (end - start)}
            row = rows.setdefault((part.rank, thread), len([r for r, _ in rows if r == part.rank]))
            events.append({"ph": "X", "name": name, "cat": kind, "pid": part.rank, "tid": row, **times})
        for at, call in part.calls.items():
            axis = part.axes[call.axis]
            name = call.label or f"{axis[1]} axis"
            args = {"bytes": call.bytes, "axis": axis[1], "ranks": list(axis[2])}
            if call.end is None or call.waited is None:
                unfinished.append({"rank": part.rank, "name": name, "op": _shown(call), **args})
            else:
                row = rows.setdefault((part.rank, call.thread), len([r for r, _ in rows if r == part.rank]))
                times = {"ts": 1e6 * (call.waited - begin), "dur": 1e6 * (call.end - call.waited)}
                slice_ = {
                    "ph": "X",
                    "name": f"{call.phase or _shown(call)} {name}",
                    "cat": "wait",
                    "pid": part.rank,
                    "tid": row,
                }
                events.append({**slice_, **times, "args": args})
            both = {"cat": f"{axis[1]} axis", "id": f"{number}.{at}", "pid": part.rank, "tid": 0}
            events += _phases(call, part.last, name, args, begin, both)
    for rank, name in sorted(names.items()):
        common = {"ph": "M", "pid": rank, "tid": 0}
        events.append({"name": "process_name", "args": {"name": name}, **common})
        events.append({"name": "process_sort_index", "args": {"sort_index": rank}, **common})
    other = {"ranks": [names[rank] for rank in sorted(names)], "unfinished": unfinished}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _read(text: str) -> Part | None:
    """A part; what a rank was writing when it was killed is left out. None: not even who it is."""
    part: Part | None = None
    for line in text.splitlines():
        try:
            kind, *entry = json.loads(line)
        except ValueError:
            continue
        if kind == "rank":
            rank, name, attempt, grid, _ = entry
            part = Part(rank, name, attempt, grid)
        elif part is None:
            continue
        elif kind == "axis":
            number, name, ranks, like = entry
            part.axes[number] = ((part.attempt, part.grid), name, tuple(ranks), like)
        elif kind == "begin":
            number, axis, op, size, label, phase, start = entry
            part.calls[number] = Call(axis, op, size, label, phase, start)
            part.last = max(part.last, start)
        elif kind == "end":
            number, waited, end, thread = entry
            call = part.calls[number]
            call.waited, call.end, call.thread = waited, end, thread
            part.last = max(part.last, end)
        elif kind == "span":
            part.spans.append(tuple(entry))
            part.last = max(part.last, entry[3])
    return part


def _together(parts: Iterable[Part]) -> Iterator[dict[int, Call]]:
    """Rank -> its call, of each collective."""
    found: dict[Any, dict[int, Call]] = {}
    for part in parts:
        counts: dict[int, int] = {}
        for call in part.calls.values():
            if call.op not in _MESSAGES:
                counts[call.axis] = counts.get(call.axis, -1) + 1
                found.setdefault((part.axes[call.axis], counts[call.axis]), {})[part.rank] = call
    yield from found.values()


def _phases(
    call: Call, last: float, name: str, args: dict[str, Any], begin: float, both: dict[str, Any]
) -> list[dict[str, Any]]:
    """A collective's bars, one within the other: those of other collectives may overlap them."""
    end = call.end if call.end is not None else max(last, call.start)
    phases = [(call.phase or _shown(call), call.start, end, args)]
    if not call.phase and call.op not in _MESSAGES and len(call.arrived) > 1:
        there = min(max(call.start, *call.arrived.values()), end)
        who = max(call.arrived, key=lambda rank: call.arrived[rank])
        ticks = {f"rank {rank}": 1e6 * (at - begin) for rank, at in sorted(call.arrived.items())}
        negotiated = {"arrived_us": ticks, "last": f"rank {who}"}
        phases = [
            (f"NEGOTIATE_{_shown(call)}", call.start, there, negotiated),
            (_shown(call), there, end, args),
        ]
    if call.end is None:
        phases = [(kind, start, stop, {**said, "unfinished": True}) for kind, start, stop, said in phases]
    events: list[dict[str, Any]] = [{"ph": "b", "name": name, "ts": 1e6 * (call.start - begin), **both}]
    for kind, start, stop, said in phases:
        events.append({"ph": "b", "name": kind, "ts": 1e6 * (start - begin), "args": said, **both})
        events.append({"ph": "e", "name": kind, "ts": 1e6 * (stop - begin), **both})
    events.append({"ph": "e", "name": name, "ts": 1e6 * (end - begin), **both})
    return events


def _shown(call: Call) -> str:
    """``all_reduce`` as Horovod has it: ``ALLREDUCE``."""
    return call.op.replace("all_", "all").replace("reduce_scatter", "reducescatter").upper()


def _starts(part: Part) -> Iterator[float]:
    yield from (span[2] for span in part.spans)
    yield from (call.start for call in part.calls.values())
