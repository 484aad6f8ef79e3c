"""What a run left in its folder, as far as it can be read: a run that died half way has left something too."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..pipe.ops import COMPUTE, Op
from ..pipe.schedule import Schedule
from ..pipe.simulate import Span, Timeline
from .slices import Slice, own_times

METRICS, RUN, TIMELINE = "metrics.jsonl", "run.json", "timeline.json"
_TAIL = 12  # lines of a rank's log


@dataclass
class Run:
    """A run's folder.

    Attributes:
        name: the folder's.
        rows: of metrics.jsonl, in the order they were written.
        record: run.json; {} without one.
        trace: timeline.json; None without one.
        logs: rank's log -> its last lines, where there are any.
        notes: what was missing or could not be read.
    """

    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)
    trace: dict[str, Any] | None = None
    logs: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, number) of one name, by step; where a step was taken again, after a restart, its last number."""
        found: dict[int, float] = {}
        for row in self.rows:
            if name in row:
                found[int(row["step"])] = math.nan if row[name] is None else float(row[name])
        return sorted(found.items())

    @property
    def last_step(self) -> int:
        """The last one that was written; 0 without any."""
        return max((int(row["step"]) for row in self.rows), default=0)


def read_run(folder: Path) -> Run:
    """Read what is there."""
    run = Run(folder.resolve().name)
    metrics = folder / METRICS
    if metrics.is_file():
        broken = 0
        for line in metrics.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
                int(row["step"])
                run.rows.append(row)
            except (ValueError, KeyError, TypeError):
                broken += 1
        if broken:
            run.notes.append(f"{broken} line{'s' * (broken > 1)} of {METRICS} could not be read and are left out")
    else:
        run.notes.append(f"there is no {METRICS}: no step was written")
    run.record = _json(folder / RUN, run.notes) or {}
    run.trace = _json(folder / TIMELINE, run.notes)
    for log in sorted(folder.glob("*.log")):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        if lines:
            run.logs[log.name] = "\n".join(lines[-_TAIL:])
    return run


def _json(file: Path, notes: list[str]) -> dict[str, Any] | None:
    if not file.is_file():
        notes.append(f"there is no {file.name}")
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        notes.append(f"{file.name} could not be read: {error}")
        return None
    if not isinstance(found, dict):
        notes.append(f"{file.name} could not be read: it is no JSON object")
        return None
    return found


@dataclass(frozen=True)
class Traced:
    """A trace, read back.

    Attributes:
        step: which was traced.
        names: of the ranks.
        places: of the ranks: axis -> position.
        slices: of each rank, in seconds since the first one began.
        schedule: what the pipe ranks ran; None for a plain module.
        clock: what is said of the ranks' clocks.
    """

    step: int
    names: list[str]
    places: list[dict[str, int]]
    slices: list[list[Slice]]
    schedule: Schedule | None
    clock: str

    def timeline(self, data: int = 0, tensor: int = 0) -> Timeline:
        """The compute ops of one replica's pipe ranks, at one position on the tensor axis."""
        here = [r for r, p in enumerate(self.places) if p["data"] == data and p["tensor"] == tensor]
        ranks = sorted(here, key=lambda r: self.places[r]["pipe"])
        rows = ([Span(Op.parse(s.name), s.start, s.end) for s in self.slices[r] if s.kind in COMPUTE] for r in ranks)
        return Timeline(tuple(map(tuple, rows)))

    def parts(self, rank: int) -> dict[tuple[str, str], float]:
        """Where a rank's time went: (axis, part) -> seconds."""
        found: dict[tuple[str, str], float] = {}
        for entry, own in zip(self.slices[rank], own_times(self.slices[rank]), strict=True):
            axis, _, part = str(entry.args.get("counts as", "host other")).partition(" ")
            found[axis, part] = found.get((axis, part), 0.0) + own
        return found


def read_trace(trace: dict[str, Any]) -> Traced | None:
    """A trace that ``trace.py`` wrote; None where it is another's."""
    other = trace.get("otherData") or {}
    places = other.get("ranks")
    if not places:
        return None
    slices: list[list[Slice]] = [[] for _ in places]
    names = [f"rank {rank}" for rank in range(len(places))]
    for event in trace.get("traceEvents", []):
        if event.get("ph") == "M" and event["name"] == "process_name":
            names[event["pid"]] = event["args"]["name"]
        if event.get("ph") == "X":
            start, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
            slices[event["pid"]].append(Slice(event["name"], event["cat"], start, end, event.get("args", {})))
    if not all(slices):
        return None
    schedule = Schedule.from_json(other["schedule"]) if other.get("schedule") else None
    return Traced(int(other.get("step", 0)), names, places, slices, schedule, str(other.get("clock", "")))
