"""Timeline of a job (``triax run --timeline``), merged from the files of its ranks, as a Chrome trace. No torch.

The ranks write their files by ``grid/comm/timeline_recorder.py``. A rank is a process of the trace, with a row for each
of its threads: passes of the engine, optimizer steps, and within them the time waited for other ranks. Below are the
collectives as in Horovod's timeline, each under its tensor's name: ``NEGOTIATE_ALLREDUCE`` until the last rank has
called it, then ``ALLREDUCE``. The k-th collective of a group is the k-th on each of its ranks, so the files show when
the last rank called it, and no message is needed.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....base.errors import ConfigError
from ....base.files import parse_json
from ....grid.environment import TIMELINE
from ....pipe.program.chrome_trace import ChromeTrace, write_trace

_MESSAGES = ("send", "receive")


@dataclass
class TimelineCall:
    """A collective or message of one rank. Times are in seconds.

    Attributes:
        axis: number of its axis in the rank's file.
        op: method of ``Axis``.
        bytes: size of its tensor.
        label, phase: name of its tensor and of the bar; empty: the names follow from axis and op.
        start: time of the call.
        waited: time from which the rank waited for it.
        end: end of the wait; None: the rank ended before, or did not wait for it.
        thread: the thread that waited.
        arrived: rank -> the time of its call.
    """

    axis: int
    op: str
    bytes: int
    label: str
    phase: str
    start: float
    waited: float | None = None
    end: float | None = None
    thread: int = 0
    arrived: dict[int, float] = field(default_factory=dict)


@dataclass
class RankTimeline:
    """Contents of one rank's file.

    Attributes:
        rank, name: number and name of the rank.
        attempt, grid: number of the restart, and of the grid in its process.
        axes: number of an axis -> what identifies it on all its ranks.
        calls: number of a call -> the call.
        spans: name, kind, begin, end and thread of each span.
        last: time of the last entry.
    """

    rank: int
    name: str
    attempt: int
    grid: int
    axes: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    calls: dict[int, TimelineCall] = field(default_factory=dict)
    spans: list[tuple[str, str, float, float, int]] = field(default_factory=list)
    last: float = 0.0


@contextlib.contextmanager
def recorded(file: Path | None, node: int) -> Iterator[dict[str, str]]:
    """Record the ranks that are started in this context. At its end their files are merged, even if ranks failed.

    Args:
        file: the timeline. Clocks of hosts differ, so each further host has a file of its own,
            ``timeline.host-1.json`` and so on. None: nothing is recorded.
        node: number of this host.

    Yields:
        The environment variables to give to the ranks.

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
        folder = tempfile.mkdtemp(prefix=f"{file.name}.parts-", dir=file.parent)
    except OSError as error:
        raise ConfigError(f"--timeline {file} cannot be written: {error}") from error
    try:
        yield {TIMELINE: folder}
    finally:
        try:
            if not merge(Path(folder), file):
                reason = "It records the communication of grids, but no rank made a triax.Grid (initialize makes one)."
                print(f"triax run: --timeline {file} is empty. {reason}", file=sys.stderr)
        except OSError as error:  # the ranks have ended, and how they ended matters more
            print(f"triax run: --timeline {file} was not written: {error}", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)


