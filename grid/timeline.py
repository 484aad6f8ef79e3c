"""A rank's part of a timeline: every collective, message and span, written down line by line while it happens.

What is written is there whatever becomes of the process, and a collective is in the file from the moment it starts: one
that never ends is seen. ``engine/timeline_file.py`` makes one file of the parts of all ranks. While nobody records, a
grid's axes are of their own class, and nothing here runs.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .axis import Axis, Pending, _bytes, done
from .environment import read_environment

if TYPE_CHECKING:
    from .grid import Grid


class Recorder:
    """Writes one rank's part, a line for each entry: a list in JSON.

    ``["rank", rank, its name, attempt, number of the grid, clock]``; ``["axis", number, name, ranks, which of these]``;
    ``["begin", number, axis, op, bytes, label, phase, seconds]``; ``["end", number, waited from, seconds, thread]``;
    ``["span", name, kind, from, to, thread]``. Seconds count as ``time.perf_counter`` does: on a CPU's host one clock
    for all. On a GPU they are the host's too: when it asked for something, and when it was told of its end.

    Args:
        grid: whose axes are recorded.
        folder: for the part.

    Attributes:
        file: the part.
    """

    def __init__(self, grid: Grid, folder: str | Path) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        environment = read_environment()
        attempt = environment.restarts if environment is not None else 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        for number in itertools.count():  # a script may have several grids, which all ranks make in the same order
            self.file = Path(folder) / f"rank-{grid.rank}-{attempt}-{number}.jsonl"
            try:
                self._out: int | None = os.open(self.file, flags, 0o644)
                break
            except FileExistsError:
                continue
        self._lock = threading.Lock()  # of the descriptor: whoever writes late must not meet it closed, or another's
        self._numbers, self._axes = itertools.count(), itertools.count()
        self._like: dict[tuple[str, tuple[int, ...]], int] = {}
        self._grid = grid
        self.write("rank", grid.rank, grid.describe(), attempt, number, time.perf_counter())
        for axis in grid.axes():
            self.attach(axis)

    def attach(self, axis: Axis) -> None:
        """Record an axis from now on."""
        if axis.size == 1:
            return
        key = (axis.name, axis.ranks)
        self._like[key] = self._like.get(key, -1) + 1
        axis.__class__ = recorded(type(axis))  # type: ignore[arg-type]
        assert isinstance(axis, TimelineAxis)
        axis.recorder, axis.number = self, next(self._axes)
        self.write("axis", axis.number, axis.name, axis.ranks, self._like[key])

    def close(self) -> None:
        """Record no more. What is under way may end later, and is not written down."""
        for axis in self._grid.axes():
            if isinstance(axis, TimelineAxis):
                axis.__class__ = type(axis).was  # type: ignore[assignment]
        with self._lock:
            out, self._out = self._out, None
        if out is not None:
            os.close(out)

    @contextmanager
    def span(self, name: str, kind: str) -> Iterator[None]:
        """What runs within is a slice of this rank's row; ``kind`` is what it counts as."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.write("span", name, kind, begin, time.perf_counter(), threading.get_ident())

    def begin(self, axis: TimelineAxis, op: str, size: int) -> int:
        """An operation starts; returns its number."""
        number = next(self._numbers)
        self.write("begin", number, axis.number, op, size, *axis.label, time.perf_counter())
        return number

    def end(self, number: int, waited: float) -> None:
        """It is over; this rank waited for it since ``waited``."""
        self.write("end", number, waited, time.perf_counter(), threading.get_ident())

    def write(self, *entry: Any) -> None:
        """Append an entry: one call of the system, whole whichever thread makes it. After ``close``: nothing."""
        line = json.dumps(entry).encode() + b"\n"
        with self._lock:
            if self._out is not None:
                os.write(self._out, line)


class TimelineAxis(Axis):
    """An axis that is recorded.

    Attributes:
        was: the class that it has when it is not.
        recorder, number: where it is recorded, and its number there.
        label: what the operations to come are about (the name of a tensor), and the phase that they are; empty: the
            operation's own name, and its phases are told apart when the parts are put together.
    """

    was: type[Axis] = Axis
    recorder: Recorder
    number: int
    label: tuple[str, str] = ("", "")

    @staticmethod
    def over(kind: type[Axis]) -> type[Axis]:
        """Of axes that are recorded, and are of that class besides."""
        found: type[Axis] = recorded(kind)  # type: ignore[arg-type]
        return found

    def all_reduce(self, tensor: Tensor, op: str = "sum", async_op: bool = False) -> Pending:
        """As ``Axis``; so are the others."""
        call = super().all_reduce
        return self._recorded("all_reduce", _bytes(tensor), lambda: call(tensor, op, async_op))

    def all_gather(self, output: Tensor, tensor: Tensor, async_op: bool = False) -> Pending:
        """See above."""
        call = super().all_gather
        return self._recorded("all_gather", _bytes(output), lambda: call(output, tensor, async_op))

    def reduce_scatter(self, output: Tensor, tensor: Tensor, async_op: bool = False) -> Pending:
        """See above."""
        call = super().reduce_scatter
        return self._recorded("reduce_scatter", _bytes(tensor), lambda: call(output, tensor, async_op))

    def broadcast(self, tensor: Tensor, source: int = 0, async_op: bool = False) -> Pending:
        """See above."""
        call = super().broadcast
        return self._recorded("broadcast", _bytes(tensor), lambda: call(tensor, source, async_op))

    def send(self, tensor: Tensor, to: int, tag: int) -> Pending:
        """See above."""
        call = super().send
        return self._recorded("send", _bytes(tensor), lambda: call(tensor, to, tag))

    def receive(self, tensor: Tensor, source: int, tag: int) -> Pending:
        """See above."""
        call = super().receive
        return self._recorded("receive", _bytes(tensor), lambda: call(tensor, source, tag))

    def all_gather_object(self, value: Any) -> list[Any]:
        """See above. Its size is not known: 0."""
        call = super().all_gather_object
        values: list[Any] = self._recorded("all_gather_object", 0, lambda: call(value))
        return values

    def barrier(self) -> None:
        """See above."""
        self._recorded("barrier", 0, super().barrier)

    def _recorded(self, op: str, size: int, call: Callable[[], Any]) -> Any:
        began, number = time.perf_counter(), self.recorder.begin(self, op, size)
        result = call()
        if hasattr(result, "wait") and not done(result):
            return _UnderWay(result, self.recorder, number)
        self.recorder.end(number, began)
        return result


class _UnderWay:
    """What is under way, and is over when it was waited for."""

    def __init__(self, work: Pending, recorder: Recorder, number: int) -> None:
        self._work, self._recorder, self._number = work, recorder, number

    def wait(self) -> None:
        waited = time.perf_counter()
        self._work.wait()
        self._recorder.end(self._number, waited)


@cache
def recorded(kind: Any) -> Any:
    """The class of axes that are recorded, and do besides what they did."""
    if issubclass(kind, TimelineAxis):
        return kind
    return TimelineAxis if kind is Axis else type(f"Timeline{kind.__name__}", (TimelineAxis, kind), {"was": kind})


def record(grid: Grid, folder: str | Path) -> None:
    """Record all that a grid does from now on in a part of its own in ``folder``."""
    grid.timeline = Recorder(grid, folder)


@contextmanager
def labelled(axis: Axis, name: str, phase: str = "") -> Iterator[None]:
    """Operations that start within are about ``name``; where nobody records, nothing happens."""
    if not isinstance(axis, TimelineAxis):
        yield
        return
    before, axis.label = axis.label, (name, phase)
    try:
        yield
    finally:
        axis.label = before
