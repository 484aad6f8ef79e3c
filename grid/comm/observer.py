"""Observers of axes: they are called when a collective or a message begins and when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .pending import Done, Pending
from .traffic import Traffic


class Observer:
    """Base class of observers: ``CommsLog``, ``StepRecorder`` and ``TimelineRecorder``."""

    def attach(self, axis: ObservedAxis) -> None:
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


class ObservedAxis:
    """Facts of an axis that observers read, and the list of its observers.

    Attributes:
        name: ``pipe``, ``data``, ``tensor``, or the joined names of several axes.
        ranks: the global ranks of the group's processes, in the axis's order.
        size: the number of processes in the group.
        traffic: counts the bytes sent.
        observers: are called when an operation begins and when it ends, in the order in which they were added.
        label: (name of the communicated tensor, name of the operation's phase, e.g. ``NEGOTIATE_ALLREDUCE``) that the
            timeline writes beside each operation that begins now. ``labeled`` sets it.
    """

    def __init__(self, name: str, ranks: Sequence[int], traffic: Traffic | None) -> None:
        self.name, self.ranks, self.size = name, tuple(ranks), len(ranks)
        self.traffic = traffic if traffic is not None else Traffic()
        self.observers: tuple[Observer, ...] = ()
        self.label = ("", "")

    def observe(self, observer: Observer) -> None:
        """Report the operations to an observer from now on. An axis of size 1 has none."""
        if self.size > 1:
            self.observers = (*self.observers, observer)
            observer.attach(self)

    def unobserve(self, observer: Observer) -> None:
        """Stop reporting new operations to an observer. The ends of operations that have begun are still reported."""
        self.observers = tuple(other for other in self.observers if other is not observer)


class ObservedOperation:
    """Operation of an axis that has observers: their ``begin`` is called here, ``end`` at the end of its wait.

    Args:
        axis, op, size: the arguments of ``Observer.begin``.
    """

    def __init__(self, axis: ObservedAxis, op: str, size: int) -> None:
        begun = [(observer, observer.begin(axis, op, size)) for observer in axis.observers]
        self._begun = [(observer, entry) for observer, entry in begun if entry is not None]
        self._axis, self._op, self._before = axis, op, axis.traffic.bytes(axis.name, op)
        self._pending: Pending = Done()
        self._sent = 0.0

    def follow(self, pending: Pending) -> Pending:
        """Take the handle of the operation; return the one to wait for. An operation that is done ends here."""
        self._sent = self._axis.traffic.bytes(self._axis.name, self._op) - self._before
        if isinstance(pending, Done):
            self._end(lambda observer: None)
            return pending
        self._pending = pending
        return self

    def wait(self) -> None:
        waited = {observer: observer.now() for observer, _ in self._begun}
        self._pending.wait()
        self._end(waited.__getitem__)

    def _end(self, waited: Callable[[Observer], Any]) -> None:
        for observer, entry in reversed(self._begun):
            observer.end(entry, waited(observer), self._sent)


@contextmanager
def labeled(axis: ObservedAxis, name: str, phase: str = "") -> Iterator[None]:
    """Context in which the timeline writes a name and a phase beside each operation that begins.

    Args:
        axis: the axis of the operations.
        name: the name of the tensor that is communicated.
        phase: the operation's phase in the timeline, e.g. ``NEGOTIATE_ALLREDUCE`` or ``ALLREDUCE``.
    """
    before, axis.label = axis.label, (name, phase)
    try:
        yield
    finally:
        axis.label = before
