"""Counting what is sent: every collective and message adds its bytes here. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .clock import Clock


class Sent(NamedTuple):
    """Calls, and bytes that this rank sent in them."""

    calls: int
    bytes: float


class Flight(NamedTuple):
    """A collective; times are marks of ``Traffic.clock``.

    Between ``start`` and ``waited`` the rank did something else; from there to ``end`` it waited.
    """

    axis: str
    collective: str
    start: Any
    waited: Any
    end: Any
    bytes: float  # that this rank sent in it


class Traffic:
    """Bytes that this rank sends, by axis and collective, since ``clear``.

    A collective over n ranks counts what its ring sends from each rank, which is also the least any algorithm can:
    reduce-scatter and all-gather of M bytes in all (n-1)/n M, all-reduce twice that; a broadcast counts M on its
    source, a send M.

    Attributes:
        flights: the collectives of the last recording (``recorded.py``), in the order they were waited for.
        clock: what marked their times.
    """

    clock: Clock

    def __init__(self) -> None:
        self._sent: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
        self.flights: list[Flight] | None = None

    def add(self, axis: str, collective: str, size: float) -> None:
        """One call that sends ``size`` bytes from this rank."""
        entry = self._sent[axis, collective]
        entry[0] += 1
        entry[1] += size

    def bytes(self, axis: str, collective: str) -> float:
        """What was sent of one kind so far."""
        return self._sent[axis, collective][1] if (axis, collective) in self._sent else 0.0

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is sent within is not counted: a check is no part of a step."""
        before, flights = {key: list(entry) for key, entry in self._sent.items()}, self.flights
        self.flights = None
        try:
            yield
        finally:
            self._sent.clear()
            self._sent.update(before)
            self.flights = flights

    def clear(self) -> None:
        """Start again from nothing."""
        self._sent.clear()

    def report(self) -> dict[str, dict[str, Sent]]:
        """axis -> collective -> what was sent."""
        report: dict[str, dict[str, Sent]] = {}
        for (axis, collective), (calls, size) in sorted(self._sent.items()):
            report.setdefault(axis, {})[collective] = Sent(int(calls), size)
        return report
