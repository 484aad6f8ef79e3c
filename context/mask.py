"""Attention mask as a rule: which keys each query sees, by their positions in the whole sequence.

``Mask`` holds the rule. ``tiles`` cuts a plain rule (causal or not, nothing else) into dense rectangles. Other rules
are computed by blocks (block_sparse.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from .documents import Documents
from .order import Runs


@dataclass(frozen=True, eq=False)
class Mask:
    """Rule by which a query sees a key.

    Attributes:
        length: T, the number of tokens of the whole sequence without padding.
        causal: a token sees itself and earlier tokens only.
        window: a token sees keys at a distance below ``window`` only. None: any distance.
        documents: a token sees its own document only. None: each row is one document.
        layout: blocks that are computed, bool (heads or 1, n, n) with n = T / ``block`` rounded up, on the CPU. None:
            all.
        block: tokens in a block of ``layout``.
    """

    length: int
    causal: bool
    window: int | None = None
    documents: Documents | None = None
    layout: Tensor | None = None
    block: int = 0

    @property
    def plain(self) -> bool:
        """True if the rule depends on nothing but ``causal``."""
        return self.window is None and self.documents is None and self.layout is None

    def allowed(self, queries: Tensor, keys: Tensor, rows: Tensor) -> Tensor:
        """Return for each pair of query and key whether the query sees the key. ``layout`` is not looked at.

        Args:
            queries: positions of queries, int64 (R, m); -1 where there is no token.
            keys: positions of keys, int64 (R, n); -1 where there is no token.
            rows: (R,), the rows to whose documents the tokens belong.

        Returns:
            bool (R, m, n).
        """
        distance = queries[:, :, None] - keys[:, None, :]
        seen = (keys >= 0)[:, None, :] & (queries >= 0)[:, :, None]
        if self.causal:
            seen &= distance >= 0
        if self.window is not None:
            seen &= distance.abs() < self.window
        if self.documents is not None:
            numbers, rows = self.documents.numbers.to(keys.device), rows.to(keys.device)[:, None]
            own_numbers, theirs = (numbers[rows, places.clamp(min=0)] for places in (queries, keys))
            seen &= own_numbers[:, :, None] == theirs[:, None, :]
        return seen


class Tile(NamedTuple):
    """Rectangle of the matrix of scores."""

    queries: slice
    keys: slice
    causal: bool  # a square on the diagonal: query i sees keys up to i


def tiles(queries: Runs, keys: Runs, causal: bool) -> list[Tile]:
    """Cut a plain rule into dense rectangles, which cover each pair of a query and a key that it sees once.

    Args:
        queries, keys: positions of the tokens. A run of queries lies in one run of keys, or has no position in common
            with any.
        causal: the rule.
    """
    every_query, every_key = slice(0, count(queries)), slice(0, count(keys))
    if not causal or queries == keys:
        return [Tile(every_query, every_key, causal)] if every_query.stop and every_key.stop else []
    merged: list[Tile] = []
    at = 0
    for start, stop in queries:
        tile_queries = slice(at, at + stop - start)
        at = tile_queries.stop
        # Runs are in increasing order: the keys that all these queries see are the first keys.
        before = sum(max(0, min(last, start) - first) for first, last in keys)
        if merged and not merged[-1].causal and merged[-1].keys.stop == before:
            merged[-1] = Tile(slice(merged[-1].queries.start, tile_queries.stop), merged[-1].keys, False)
        elif before:
            merged.append(Tile(tile_queries, slice(0, before), False))
        if any(first <= start < last for first, last in keys):
            merged.append(Tile(tile_queries, slice(before, before + stop - start), True))
    return merged


def count(runs: Runs) -> int:
    """Return the number of positions in some ranges."""
    return sum(stop - start for start, stop in runs)
