"""Membership of a run with ``fault_tolerance``: who was there, time lost by cause, and goodput, from the histories."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ....base.files import parse_json, read_text

# Cause of lost time -> its description, in the order of a table.
CAUSES = {
    "detection": "detection: failed sums, and the meetings that found the lost replica",
    "again": "sum again: connections and sums without the lost replica",
    "joining": "joining: a new replica from its start until it contributes, and the others' sends to it",
    "restart": "restart: a lost replica until it starts again, or until the end",
    "checkpoint": "the whole run, until it starts again from a checkpoint",
}


class _ChangeJson(BaseModel):
    """A line of a history file, as plugins/fault_tolerance/membership.py writes it."""

    step: int
    time: float
    members: list[str] | None = None
    lost: list[str] = []
    left: list[str] = []
    resumed: bool = False
    seconds: float = 0.0
    detection: dict[str, float] = {}
    again: dict[str, float] = {}
    joining: dict[str, float] = {}


@dataclass
class Membership:
    """Members of a run over time.

    Attributes:
        names: the replicas that were ever members.
        changes: the changes, by step: step, seconds since the first one, members from then on, lost and left ones.
        spans: replica -> (from, to) in seconds since the first change in which it was a member.
        seconds: replica-seconds of the run: the time in which a replica was a member or was missed, over all of them.
        lost: cause -> replica-seconds that went into no step that counts.
        length: seconds of the run.
    """

    names: list[str]
    length: float
    changes: list[dict[str, Any]] = field(default_factory=list)
    spans: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    seconds: float = 0.0
    lost: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))

    @property
    def goodput(self) -> float:
        """Share of the replicas' time that went into steps that count, with their evaluations and checkpoints."""
        return 1.0 - sum(self.lost.values()) / self.seconds if self.seconds else 1.0

    def lines(self) -> list[str]:
        """Return the membership as lines of text."""
        total = self.seconds or 1.0
        rows = [f"step {change['step']:>6}  {change['seconds']:>9.1f} s  {change['text']}" for change in self.changes]
        causes = [f"{self.lost[key]:>9.1f} s  {self.lost[key] / total:>6.1%}  {text}" for key, text in CAUSES.items()]
        good = f"{self.seconds - sum(self.lost.values()):>9.1f} s  {self.goodput:>6.1%}  goodput: steps that count"
        return [*rows, f"of {self.seconds:.1f} replica-seconds:", good, *causes]


def read_membership(run: Path, rows: list[dict[str, Any]] | None = None) -> Membership | None:
    """Read the histories in ``history`` of a run's folder; None if there are none.

    Args:
        run: folder of the run.
        rows: its metrics, whose times tell when the run ended.
    """
    by_step: dict[int, _ChangeJson] = {}
    for file in sorted((run / "history").glob("*.jsonl")):
        for line in read_text(file, "replace").splitlines():
            try:
                change = _ChangeJson.model_validate(parse_json(line))
            except (ValueError, ValidationError):
                continue  # the last line of a replica that was killed while it wrote
            by_step[change.step] = _merged(by_step[change.step], change) if change.step in by_step else change
    if not by_step:
        return None
    changes: list[_ChangeJson] = []
    for step in sorted(by_step):  # a clock that was set back, or another host's, takes no time from a run
        earliest = changes[-1].time if changes else -math.inf
        changes.append(by_step[step].model_copy(update={"time": max(by_step[step].time, earliest)}))
    times = sorted((row["time"], row["step"]) for row in rows or [] if row.get("time") is not None)
    begin, end = changes[0].time, max([changes[-1].time, *(time for time, _ in times)])
    names = sorted({name for change in changes for name in change.members or ()})
    made = Membership(names, end - begin, spans={name: [] for name in names})
    members: dict[str, float] = {}  # present ones -> time from which on
    missed: dict[str, float] = {}  # absent replicas that the run waits for -> time of the loss

    def leave(name: str, at: float) -> None:
        made.spans[name].append((members.pop(name) - begin, at - begin))

    for number, change in enumerate(changes):
        now, before = change.time, {*members}
        if change.resumed:
            last = max((time for time, step in times if step <= change.step and time < now), default=now)
            last = max(last, changes[number - 1].time if number else begin)
            for name in [*members]:
                leave(name, last)
            for name in change.members or ():
                made.lost["checkpoint"] += now - max(last, missed.pop(name, last))
                members[name], made.seconds = now, made.seconds + now - last
            before = {*members}
        joined = [name for name in change.members or () if name not in before]
        for name in joined:
            since = missed.pop(name, None)
            own = change.joining.get(name, 0.0) if number else 0.0
            gap = own if since is None else now - since
            made.lost["joining"] += min(own, gap)
            made.lost["restart"] += max(0.0, gap - own)
            made.seconds += gap
            members[name] = now
        for name in before - {*(change.members if change.members is not None else before)}:
            leave(name, now - change.seconds)
            if name not in change.left:
                missed[name] = now - change.seconds
        for name in set(change.lost) & members.keys():
            leave(name, now - change.seconds)
            missed[name] = now - change.seconds
        for cause in ("detection", "again", "joining"):
            told = getattr(change, cause)
            made.lost[cause] += sum(value for name, value in told.items() if name in before) if number else 0.0
        made.changes.append(_row(change, begin, joined if number else [], sorted(members)))
    for name in [*members]:
        leave(name, end)
    for since in missed.values():
        made.lost["restart"] += end - since
        made.seconds += end - since
    made.seconds += sum(to - since for spans in made.spans.values() for since, to in spans)
    return made


def _merged(one: _ChangeJson, other: _ChangeJson) -> _ChangeJson:
    """Return the facts of one step that two lines have, of two replicas or of one."""
    return _ChangeJson(
        step=one.step,
        time=min(one.time, other.time),
        members=one.members if other.members is None else other.members,
        lost=sorted({*one.lost, *other.lost}),
        left=sorted({*one.left, *other.left}),
        resumed=one.resumed or other.resumed,
        seconds=max(one.seconds, other.seconds),
        detection=one.detection | other.detection,
        again=one.again | other.again,
        joining=one.joining | other.joining,
    )


def _row(change: _ChangeJson, begin: float, joined: list[str], members: list[str]) -> dict[str, Any]:
    """Return a change for a table: ``members`` are there after it."""
    said = [f"{', '.join(names)} {what}" for names, what in ((change.left, "left"), (joined, "joined")) if names]
    said += [f"{', '.join(change.lost)} lost in this step"] if change.lost else []
    said += ["started again from a checkpoint"] if change.resumed else []
    text = f"replicas {', '.join(members)}" + (f": {'; '.join(said)}" if said else "")
    return {"step": change.step, "seconds": change.time - begin, "members": members, "text": text}
