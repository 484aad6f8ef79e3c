"""Rows of one set of documents, or of a mixture by weight: which member the n-th row of a run comes from.

Rows are dealt out in blocks of 65,536, each with the same numbers of rows of each member, evenly spread. So the place
of a run is the number of its row: nothing is counted, and nothing is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..base.errors import ConfigError
from .packing import DocumentRows, Pieces
from .token_file import Array

BLOCK = 2**16


class Mixture:
    """Order of the rows of a mixture.

    Args:
        weights: share of each member in the rows; they need not add up to 1.

    Attributes:
        counts: rows of each member in a block.

    Raises:
        ConfigError: a weight is not above 0, or less than a block's share of one row.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        shares = np.asarray(weights, np.float64)
        if not (np.isfinite(shares).all() and (shares > 0).all()):
            raise ConfigError(f"The weights are {[*weights]}, but each must be a number above 0.")
        exact = shares / shares.sum() * BLOCK
        counts = np.floor(exact).astype(np.int64)
        order = np.argsort(-(exact - counts), kind="stable")
        counts[order[: BLOCK - int(counts.sum())]] += 1
        if (counts == 0).any():
            least = f"1/{BLOCK} of all"
            raise ConfigError(f"The weights are {[*weights]}, but each must be at least {least}. Leave the least out.")
        self.counts = counts
        times = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
        members = np.repeat(np.arange(len(counts)), counts)
        within = np.concatenate([np.arange(count) for count in counts])
        by_time = np.argsort(times, kind="stable")
        self._members, self._within = members[by_time], within[by_time]

    def locate(self, rows: Array) -> tuple[Array, Array]:
        """Return the member that each row of the run comes from, and its number among the member's rows: (n,) each."""
        blocks, places = np.divmod(rows, BLOCK)
        members = self._members[places]
        return members, blocks * self.counts[members] + self._within[places]


class Rows:
    """Rows of training data, endlessly: those of one set of documents, or of a mixture.

    Attributes:
        count: number of rows in an epoch; of a mixture, in an epoch of each member.
        documents, tokens: numbers in those rows.
    """

    def __init__(self, members: list[DocumentRows], mixture: Mixture | None) -> None:
        self.members, self._mixture = members, mixture
        self.count = sum(member.count for member in members)
        self.documents = sum(member.documents for member in members)
        self.tokens = sum(member.tokens for member in members)

    @property
    def is_mixture(self) -> bool:
        """True for a mixture, whose members have epochs of their own."""
        return self._mixture is not None

    def fill(self, first: int, count: int, ids: Array, labels: Array, documents: Array | None) -> None:
        """Write rows one after another into the first slots of a batch, as ``DocumentRows.fill``."""
        for member, rows, slots in self._by_member(first, count):
            self.members[member].fill(rows, slots, ids, labels, documents)

    def pieces(self, first: int, count: int) -> list[tuple[int, Pieces]]:
        """Return the pieces of documents in some rows, by the number of the member that they come from."""
        return [(member, self.members[member].pieces(rows)) for member, rows, _ in self._by_member(first, count)]

    def _by_member(self, first: int, count: int) -> Iterator[tuple[int, Array, Array]]:
        """Yield for each member of some rows its number, its rows, and their places among the rows."""
        rows = np.arange(first, first + count)
        if self._mixture is None:
            yield 0, rows, np.arange(count)
            return
        members, rows = self._mixture.locate(rows)
        for member in np.unique(members).tolist():
            slots = np.flatnonzero(members == member)
            yield member, rows[slots], slots
