"""Documents of packed rows: a token attends within its document only, and no mask of T x T numbers is made.

Documents cut the matrix of scores into pieces, each of which follows the rest of the rule alone:

    one row, three documents, causal         squares: a document, or a rank's part of one. Squares of about equal size
        X . . . . . .                        are computed in one call: they are padded at the end with keys that no
        X X . . . . .                        query of a document sees.
        . . X . . . .
        . . X X . . .                        rectangles: queries of a part whose document began in an earlier part (of
        . . X X X . .                        the context axis, or slice of a pipeline), with its earlier keys: one at
        . . . . . X .                        most for each row and range of queries.
        . . . . . X X
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .order import Runs, count, within

_ATTRIBUTE = "triax_documents"  # on the tensor of document numbers, so that all layers cut the documents once
_STEP = 16  # lengths of squares that share a call differ by less than this, or by an eighth


class Squares(NamedTuple):
    """N squares of scores, computed in one call."""

    queries: Tensor  # int64 (N, L): places of the queries in the flat rows (B T_queries)
    keys: Tensor  # int64 (N, L): places of the keys in the flat rows (B T_keys)
    padded: Tensor | None  # bool (N, L): places behind the end of a shorter square; None: all have the length L


class Rectangle(NamedTuple):
    """Queries of one document in one row, and keys of this document."""

    row: slice
    queries: slice  # among the part's queries
    keys: slice  # among the part's keys
    query_runs: Runs  # their positions in the row
    key_runs: Runs


class Documents:
    """Ranges of the documents of packed rows.

    Args:
        numbers: document number of each token, integers (B, T), on the CPU.

    Attributes:
        rows, starts, stops: row, first position and end of each document, int64 (n,) each.
        longest: tokens of the longest document.

    Raises:
        ValueError: the numbers decrease along a row.
    """

    def __init__(self, numbers: Tensor) -> None:
        if bool((numbers[:, 1:] < numbers[:, :-1]).any()):
            raise ValueError(
                "the numbers of documents decrease along a row. Number the documents of a row 0, 1, 2, ... in order."
            )
        rows, length = numbers.shape
        first = begins(numbers).flatten().nonzero()[:, 0]
        self.rows, self.starts = first // length, first % length
        self.stops = torch.cat([first[1:], first.new_tensor([rows * length])]) - self.rows * length
        self.longest = int((self.stops - self.starts).max())
        self._pieces: dict[Any, tuple[list[Squares], list[Rectangle]]] = {}

    def pieces(
        self, queries: Runs, keys: Runs, tokens: tuple[int, int], causal: bool, apart: bool, device: torch.device
    ) -> tuple[list[Squares], list[Rectangle]]:
        """Return the pieces of scores of some queries with some keys.

        Args:
            queries, keys: positions of the tokens. A run of queries lies in one run of keys, or has no position in
                common with any.
            tokens: queries and keys that a row holds, padding included.
            causal: a token sees itself and earlier tokens only.
            apart: every piece is a rectangle, because the rule depends on the position in the row.
            device: device of the places.
        """
        key = (queries, keys, tokens, causal, apart, device)
        if key not in self._pieces:
            together = causal and not apart
            squares = self._squares(queries, keys, tokens, device) if together else []
            self._pieces[key] = squares, list(self._rectangles(queries, keys, together))
        return self._pieces[key]

    def _squares(self, queries: Runs, keys: Runs, tokens: tuple[int, int], device: torch.device) -> list[Squares]:
        found = []
        for start, stop in queries:
            if any(first <= start < last for first, last in keys):
                low, high = self.starts.clamp(min=start), self.stops.clamp(max=stop)
                held = low < high
                rows, low, high = self.rows[held], low[held], high[held]
                first_query = rows * tokens[0] + _places(queries, low)
                found.append(torch.stack([first_query, rows * tokens[1] + _places(keys, low), high - low]))
        if not found:
            return []
        first_query, first_key, length = torch.cat(found, 1)
        step = (2.0 ** (length.double().log2().floor() - 3)).long().clamp(min=_STEP)
        size = (length + step - 1) // step * step
        squares = []
        for chosen in (size == value for value in size.unique()):
            lengths = length[chosen]
            offsets = torch.arange(int(lengths.max()))
            padded = offsets >= lengths[:, None]
            # Padding repeats the last token, so that the places exist.
            offsets = offsets.minimum(lengths[:, None] - 1)
            places = (first[chosen][:, None] + offsets for first in (first_query, first_key))
            squares.append(Squares(*(x.to(device) for x in places), padded.to(device) if padded.any() else None))
        return squares

    def _rectangles(self, queries: Runs, keys: Runs, together: bool) -> Iterator[Rectangle]:
        for start, stop in queries:
            held = (self.starts < stop) & (self.stops > start)
            if together:
                held &= self.starts < start  # the others are squares
            for row, first, last in torch.stack([self.rows, self.starts, self.stops])[:, held].T.tolist():
                own = ((max(first, start), min(last, stop)),)
                seen = within(keys, first, start if together else last)
                if seen:
                    places = (
                        slice(count(within(side, 0, runs[0][0])), count(within(side, 0, runs[-1][1])))
                        for side, runs in ((queries, own), (keys, seen))
                    )
                    yield Rectangle(slice(row, row + 1), *places, own, seen)


def documents_of(numbers: Tensor | None) -> Documents | None:
    """Return the documents of packed rows, or None if each row is one document. Cached on the tensor ``numbers``."""
    if numbers is None:
        return None
    version = None if numbers.is_inference() else numbers._version  # tensors of inference mode count no versions
    cached: tuple[Any, Documents | None] = getattr(numbers, _ATTRIBUTE, (None, None))
    if version is not None and cached[0] == version:
        return cached[1]
    on_cpu = numbers.detach().cpu()
    documents = None if bool((on_cpu == on_cpu[:, :1]).all()) else Documents(on_cpu)
    setattr(numbers, _ATTRIBUTE, (version, documents))
    return documents


def begins(numbers: Tensor) -> Tensor:
    """Return which tokens are the first of a document: bool (B, T)."""
    first = torch.ones_like(numbers, dtype=torch.bool)
    first[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    return first


def positions_within(numbers: Tensor) -> Tensor:
    """Return each token's position within its document, which starts at 0: int64 (B, T)."""
    places = torch.arange(numbers.shape[1], device=numbers.device).expand(numbers.shape)
    return places - places.masked_fill(~begins(numbers), 0).cummax(dim=1).values


def _places(runs: Runs, positions: Tensor) -> Tensor:
    """Return how many tokens of some ranges lie before each position."""
    return sum((positions.clamp(start, stop) - start for start, stop in runs), torch.zeros_like(positions))
