"""Reader of a run's folder and of its trace. Files that are missing or incomplete become notes, not errors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from ....base.files import parse_json, read_text
from ....pipe.program.ops import COMPUTE, Op
from ....pipe.program.schedule import Schedule
from ....pipe.program.timeline import Span, Timeline
from ..files import HISTOGRAMS, METRICS, RUN, TIMELINE
from ..records import Slice
from ..step_record import self_times
from .membership import Membership, read_membership

_TAIL = 12  # lines of a rank's log
_LARGEST, _MOST = 1e100, 2**53  # number in a chart; count


class _MemoryJson(BaseModel):
    held: dict[str, Any]
    formula: dict[str, Any]


class _TrafficJson(BaseModel):
    sent: dict[str, dict[str, dict[str, Any]]]
    formula: dict[str, Any]


class _RankJson(BaseModel):
    memory: _MemoryJson | None = None
    traffic: _TrafficJson | None = None


class _EarlierJson(BaseModel):
    since_step: int
    grid: dict[str, int]
    batch: dict[str, int]
    ranks: int


class _RunJson(BaseModel):
    """Parts of run.json whose types the page relies on. Single numbers are not checked and are shown as they are."""

    grid: dict[str, Any] = {}
    batch: dict[str, Any] | None = None
    schedule: dict[str, Any] | None = None
    since_step: int = 1
    earlier: list[_EarlierJson] = []
    ranks: list[_RankJson] = []


class _HistogramJson(BaseModel):
    low: float
    high: float
    counts: list[int]
    not_finite: int = 0


class _HistogramsJson(BaseModel):
    step: int
    histograms: dict[str, _HistogramJson]


_ROW, _RECORD, _TRACE = (
    TypeAdapter(dict[str, float | list[int] | None]),
    TypeAdapter(_RunJson),
    TypeAdapter(dict[str, Any]),
)


@dataclass
class Run:
    """Contents of a run's folder.

    Attributes:
        name: name of the folder.
        rows: lines of metrics.jsonl, in the order in which they were written: name -> number, None if not finite. The
            loads of a layer's experts are a list.
        record: run.json; {} if there is none.
        trace: timeline.json; None if there is none.
        histograms: last line of histograms.jsonl that can be read: step, and name -> histogram; None if there is none.
        logs: name of a log file -> its last lines.
        notes: files that are missing or could not be read.
        membership: the replicas of a run with ``fault_tolerance``; None of other runs.
    """

    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)
    trace: dict[str, Any] | None = None
    histograms: dict[str, Any] | None = None
    logs: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    membership: Membership | None = None

    def series(self, name: str) -> list[tuple[int, float]]:
        """Return (step, number) of one name, by step. Of a step repeated after a restart, the last number counts."""
        points: dict[int, float] = {}
        for row in self.rows:
            if name in row and not isinstance(row[name], list):
                points[row["step"]] = math.nan if row[name] is None else row[name]
        return sorted(points.items())

    @property
    def seconds(self) -> float:
        """Seconds from the first number to the last; the time between the end of a run and its resumption is left out.

        A resumed run begins with the time of its first step, where that is known.
        """
        begins = {row.get("since_step") for row in (*self.record.get("earlier", ()), self.record)}
        total = 0.0
        before: dict[str, Any] | None = None
        for row in self.rows:
            if not isinstance(row.get("time"), (int, float)):
                continue
            if before is not None and (
                row["step"] == before["step"] or (row["step"] > before["step"] and row["step"] not in begins)
            ):
                total += max(0.0, row["time"] - before["time"])
            else:  # the first of a run, or of its resumption
                took = row.get("Train/Samples/step_time_ms")
                total += took / 1e3 if isinstance(took, (int, float)) else 0.0
            before = row
        return total

    @property
    def tokens(self) -> float:
        """Tokens of all steps; 0 where they were not counted."""
        speeds, times = (dict(self.series(f"Train/Samples/{name}")) for name in ("tokens_per_second", "step_time_ms"))
        counts = [speed * times[step] / 1e3 for step, speed in speeds.items() if step in times]
        return sum(round(count) for count in counts if math.isfinite(count))

    @property
    def last_step(self) -> int:
        """Number of the last step that was written; 0 if there is none."""
        return max((row["step"] for row in self.rows), default=0)


def read_run(folder: Path) -> Run:
    """Read a run's folder. With ``fault_tolerance`` it has a folder of each replica, ``replica-NAME``.

    Then each step comes from the first replica that has written it, and everything else from a replica that has the
    last step.
    """
    replicas = [read_run(file.parent) for file in sorted(folder.glob(f"replica-*/{METRICS}"))]
    if replicas and not (folder / METRICS).is_file():
        run = max(replicas, key=lambda replica: replica.last_step)
        run.name, rows = folder.resolve().name, dict[int, list[dict[str, Any]]]()
        for replica in replicas:
            steps = {row["step"] for row in replica.rows}
            for step in steps - rows.keys():
                rows[step] = [row for row in replica.rows if row["step"] == step]
        run.rows = [row for step in sorted(rows) for row in rows[step]]
        run.membership = read_membership(folder, [row for replica in replicas for row in replica.rows])
        return run
    run = Run(folder.resolve().name)
    metrics = folder / METRICS
    if metrics.is_file():
        broken = 0
        for line in read_text(metrics, "replace").splitlines():
            try:
                run.rows.append(_row(_ROW.validate_json(line)))
            except (ValueError, KeyError, TypeError):
                broken += 1
        if broken:
            run.notes.append(f"{broken} line{'s' * (broken > 1)} of {METRICS} could not be read and are left out")
    else:
        run.notes.append(f"there is no {METRICS}: no step was written")
    run.record = _json(folder / RUN, _RECORD, run.notes) or {}
    run.trace = _json(folder / TIMELINE, _TRACE, run.notes)
    run.histograms = _last_histograms(folder / HISTOGRAMS)
    for log in sorted(path for path in folder.glob("*.log") if path.is_file()):
        lines = read_text(log, "replace").splitlines()
        if lines:
            run.logs[log.name] = "\n".join(lines[-_TAIL:])
    return run


def _row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a line of metrics. A number that is too large to be drawn counts as not finite.

    Raises:
        ValueError: a step or a load that no run has.
    """
    counts = [row["step"], *(load for value in row.values() if isinstance(value, list) for load in value)]
    if not all(0 <= count <= _MOST for count in counts):
        raise ValueError("there is no such count")
    drawn = {
        name: None if isinstance(value, float) and not abs(value) <= _LARGEST else value for name, value in row.items()
    }
    return drawn | {"step": int(row["step"])}


