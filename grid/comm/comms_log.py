"""Communication log: the duration of each collective and message."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

from ...base.uncompiled import uncompiled
from .axis import Operation
from .spans import OpenSpan

# Files of the functions between the caller of an axis and the readers of its spans.
_INSIDE = (f"{Path(__file__).parent}{os.sep}", uncompiled.__code__.co_filename)


class LoggedCall(NamedTuple):
    """Key of the communication log: calls with equal keys share one list of durations.

    Attributes:
        op: the name of the axis's method.
        axis, ranks: the axis's name and global ranks.
        size: bytes as NCCL's tests count them: those of an all-gather's output, of a reduce-scatter's input, or of the
            tensor in other operations.
        caller: the name of the function that called the axis. Empty if the log does not record callers.
    """

    op: str
    axis: str
    ranks: tuple[int, ...]
    size: int
    caller: str = ""


class CommsLog:
    """Reader of spans that keeps durations of collectives and messages, from the call to the end of its wait.

    The duration of an asynchronous operation thus includes the time between its start and the call of ``wait``.

    Args:
        synchronize: function that waits for the device. It is called before each time is taken.
        each: called at the end of every timed call, with the call and the seconds that it took.
        callers: record the name of the function that made each call.

    Attributes:
        seconds: durations of each kind of call, in the order in which the calls ended.
    """

    def __init__(
        self,
        synchronize: Callable[[], None],
        each: Callable[[LoggedCall, float], None] | None = None,
        callers: bool = False,
    ) -> None:
        self._synchronize, self._each, self._callers = synchronize, each, callers
        self.seconds: dict[LoggedCall, list[float]] = {}

    def clear(self) -> None:
        """Delete all recorded durations."""
        self.seconds.clear()

    def __call__(self, span: OpenSpan) -> AbstractContextManager[None]:
        """Return the context that times an operation of an axis."""
        operation: Operation = span.about
        axis, caller = operation.axis, _caller() if self._callers else ""
        return self._timed(LoggedCall(operation.name, axis.name, axis.ranks, operation.bytes, caller))

    @contextmanager
    def _timed(self, call: LoggedCall) -> Iterator[None]:
        self._synchronize()
        begin = time.perf_counter()
        yield
        self._synchronize()
        seconds = time.perf_counter() - begin
        self.seconds.setdefault(call, []).append(seconds)
        if self._each is not None:
            self._each(call, seconds)


def _caller() -> str:
    """Return the name of the function that called the axis: the innermost one that is not in ``_INSIDE``."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    return frame.f_code.co_name
