"""Rows of packed documents: the order of rows in each epoch, and the tokens, labels and documents of each row.

Two ways to fill rows of T tokens:

cut     Documents follow one another in an order drawn for each epoch, and are cut into rows. One that reaches the end
        of a row goes on in the next row, as another document. Nothing is padded but the end of the last row. The rows
        then come in a drawn order too, so that the rows of a long document do not all fall in one batch.
whole   No document is cut, unless it is longer than a row: rows are filled by best fit decreasing, once, and padded at
        their ends. An epoch draws the order of the rows.

In both, an epoch has every token of every document once, as an input. The number of rows is the same in each epoch, so
row n of the run is row n mod R of epoch n div R. Orders depend on (seed, epoch) alone: they are sorted hashes, equal on
every machine and with every version of numpy and torch.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..base.errors import CorruptError
from ..base.seeds import derive
from .token_file import Array
from .token_folder import TokenFolder

IGNORED = -100  # label of a token that no token follows, or that does not count
PACKINGS = ("cut", "whole")


class _Epoch(NamedTuple):
    """Order of one epoch: the pieces of documents, and which of them each row has."""

    order: Array  # (pieces,): numbers of pieces in the order of the epoch
    ends: Array  # (pieces,): cut: token of the epoch at which each of them ends; whole: unused
    rows: Array  # whole: (rows + 1,), first of ``order`` in each row; cut: empty


class Pieces(NamedTuple):
    """Pieces of documents that fill some rows, one after another: (n,) each."""

    file: Array  # number of the file; padding: the number of files
    number: Array  # within the row
    start: Array  # first token, through all folders
    stop: Array  # its end
    last: Array  # end of its document; padding: 0

    @property
    def sizes(self) -> Array:
        """Tokens of each piece."""
        return self.stop - self.start


class DocumentRows:
    """Rows of the documents of one or more folders, endlessly, epoch after epoch.

    Args:
        folders: the folders, whose documents count as one set.
        chosen: for each folder the numbers of its documents that are used.
        length: T, the number of tokens in a row.
        seed: seed of the orders; None: the documents' own order, in each epoch.
        packing: ``cut`` or ``whole``.

    Attributes:
        count: R, the number of rows in an epoch.
        documents, tokens: numbers of documents and tokens in an epoch.
    """

    def __init__(
        self, folders: Sequence[TokenFolder], chosen: Sequence[Array], length: int, seed: int | None, packing: str
    ) -> None:
        self._folders, self.length, self._seed = folders, length, seed
        self._files = [(folder, number, file) for folder in folders for number, file in enumerate(folder.files)]
        self._tokens = [file.tokens for _, _, file in self._files]
        self._first = np.cumsum([0, *map(len, self._tokens)])  # first token of each file, through all folders
        self._tokens.append(np.zeros(length, self._tokens[0].dtype))  # padding
        self._is_chat = any(file.counted is not None for _, _, file in self._files)
        self._counted: list[Any] = []  # of conversations; text counts everywhere
        if self._is_chat:
            ones = np.broadcast_to(np.uint8(1), max(map(len, self._tokens)))
            self._counted = [ones if file.counted is None else file.counted for _, _, file in self._files] + [ones]
        self._largest = [folder.index.files[number].largest for folder, number, _ in self._files]
        self._most = max(self._largest)
        bases = np.cumsum([0, *(folder.index.tokens for folder in folders)])
        starts, stops = [], []
        for folder, base, numbers in zip(folders, bases, chosen, strict=False):
            starts.append(folder.starts[numbers] + base)
            stops.append(folder.starts[numbers + 1] + base)
        self._starts, self._stops = np.concatenate(starts), np.concatenate(stops)  # of pieces
        self._last = self._stops  # end of each piece's document
        self.documents = len(self._starts)
        self.tokens = int((self._stops - self._starts).sum())
        self._epochs: dict[int, _Epoch] = {}
        self._lock = threading.Lock()
        if packing == "whole":
            self._split_long()
            sizes, order = self._stops - self._starts, self._order("packing", len(self._starts))
            self._bin_rows, self._bin_order = best_fit(sizes, order, length)
            self.count = len(self._bin_rows) - 1
        else:
            self._bin_rows = self._bin_order = np.empty(0, np.int64)
            self.count = -(-self.tokens // length)

    def fill(self, rows: Array, slots: Array, ids: Array, labels: Array, documents: Array | None) -> None:
        """Write rows into a batch, int64 (B, T) each.

        Args:
            rows: numbers of the rows, from the beginning of the run, in increasing order: (n,).
            slots: where in the batch each of them goes, in increasing order: (n,).
            ids: the tokens; padding is 0.
            labels: for each token the next one of its document, even if that is in another row; ``IGNORED`` for the
                last token of a document, for padding, and where the next token does not count in the loss.
            documents: number of the document within the row; padding is a document of its own. None: not wanted.

        Raises:
            CorruptError: a file has a token that the index does not state.
        """
        pieces = self.pieces(rows)
        tokens, follow = self.read(pieces)
        where: Any = slice(slots[0], slots[-1] + 1) if slots[-1] - slots[0] < len(slots) else slots
        ids[where] = tokens.reshape(-1, self.length)
        labels[where] = follow.reshape(-1, self.length)
        if documents is not None:
            documents[where] = np.repeat(pieces.number, pieces.sizes).reshape(-1, self.length)

    def pieces(self, rows: Array) -> Pieces:
        """Return the pieces of documents, and of padding, of rows of the run, in increasing order: (n,)."""
        epochs = rows // self.count
        found = []
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            first, stop = np.searchsorted(epochs, (epoch, epoch + 1))
            if first < stop:
                found.append(self._pieces(epoch, self.places(epoch, rows[first:stop] - epoch * self.count)))
        return found[0] if len(found) == 1 else Pieces(*map(np.concatenate, zip(*found, strict=True)))

    def read(self, pieces: Pieces) -> tuple[Array, Array]:
        """Return the tokens of pieces, one after another, and their labels: (tokens,) each.

        Raises:
            CorruptError: a file has a token that the index does not state.
        """
        sizes = pieces.sizes
        ends = np.cumsum(sizes)
        begins = pieces.start - self._first[pieces.file]
        for number in {*pieces.file.tolist()} - {len(self._files)}:
            self._files[number][2].require_whole()
        copies = [*zip(pieces.file.tolist(), begins.tolist(), (begins + sizes).tolist(), strict=True)]
        tokens = np.concatenate([self._tokens[file][begin:end] for file, begin, end in copies])  # (n * T,)
        if tokens.max() > self._most:
            self._find_damage(pieces)
        follow = np.empty(len(tokens), np.int64)
        follow[:-1] = tokens[1:]
        if self._is_chat:
            counted = np.concatenate([self._counted[file][begin:end] for file, begin, end in copies])
            follow[:-1][counted[1:] == 0] = IGNORED
        follow[ends - 1] = IGNORED
        padding = len(self._files)
        for piece in np.flatnonzero((pieces.stop < pieces.last) | (pieces.file == padding)).tolist():
            file, _, after = copies[piece]
            end = int(ends[piece])
            if file == padding:
                follow[end - int(sizes[piece]) : end] = IGNORED
            elif not self._is_chat or self._counted[file][after]:  # the document goes on in another row
                follow[end - 1] = self._tokens[file][after]
        return tokens, follow

    def places(self, epoch: int, rows: Array) -> Array:
        """Return, for numbers of rows in an epoch, their places among the rows as they were filled: (n,)."""
        if self._seed is None or len(self._bin_rows):  # packed whole, their order is drawn when they are filled
            return rows
        return permute(rows, self.count, derive(self._seed, "rows", epoch))

    def _pieces(self, epoch: int, rows: Array) -> Pieces:
        """Return the pieces of documents, and of padding, that fill rows of an epoch, by their places."""
        order, ends, bounds = self._epoch(epoch)
        if len(bounds):
            low, high = bounds[rows], bounds[rows + 1]
        else:
            begin = rows * self.length
            end = np.minimum(begin + self.length, self.tokens)
            low, high = np.searchsorted(ends, begin, "right"), np.searchsorted(ends, end, "left") + 1
        counts = high - low
        after = np.cumsum(counts)  # of each row
        row = np.repeat(np.arange(len(rows)), counts)
        number = np.arange(len(row)) - (after - counts)[row]
        places = low[row] + number
        piece = order[places]
        start, stop, last = self._starts[piece], self._stops[piece], self._last[piece]
        if not len(bounds):
            start = np.maximum(start, last - (ends[places] - begin[row]))
            stop = np.minimum(last, last - (ends[places] - end[row]))
        file = np.searchsorted(self._first, start, "right") - 1
        missing = self.length - np.add.reduceat(stop - start, after - counts)
        if missing.any():
            short = np.flatnonzero(missing)
            at, first = after[short], self._first[-1]
            file, number = np.insert(file, at, len(self._files)), np.insert(number, at, counts[short])
            start, stop = np.insert(start, at, first), np.insert(stop, at, first + missing[short])
            last = np.insert(last, at, 0)
        return Pieces(file, number, start, stop, last)

    def _epoch(self, epoch: int) -> _Epoch:
        with self._lock:
            if epoch not in self._epochs:
                kept = {number: epoch_rows for number, epoch_rows in self._epochs.items() if number == epoch - 1}
                self._epochs = {**kept, epoch: self._draw(epoch)}
            return self._epochs[epoch]

    def _draw(self, epoch: int) -> _Epoch:
        if len(self._bin_rows):
            rows = self._order(epoch, self.count)
            sizes = np.diff(self._bin_rows)[rows]
            firsts = np.cumsum([0, *sizes])
            inside = np.arange(firsts[-1]) - np.repeat(firsts[:-1], sizes)
            return _Epoch(self._bin_order[np.repeat(self._bin_rows[rows], sizes) + inside], rows, firsts)
        order = self._order(epoch, self.documents)
        return _Epoch(order, np.cumsum((self._stops - self._starts)[order]), np.empty(0, np.int64))

    def _order(self, epoch: int | str, count: int) -> Array:
        if self._seed is None:
            return np.arange(count)
        return np.argsort(hashes(derive(self._seed, "data", epoch), count), kind="stable")

    def _split_long(self) -> None:
        """Cut documents that are longer than a row into pieces of a row."""
        counts = -(-(self._stops - self._starts) // self.length)
        piece = np.repeat(np.arange(len(counts)), counts)
        inside = np.arange(len(piece)) - np.repeat(np.cumsum(counts) - counts, counts)
        self._last = self._stops[piece]
        self._starts = self._starts[piece] + inside * self.length
        self._stops = np.minimum(self._starts + self.length, self._last)

    def _find_damage(self, pieces: Pieces) -> None:
        """Raise the error about the document that has a token which the index does not state."""
        for number, start, stop in zip(pieces.file.tolist(), pieces.start.tolist(), pieces.stop.tolist(), strict=True):
            if number == len(self._files):
                continue
            folder, file, _ = self._files[number]
            first = int(self._first[number])
            token, stated = int(self._tokens[number][start - first : stop - first].max()), self._largest[number]
            if token > stated:
                document = folder.document_of(start - first + int(folder.first_token[file]))
                raise CorruptError(
                    f"{folder.path} is damaged: document {document} ({folder.origin(document)}) has the token {token}, "
                    f"but the index states {stated} as the largest. Run triax data verify {folder.path}."
                )


def hashes(seed: int, count: int) -> Array:
    """Return a hash of (seed, i) for each i below ``count``: SplitMix64 (Steele et al. 2014), uint64 (count,)."""
    with np.errstate(over="ignore"):
        return _mix(np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_STEP) + np.uint64(seed))


_STEP = 0x9E3779B97F4A7C15


def _mix(x: Array) -> Array:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    return x ^ (x >> np.uint64(31))


def permute(numbers: Array, count: int, seed: int) -> Array:
    """Return where a permutation of 0..count-1 that depends on the seed takes numbers, in increasing order: (n,).

    No whole table is kept, since an epoch may have billions of rows: the permutation is a Feistel network of four
    rounds (Luby and Rackoff 1988) on pairs of numbers below the square root of ``count``, and a result that is not
    below ``count`` goes through it again (Black and Rogaway 2002). 4,096 numbers are permuted at once.
    """
    blocks, inside = np.divmod(numbers, _BLOCK)
    parts = range(int(blocks[0]), int(blocks[-1]) + 1)
    return np.concatenate([_permuted(part, count, seed)[inside[blocks == part]] for part in parts])


_BLOCK = 4096


@functools.lru_cache(maxsize=16)
def _permuted(block: int, count: int, seed: int) -> Array:
    """Return where the permutation takes the numbers of a block: int64 (at most _BLOCK,)."""
    side = np.uint64(math.isqrt(count - 1) + 1)
    keys = [*hashes(seed, 4)]

    def network(x: Any) -> Any:
        left, right = x // side, x % side
        with np.errstate(over="ignore"):
            for key in keys:
                left, right = right, (left + _mix(right + key) % side) % side
        return left * side + right

    images = network(np.arange(block * _BLOCK, min((block + 1) * _BLOCK, count), dtype=np.uint64))
    while len(outside := np.flatnonzero(images >= count)):
        images[outside] = network(images[outside])
    return images.astype(np.int64)


def best_fit(lengths: Array, order: Array, room: int) -> tuple[Array, Array]:
    """Pack pieces into rows by best fit decreasing: the longest first, each into the fullest row that has room for it.

    All pieces of one length, and all rows with one room, are treated at once.

    Args:
        lengths: (n,), from 1 to ``room``.
        order: (n,), a permutation: the order among pieces of equal length.
        room: tokens in a row.

    Returns:
        (rows + 1,), first piece of each row; and the pieces in the order of the rows, (n,).
    """
    by_length = order[np.argsort(-lengths[order], kind="stable")]
    distinct, counts = np.unique(lengths, return_counts=True)
    open_rows: dict[int, list[Array]] = {}  # room that is left -> rows
    rooms = 0  # bit r is set if ``open_rows`` has r
    chosen = np.empty(len(lengths), np.int64)  # row of each of ``by_length``
    rows = at = 0
    for length, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        stop = at + count
        while at < stop:
            if fitting := rooms >> length:
                left = length + (fitting & -fitting).bit_length() - 1
                rows_found = np.concatenate(open_rows.pop(left))
                rooms ^= 1 << left
                taken, kept = rows_found[: stop - at], rows_found[stop - at :]
                if len(kept):
                    open_rows[left] = [kept]
                    rooms |= 1 << left
                per_row = 1
            else:
                per_row = min(room // length, stop - at)  # pieces that a new row takes of this length
                left = room
                taken = np.arange(rows, rows + (stop - at) // per_row)
                rows += len(taken)
            chosen[at : at + len(taken) * per_row] = np.repeat(taken, per_row)
            at += len(taken) * per_row
            left -= length * per_row
            if left:
                open_rows.setdefault(left, []).append(taken)
                rooms |= 1 << left
    by_row = np.argsort(chosen, kind="stable")
    return np.concatenate([[0], np.cumsum(np.bincount(chosen, minlength=rows))]), by_length[by_row]