def _last_histograms(file: Path) -> dict[str, Any] | None:
    """Return the last line of a file of histograms that can be read; None if there is none."""
    lines = read_text(file, "replace").splitlines() if file.is_file() else []
    for line in reversed(lines):
        try:
            return _HistogramsJson.model_validate_json(line).model_dump()
        except ValidationError:
            continue
    return None


def _json(file: Path, form: TypeAdapter[Any], notes: list[str]) -> dict[str, Any] | None:
    """Return the object of a file; None, and a note, if there is none of this form."""
    if not file.is_file():
        notes.append(f"there is no {file.name}")
        return None
    try:
        content: dict[str, Any] = parse_json(read_text(file))
        form.validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        notes.append(f"{file.name} could not be read because {where} has another form: {first['msg']}")
    except ValueError as error:
        notes.append(f"{file.name} could not be read: {error}")
    else:
        return content
    return None


@dataclass(frozen=True)
class Traced:
    """A trace that was read.

    Attributes:
        step: number of the traced step.
        names: names of the ranks.
        places: coordinates of the ranks: axis -> position.
        slices: slices of each rank, in seconds since the first one began.
        schedule: schedule of the pipe ranks; None for a plain module.
        clock: text about the error of the ranks' clocks.
    """

    step: int
    names: list[str]
    places: list[dict[str, int]]
    slices: list[list[Slice]]
    schedule: Schedule | None
    clock: str

    @property
    def grid(self) -> dict[str, int]:
        """Axis -> number of ranks along it."""
        return {axis: 1 + max(place[axis] for place in self.places) for axis in self.places[0]}

    def replica(self, data: int = 0, tensor: int = 0) -> list[int]:
        """Return the pipe ranks of one replica at one position on the tensor axis, in order."""
        coordinates = {"data": data, "tensor": tensor, "context": 0}
        here = [r for r, p in enumerate(self.places) if all(p.get(axis, 0) == at for axis, at in coordinates.items())]
        return sorted(here, key=lambda r: self.places[r]["pipe"])

    def timeline(self, data: int = 0, tensor: int = 0) -> Timeline:
        """Return the compute ops of the ranks of ``replica``."""
        ranks = self.replica(data, tensor)
        rows = ([Span(Op.parse(s.name), s.start, s.end) for s in self.slices[r] if s.kind in COMPUTE] for r in ranks)
        return Timeline(tuple(map(tuple, rows)))

    def parts(self, rank: int) -> dict[tuple[str, str], float]:
        """Return the time of each part of a rank's step: (axis, part) -> seconds."""
        seconds_of: dict[tuple[str, str], float] = {}
        for entry, own in zip(self.slices[rank], self_times(self.slices[rank]), strict=True):
            axis, _, part = str(entry.args.get("counts as", "host other")).partition(" ")
            seconds_of[axis, part] = seconds_of.get((axis, part), 0.0) + own
        return seconds_of

    def imbalance(self) -> float:
        """Return the time that the busiest rank computes over the mean of all ranks; 1 if no rank computes."""
        ranks = [self.parts(rank) for rank in range(len(self.slices))]
        computing = [sum(time for (axis, _), time in parts.items() if axis == "compute") for parts in ranks]
        return max(computing) * len(computing) / sum(computing) if any(computing) else 1.0


def read_trace(trace: dict[str, Any]) -> Traced | None:
    """Read a trace that ``engine/monitor/trace/trace.py`` wrote; None if another program wrote it."""
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
