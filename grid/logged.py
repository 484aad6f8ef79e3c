"""Axes that time what goes through them: the class that a grid's axes take while somebody logs communication."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from torch import Tensor

from .axis import Axis, Pending, _bytes, _Done


class Call(NamedTuple):
    """What calls have in common that are counted together.

    Attributes:
        op: the axis's method.
        axis, ranks: its name, and its global ranks.
        size: bytes as NCCL's tests count them: what a rank holds of the whole, so for an all-gather its output, for a
            reduce-scatter its input, else the tensor.
        caller: the function that asked for it; empty unless that is wanted.
    """

    op: str
    axis: str
    ranks: tuple[int, ...]
    size: int
    caller: str = ""


class Log:
    """Durations of collectives and messages, from the call to the end of its wait.

    An operation that runs beside others is thus timed as long as nobody asked for its end.

    Args:
        ops: which are timed.
        synchronise: waits for the device; called where a time is taken.
        each: called with every call and its seconds, as it ends.
        callers: find out who called.

    Attributes:
        seconds: of each call, in their order.
    """

    def __init__(
        self,
        ops: Collection[str],
        synchronise: Callable[[], None],
        each: Callable[[Call, float], None] | None = None,
        callers: bool = False,
    ) -> None:
        self.ops, self._synchronise, self._each, self._callers = frozenset(ops), synchronise, each, callers
        self.seconds: dict[Call, list[float]] = {}

    def clear(self) -> None:
        """Start again from nothing."""
        self.seconds.clear()

    def now(self) -> float:
        """The time, when the device has done what it was given."""
        self._synchronise()
        return time.perf_counter()

    def add(self, call: Call, begin: float) -> None:
        """A call ended that was made at ``begin``."""
        seconds = self.now() - begin
        self.seconds.setdefault(call, []).append(seconds)
        if self._each is not None:
            self._each(call, seconds)

    def caller(self) -> str:
        """The function outside of this file that called, if that is wanted."""
        if not self._callers:
            return ""
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename == __file__:
            frame = frame.f_back
        return frame.f_code.co_name


class _Timed:
    """What is under way, and is timed when it was waited for."""

    def __init__(self, work: Pending, log: Log, call: Call, begin: float) -> None:
        self._work, self._log, self._call, self._begin = work, log, call, begin

    def wait(self) -> None:
        self._work.wait()
        self._log.add(self._call, self._begin)


class LoggedAxis(Axis):
    """An axis whose calls are timed. ``attach`` makes one of an axis that is in use."""

    log: Log

    def all_reduce(self, tensor: Tensor, op: str = "sum", async_op: bool = False) -> Pending:
        """As ``Axis``; so are the others."""
        return self._timed("all_reduce", _bytes(tensor), Axis.all_reduce, tensor, op, async_op)

    def all_gather(self, output: Tensor, tensor: Tensor, async_op: bool = False) -> Pending:
        """See above."""
        return self._timed("all_gather", _bytes(output), Axis.all_gather, output, tensor, async_op)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, async_op: bool = False) -> Pending:
        """See above."""
        return self._timed("reduce_scatter", _bytes(tensor), Axis.reduce_scatter, output, tensor, async_op)

    def all_to_all(self, output: Tensor, tensor: Tensor, async_op: bool = False) -> Pending:
        """See above."""
        return self._timed("all_to_all", _bytes(tensor), Axis.all_to_all, output, tensor, async_op)

    def broadcast(self, tensor: Tensor, source: int = 0, async_op: bool = False) -> Pending:
        """See above."""
        return self._timed("broadcast", _bytes(tensor), Axis.broadcast, tensor, source, async_op)

    def send(self, tensor: Tensor, to: int, tag: int) -> Pending:
        """See above."""
        return self._timed("send", _bytes(tensor), Axis.send, tensor, to, tag)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Pending:
        """See above."""
        return self._timed("receive", _bytes(tensor), Axis.receive, tensor, source, tag)

    def all_gather_object(self, value: Any) -> list[Any]:
        """See above. Its size is not known: 0."""
        values: list[Any] = self._timed("all_gather_object", 0, Axis.all_gather_object, value)
        return values

    def barrier(self) -> None:
        """See above."""
        self._timed("barrier", 0, Axis.barrier)

    def _timed(self, op: str, size: int, method: Callable[..., Any], *args: Any) -> Any:
        if self.size == 1 or op not in self.log.ops:
            return method(self, *args)
        call = Call(op, self.name, self.ranks, size, self.log.caller())
        begin = self.log.now()
        result = method(self, *args)
        if hasattr(result, "wait") and not isinstance(result, _Done):
            return _Timed(result, self.log, call, begin)
        self.log.add(call, begin)
        return result


def attach(axis: Axis, log: Log) -> None:
    """Time what goes through an axis from now on, for whoever holds it."""
    axis.__class__ = LoggedAxis
    assert isinstance(axis, LoggedAxis)
    axis.log = log
