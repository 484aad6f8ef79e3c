"""Recorder of a rank's part of a timeline: every collective, message and span, written line by line while it happens.

The file stays readable if the process is killed. A collective is written when it starts, so that the timeline also
shows a collective that never ends. ``engine/monitor/trace/merge_timelines.py`` merges the files of all ranks.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from ...base.records import Records
from ..environment import read_environment
from .axis import Axis, Operation
from .spans import OpenSpan

# Kind of a span -> category of its slice. Other parts of a step and other ops are not written.
_CATEGORIES = {"step": "step", "optimizer": "optimizer"}
_CATEGORIES |= dict.fromkeys(("forward", "backward", "F", "B", "I", "W", "C"), "compute")


class TimelineRecorder:
    """Reader of spans that writes one rank's part of a timeline: JSON lists, one a line.

    | line | fields |
    |---|---|
    | ``["rank", ...]`` | rank, its name, number of restarts by torchrun, number of the grid, clock |
    | ``["axis", ...]`` | number, name, ranks, purpose |
    | ``["begin", ...]`` | number, number of the axis, operation, bytes, label, phase, seconds |
    | ``["end", ...]`` | number, start of the wait, seconds, thread |
    | ``["span", ...]`` | name, kind, start, end, thread |

    A script may make several grids, which all ranks number in the order in which they make them. Axes and operations
    are numbered within the file. ``label`` is the name of the communicated tensor, and ``phase`` the name of the
    operation's phase, e.g. ``NEGOTIATE_ALLREDUCE``. Both are set by ``Axis.labeled`` and may be empty. Clock, start,
    end and seconds are times of ``time.perf_counter``, which on a CPU is one clock for all processes of a host. On a
    GPU too they are times of the host: when the rank started an operation, and when the host was told of its end.

    Args:
        folder: the folder in which the file is made.
        rank, name: rank and name of this process, e.g. 3 and ``rank 3 (pipe 1, data 1, tensor 0)``.

    Attributes:
        file: the file of this rank's part.
    """

    def __init__(self, folder: str | Path, rank: int, name: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        environment = read_environment()
        attempt = environment.restarts if environment is not None else 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        for number in itertools.count():  # a script may have several grids, which all ranks make in the same order
            self.file = Path(folder) / f"rank-{rank}-{attempt}-{number}.jsonl"
            try:
                self._out: int | None = os.open(self.file, flags, 0o644)
                break
            except FileExistsError:
                continue
        self._records = Records()
        # Guards the descriptor: after ``close`` another file may get its number, and a late write must not go there.
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._axes: dict[Axis, int] = {}
        self.write("rank", rank, name, attempt, number, time.perf_counter())

    def close(self) -> None:
        """Close the file. If an operation is still running, its end is not written."""
        with self._lock:
            out, self._out = self._out, None
        if out is not None:
            os.close(out)

    def __call__(self, span: OpenSpan) -> AbstractContextManager[None] | None:
        """Return the context that writes a span."""
        if isinstance(span.about, Operation):
            return self._operation(span, span.about)
        return self._slice(span) if span.kind in _CATEGORIES else None

    @contextmanager
    def _slice(self, span: OpenSpan) -> Iterator[None]:
        """Write the time spent in this context as a slice of this rank's row."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            category, end = _CATEGORIES[span.kind], time.perf_counter()
            self.write("span", str(span.about), category, begin, end, threading.get_ident())

    @contextmanager
    def _operation(self, span: OpenSpan, operation: Operation) -> Iterator[None]:
        """Write an operation's ``begin`` line, and its ``end`` line at the end of this context."""
        waits, number, axis = [time.perf_counter()], next(self._numbers), operation.axis
        span.at_turn(lambda: waits.append(time.perf_counter()))
        if axis not in self._axes:
            with self._lock:
                self._axes.setdefault(axis, len(self._axes))
            self.write("axis", self._axes[axis], axis.name, axis.ranks, axis.purpose)
        self.write("begin", number, self._axes[axis], operation.name, operation.bytes, *axis.label, time.perf_counter())
        yield
        self.write("end", number, waits[-1], time.perf_counter(), threading.get_ident())

    def write(self, *entry: Any) -> None:
        """Append a line in one system call, so that lines of several threads do not mix. No effect after ``close``."""
        line = json.dumps(entry).encode() + b"\n"
        with self._lock:
            if self._out is not None:
                with self._records.writing(str(self.file)):
                    os.write(self._out, line)
