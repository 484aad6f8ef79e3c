"""Chrome's trace format, which chrome://tracing and ui.perfetto.dev open: the one writer of it in the library.

A process (`pid`) has threads (`tid`), which are rows. Spans of one row must nest. What overlaps (collectives under
way) is a pair of events, `begin` and `end`, that share an `id`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Args = Mapping[str, Any]


class ChromeTrace:
    """Writer that collects the events of one trace in Chrome's format.

    Args:
        scale: microseconds per unit of the given times, for example 1e6 if the times are in seconds.
    """

    def __init__(self, scale: float = 1e6) -> None:
        self._scale = scale
        self.events: list[dict[str, Any]] = []

    def name_process(self, pid: int, name: str) -> None:
        """Name a process, and sort processes by their number."""
        self._add("M", pid, 0, "process_name", args={"name": name})
        self._add("M", pid, 0, "process_sort_index", args={"sort_index": pid})

    def name_thread(self, pid: int, tid: int, name: str) -> None:
        """Set the name of a thread, which the viewer shows as a row."""
        self._add("M", pid, tid, "thread_name", args={"name": name})

    def span(
        self, pid: int, tid: int, name: str, category: str, start: float, length: float, args: Args | None = None
    ) -> None:
        """Add a bar of a row, from ``start`` on for ``length``; the viewer shows ``args`` beside it."""
        times = {"ts": start * self._scale, "dur": length * self._scale}
        self._add("X", pid, tid, name, cat=category, **times, args=args or {})

    def begin(
        self, pid: int, tid: int, name: str, category: str, id: int | str, at: float, args: Args | None = None
    ) -> None:
        """Begin a bar that may overlap others; ``end`` with the same names and ``id`` ends it."""
        self._add("b", pid, tid, name, cat=category, id=id, ts=at * self._scale, args=args or {})

    def end(self, pid: int, tid: int, name: str, category: str, id: int | str, at: float) -> None:
        """End the bar that ``begin`` began with the same names and ``id``."""
        self._add("e", pid, tid, name, cat=category, id=id, ts=at * self._scale)

    def arrow(self, name: str, category: str, source: tuple[int, float], target: tuple[int, float]) -> None:
        """Draw an arrow from the source's (pid, time) to the span that begins at the target's."""
        number = len(self.events)
        self._add("s", source[0], 0, name, cat=category, id=number, ts=source[1] * self._scale)
        self._add("f", target[0], 0, name, cat=category, id=number, ts=target[1] * self._scale, bp="e")

    def to_dict(self, other: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the trace, ready for JSON; ``other`` is its ``otherData``."""
        trace: dict[str, Any] = {"traceEvents": self.events, "displayTimeUnit": "ms"}
        return trace if other is None else {**trace, "otherData": dict(other)}

    def _add(self, phase: str, pid: int, tid: int, name: str, **fields: Any) -> None:
        self.events.append({"ph": phase, "pid": pid, "tid": tid, "name": name, **fields})


def write_trace(trace: Mapping[str, Any], file: Path) -> None:
    """Write a trace as JSON to a temporary file and rename that to ``file``, so that ``file`` is never incomplete."""
    partial = file.with_name(f"{file.name}.part")
    partial.write_text(json.dumps(trace))
    partial.replace(file)
