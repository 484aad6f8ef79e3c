"""Axes that call observers when a collective or a message begins and when it ends.

An axis has the class ``ObservedAxis`` while it has observers, and its own class otherwise. Without observers a
collective therefore has no extra cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from .axis import Axis, nbytes
from .pending import Done, Pending


class Observer:
    """Base class of observers: ``CommsLog``, ``StepRecorder`` and ``TimelineRecorder``."""

    def attach(self, axis: Axis) -> None:
        """Begin to observe an axis. Called on every rank in the order in which the axes are made."""

    def begin(self, axis: ObservedAxis, op: str, size: int) -> Any:
        """Record the beginning of an operation; return a value for ``end``, or None to ignore this operation.

        Args:
            axis: the axis over which the operation runs.
            op: the name of the axis's method, e.g. ``all_gather``.
            size: bytes of an all-gather's output, of a reduce-scatter's input, or of the tensor in other operations;
                0 if the size is not known.
        """
        raise NotImplementedError

    def now(self) -> Any:
        """Return the present time, in the observer's own unit: here in seconds of ``time.perf_counter``."""
        return time.perf_counter()

    def end(self, begun: Any, waited: Any, sent: float) -> None:
        """Record the end of an operation.

        Args:
            begun: the value that ``begin`` returned.
            waited: the value of ``now`` when this rank began to wait for the operation. None if the rank waited from
                the beginning.
            sent: bytes that this rank sent in the operation.
        """
        raise NotImplementedError


class ObservedAxis(Axis):
    """An axis that reports each operation to its observers.

    Attributes:
        plain: the class of the axis without observers: ``Axis`` or ``HostAxis``.
        observers: in the order in which they were added.
        label: (name of the communicated tensor, Horovod's name of the phase, e.g. ``NEGOTIATE_ALLREDUCE``) that the
            timeline writes beside each operation that begins now. ``labeled`` sets it.
    """

    plain: type[Axis]
    observers: tuple[Observer, ...]
    label: tuple[str, str] = ("", "")

    def all_reduce(self, tensor: Tensor, op: str = "sum", async_op: bool = False) -> Pending:
        """Observed ``Axis.all_reduce``."""
        return self._observed("all_reduce", nbytes(tensor), tensor, op, async_op)

    def all_gather(self, output: Tensor, tensor: Tensor, async_op: bool = False) -> Pending:
        """Observed ``Axis.all_gather``."""
        return self._observed("all_gather", nbytes(output), output, tensor, async_op)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, async_op: bool = False) -> Pending:
        """Observed ``Axis.reduce_scatter``."""
        return self._observed("reduce_scatter", nbytes(tensor), output, tensor, async_op)

    def all_to_all(
        self,
        output: Tensor,
        tensor: Tensor,
        async_op: bool = False,
        *,
        receive: Sequence[int] | None = None,
        send: Sequence[int] | None = None,
    ) -> Pending:
        """Observed ``Axis.all_to_all``."""
        splits = {"receive": receive, "send": send}
        return self._observed("all_to_all", nbytes(tensor), output, tensor, async_op, **splits)

    def broadcast(self, tensor: Tensor, source: int = 0, async_op: bool = False) -> Pending:
        """Observed ``Axis.broadcast``."""
        return self._observed("broadcast", nbytes(tensor), tensor, source, async_op)

    def send(self, tensor: Tensor, to: int, tag: int) -> Pending:
        """Observed ``Axis.send``."""
        return self._observed("send", nbytes(tensor), tensor, to, tag)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Pending:
        """Observed ``Axis.receive``."""
        return self._observed("receive", nbytes(tensor), tensor, source, tag)

    def all_gather_json(self, value: Any) -> list[Any]:
        """Observed ``Axis.all_gather_json``. The size is reported as 0, because it is not known."""
        values: list[Any] = self._observed("all_gather_json", 0, value)
        return values

    def barrier(self) -> None:
        """Observed ``Axis.barrier``."""
        self._observed("barrier", 0)

    def _observed(self, op: str, size: int, *args: Any, **named: Any) -> Any:
        begun = [(observer, observer.begin(self, op, size)) for observer in self.observers]
        before = self.traffic.bytes(self.name, op)
        result = getattr(self.plain, op)(self, *args, **named)
        operation = _Operation(result, begun, self.traffic.bytes(self.name, op) - before)
        if hasattr(result, "wait") and not isinstance(result, Done):
            return operation
        operation.end(lambda observer: None)
        return result


class _Operation:
    """Handle of a running operation, with the values that its observers' ``begin`` returned."""

    def __init__(self, pending: Pending, begun: list[tuple[Observer, Any]], sent: float) -> None:
        self._pending, self._sent = pending, sent
        self._begun = [(observer, entry) for observer, entry in begun if entry is not None]

    def wait(self) -> None:
        waited = {observer: observer.now() for observer, _ in self._begun}
        self._pending.wait()
        self.end(waited.__getitem__)

    def end(self, waited: Callable[[Observer], Any]) -> None:
        """Tell the observers that the operation has ended."""
        for observer, entry in reversed(self._begun):
            observer.end(entry, waited(observer), self._sent)


def observe(axis: Axis, observer: Observer) -> None:
    """Report an axis's operations to an observer from now on. An axis of size 1 has none."""
    if axis.size == 1:
        return
    if not isinstance(axis, ObservedAxis):
        plain, axis.__class__ = type(axis), ObservedAxis
        assert isinstance(axis, ObservedAxis)
        axis.plain, axis.observers = plain, ()
    axis.observers = (*axis.observers, observer)
    observer.attach(axis)


def unobserve(axis: Axis, observer: Observer) -> None:
    """Stop reporting new operations to an observer. The ends of operations that have begun are still reported."""
    if isinstance(axis, ObservedAxis):
        axis.observers = tuple(other for other in axis.observers if other is not observer)
        if not axis.observers:
            axis.__class__ = axis.plain  # type: ignore[assignment]


@contextmanager
def labeled(axis: Axis, name: str, phase: str = "") -> Iterator[None]:
    """Context in which the timeline writes a name and a phase beside each operation that begins.

    Args:
        axis: the axis of the operations.
        name: the name of the tensor that is communicated.
        phase: the operation's phase in Horovod's timeline, e.g. ``NEGOTIATE_ALLREDUCE`` or ``ALLREDUCE``.
    """
    if not isinstance(axis, ObservedAxis):
        yield
        return
    before, axis.label = axis.label, (name, phase)
    try:
        yield
    finally:
        axis.label = before
