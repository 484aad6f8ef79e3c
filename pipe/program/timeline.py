"""Times of a step's ops, in seconds: measured, or simulated."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...base.files import parse_json
from .ops import Op


class Span(NamedTuple):
    """Start and end time of one op."""

    op: Op
    start: float
    end: float


def busy(row: Sequence[Span]) -> float:
    """Return the time in which an op of a row runs. The two ops of a pair have the same span, which counts once."""
    return sum(spans[0].end - spans[0].start for spans in together(row))


def together(row: Sequence[Span]) -> Iterator[tuple[Span, ...]]:
    """Yield the spans of a row one by one, those of a pair of ops together."""
    i = 0
    while i < len(row):
        count = 1 + (i + 1 < len(row) and row[i][1:] == row[i + 1][1:] and row[i].end > row[i].start)
        yield tuple(row[i : i + count])
        i += count


class CollectiveSpan(NamedTuple):
    """A collective of the data axis. From ``waited`` to ``end`` its rank waited; before, it did something else."""

    name: str
    start: float
    waited: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Times of each op of each rank: simulated (simulate.py), or measured by the executor.

    Attributes:
        rows: for each rank the spans of its ops; in seconds if they were measured, else in the unit of the costs.
        collectives: for each rank its collectives of a measured step; () for a simulated step.
        transfers: for each rank the copies of activations to the host and back; () without any.
    """

    rows: tuple[tuple[Span, ...], ...]
    collectives: tuple[tuple[CollectiveSpan, ...], ...] = ()
    transfers: tuple[tuple[Span, ...], ...] = ()

    @property
    def makespan(self) -> float:
        """Time from the first op's start to the last op's end, over all ranks."""
        spans = [span for row in self.rows for span in row]
        return max(s.end for s in spans) - min(s.start for s in spans) if spans else 0.0

    @property
    def idle(self) -> list[float]:
        """Idle share of each rank, which is 1 - (its busy time) / makespan."""
        makespan = self.makespan
        return [1.0 - busy(row) / makespan for row in self.rows] if makespan else []

    @property
    def bubble(self) -> float:
        """Idle share of the busiest rank."""
        return min(self.idle, default=0.0)

    @property
    def bubble_paper(self) -> float:
        """The bubble as papers on zero-bubble schedules count it: between each rank's own first and last op.

        1 - (busy time of the busiest rank) / (longest time from a rank's first op to its last), Qi et al. 2023,
        arXiv:2401.10241, section 5.3.
        """
        rows = [row for row in self.rows if row]
        longest = max((row[-1].end - row[0].start for row in rows), default=0.0)
        return 1.0 - max(map(busy, rows)) / longest if longest else 0.0

    @property
    def bubble_of_ideal(self) -> float:
        """The bubble as Narayanan et al. 2021 count it: idle time over the ideal time, of the busiest rank.

        The ideal time is the rank's own work, so 1F1B has (p - 1) / m. (arXiv:2104.04473, section 2.2)
        """
        idle = self.bubble
        return idle / (1.0 - idle) if idle < 1.0 else 0.0

    def to_json(self) -> str:
        """Return the rows as JSON: [op, start, end] of each span, without collectives."""
        return json.dumps([[[str(s.op), s.start, s.end] for s in row] for row in self.rows])

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """Read a timeline in the format of `to_json`."""
        rows = parse_json(text)
        return cls(tuple(tuple(Span(Op.parse(op), start, end) for op, start, end in row) for row in rows))
