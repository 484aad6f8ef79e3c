"""Traffic counters: bytes sent, by axis and collective. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple


class Sent(NamedTuple):
    """Number of calls of one collective over one axis, and the bytes that this rank sent in them."""

    calls: int
    bytes: float


class Traffic:
    """Bytes that this rank has sent since ``clear``, by axis and collective.

    A collective of M bytes over n ranks counts what a ring algorithm sends from each rank, which is the minimum of any
    algorithm:

    | collective | bytes |
    |---|---|
    | reduce-scatter, all-gather, all-to-all | (n-1)/n M |
    | all-reduce | 2 (n-1)/n M |
    | broadcast | M on the source |
    | send | M |

    Attributes:
        suspended: True in the context of ``uncounted``.
    """

    def __init__(self) -> None:
        self._sent: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
        self.suspended = False

    def add(self, axis: str, collective: str, size: float) -> None:
        """Add one call, and the ``size`` bytes that this rank sends in it, to a collective's counter."""
        if self.suspended:
            return
        entry = self._sent[axis, collective]
        entry[0] += 1
        entry[1] += size

    def bytes(self, axis: str, collective: str) -> float:
        """Return the bytes sent so far by one collective over one axis."""
        return self._sent[axis, collective][1] if (axis, collective) in self._sent else 0.0

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Context in which nothing is counted. It is used for consistency checks, which are not part of a step."""
        before, self.suspended = self.suspended, True
        try:
            yield
        finally:
            self.suspended = before

    def clear(self) -> None:
        """Set all counters to 0."""
        self._sent.clear()

    def since(self, before: Mapping[str, Mapping[str, Sent]]) -> dict[str, dict[str, Sent]]:
        """Return what was sent after an earlier ``report``. Counters that were cleared since count from there."""
        sent: dict[str, dict[str, Sent]] = {}
        for axis, kinds in self.report().items():
            for collective, now in kinds.items():
                then = before.get(axis, {}).get(collective, Sent(0, 0.0))
                if now.calls < then.calls:
                    then = Sent(0, 0.0)
                if now.calls > then.calls:
                    sent.setdefault(axis, {})[collective] = Sent(now.calls - then.calls, now.bytes - then.bytes)
        return sent

    def report(self) -> dict[str, dict[str, Sent]]:
        """Return axis -> collective -> calls and bytes."""
        report: dict[str, dict[str, Sent]] = {}
        for (axis, collective), (calls, size) in sorted(self._sent.items()):
            report.setdefault(axis, {})[collective] = Sent(int(calls), size)
        return report