def merge(folder: Path, file: Path) -> int:
    """Write the timeline of the ranks' files in a folder. Return the number of ranks that wrote one."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("rank-*.jsonl"))]
    trace = merged(texts)
    write_trace(trace, file)
    return len(trace["otherData"]["ranks"])


def merged(texts: Iterable[str]) -> dict[str, Any]:
    """Return the Chrome trace of the texts of the ranks' files, in microseconds since the first entry.

    ``otherData`` has ``ranks``, their names, and ``unfinished``, the calls that had not ended when their rank ended.
    """
    parts = [timeline for timeline in map(_read, texts) if timeline is not None]
    for group in _collectives(parts):
        arrived = {rank: call.start for rank, call in group.items()}
        for call in group.values():
            call.arrived = arrived
    starts = [start for timeline in parts for _, _, start, _, _ in timeline.spans]
    starts += [call.start for timeline in parts for call in timeline.calls.values()]
    begin = min(starts, default=0.0)
    trace = ChromeTrace()
    unfinished: list[dict[str, Any]] = []
    names: dict[int, str] = {}
    rows: dict[tuple[int, int], int] = {}  # rank and thread -> row
    for number, timeline in enumerate(parts):
        names[timeline.rank] = timeline.name
        for name, kind, start, end, thread in timeline.spans:
            row = rows.setdefault((timeline.rank, thread), len([r for r, _ in rows if r == timeline.rank]))
            trace.span(timeline.rank, row, name, kind, start - begin, end - start)
        for at, call in timeline.calls.items():
            axis = timeline.axes[call.axis]
            name = call.label or f"{axis[1]} axis"
            args = {"bytes": call.bytes, "axis": axis[1], "ranks": list(axis[2])}
            if call.end is None or call.waited is None:
                unfinished.append({"rank": timeline.rank, "name": name, "op": _operation_name(call), **args})
            else:
                row = rows.setdefault((timeline.rank, call.thread), len([r for r, _ in rows if r == timeline.rank]))
                waiting = f"{call.phase or _operation_name(call)} {name}"
                trace.span(timeline.rank, row, waiting, "wait", call.waited - begin, call.end - call.waited, args)
            _add_phases(trace, call, timeline, f"{number}.{at}", name, args, begin)
    for rank, name in sorted(names.items()):
        trace.name_process(rank, name)
    other = {"ranks": [names[rank] for rank in sorted(names)], "unfinished": unfinished}
    return trace.to_dict(other)


def _read(text: str) -> RankTimeline | None:
    """Read a rank's file without a last line that is incomplete. None: it does not even have the rank's name."""
    timeline: RankTimeline | None = None
    for line in text.splitlines():
        try:
            kind, *entry = parse_json(line)
        except ValueError:
            continue
        if kind == "rank":
            rank, name, attempt, grid, _ = entry
            timeline = RankTimeline(rank, name, attempt, grid)
        elif timeline is None:
            continue
        elif kind == "axis":
            number, name, ranks, purpose = entry
            timeline.axes[number] = ((timeline.attempt, timeline.grid), name, tuple(ranks), purpose)
        elif kind == "begin":
            number, axis, op, size, label, phase, start = entry
            timeline.calls[number] = TimelineCall(axis, op, size, label, phase, start)
            timeline.last = max(timeline.last, start)
        elif kind == "end":
            number, waited, end, thread = entry
            call = timeline.calls[number]
            call.waited, call.end, call.thread = waited, end, thread
            timeline.last = max(timeline.last, end)
        elif kind == "span":
            timeline.spans.append(tuple(entry))
            timeline.last = max(timeline.last, entry[3])
    return timeline


def _collectives(parts: Iterable[RankTimeline]) -> Iterable[dict[int, TimelineCall]]:
    """Return each collective as rank -> its call."""
    calls_of: dict[Any, dict[int, TimelineCall]] = {}
    for timeline in parts:
        counts: dict[int, int] = {}
        for call in timeline.calls.values():
            if call.op not in _MESSAGES:
                counts[call.axis] = counts.get(call.axis, -1) + 1
                calls_of.setdefault((timeline.axes[call.axis], counts[call.axis]), {})[timeline.rank] = call
    return calls_of.values()


def _add_phases(
    trace: ChromeTrace,
    call: TimelineCall,
    part: RankTimeline,
    identifier: str,
    name: str,
    args: dict[str, Any],
    begin: float,
) -> None:
    """Add the bars of a collective, nested. Bars of other collectives may overlap them."""
    end = call.end if call.end is not None else max(part.last, call.start)
    phases = [(call.phase or _operation_name(call), call.start, end, args)]
    if not call.phase and call.op not in _MESSAGES and len(call.arrived) > 1:
        complete = min(max(call.start, *call.arrived.values()), end)
        last = max(call.arrived, key=lambda rank: call.arrived[rank])
        ticks = {f"rank {rank}": 1e6 * (at - begin) for rank, at in sorted(call.arrived.items())}
        negotiated = {"arrived_us": ticks, "last": f"rank {last}"}
        phases = [
            (f"NEGOTIATE_{_operation_name(call)}", call.start, complete, negotiated),
            (_operation_name(call), complete, end, args),
        ]
    if call.end is None:
        phases = [(kind, start, stop, {**said, "unfinished": True}) for kind, start, stop, said in phases]
    axis = f"{part.axes[call.axis][1]} axis"
    trace.begin(part.rank, 0, name, axis, identifier, call.start - begin)
    for kind, start, stop, said in phases:
        trace.begin(part.rank, 0, kind, axis, identifier, start - begin, said)
        trace.end(part.rank, 0, kind, axis, identifier, stop - begin)
    trace.end(part.rank, 0, name, axis, identifier, end - begin)


def _operation_name(call: TimelineCall) -> str:
    """Return an operation's name in the timeline: ``ALLREDUCE`` for ``all_reduce``."""
    return call.op.replace("all_", "all").replace("to_all", "toall").replace("reduce_scatter", "reducescatter").upper()
