"""Attention of a part of the queries with a part of the keys: by dense tiles for a plain mask, by blocks for others.

A part is the tokens at some positions of the whole sequence, e.g. the tokens of one rank. If rows hold documents, each
piece of a document (documents.py) is a part of its own.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import block
from .block_sparse import BlockSparse
from .documents import Rectangle, Squares
from .mask import Mask, tiles
from .order import Runs


@dataclass(frozen=True, eq=False)
class Queries:
    """The queries of a part, and what their backward pass needs.

    Attributes:
        q: (B, H, T_local, dim); the tokens at ``runs`` come first, then padding.
        runs: positions of the tokens.
        mask: the rule by which they see keys.
        scores: factor and cap of their scores.
    """

    q: Tensor
    runs: Runs
    mask: Mask
    scores: block.Scores

    def forward(self, total: block.Merged, k: Tensor, v: Tensor, keys: Runs) -> None:
        """Merge the attention of a part of the keys, (B, K, n, dim) at the positions ``keys``, into ``total``."""
        if not self.runs or not keys:
            return
        if self.mask.documents is not None:
            self._forward_documents(total, k, v, keys)
            return
        if not self.mask.plain:
            output = BlockSparse(self.q, k, self.mask, self.runs, keys).forward(self.q, k, v, *self.scores)
            if output is not None:
                total.add(slice(0, output[0].shape[2]), *output)
            return
        for tile in tiles(self.runs, keys, self.mask.causal):
            there = self.q[:, :, tile.queries], k[:, :, tile.keys], v[:, :, tile.keys]
            total.add(tile.queries, *block.forward(*there, self.scores.scale, tile.causal, softcap=self.scores.softcap))

    def backward(
        self, dout: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, keys: Runs, grads: Gradients
    ) -> None:
        """Add a part of the keys' parts of the gradients to ``grads``.

        Args:
            dout: gradient of ``out``.
            out: the merged output of all keys, (B, H, T_local, width).
            lse: its log-sum-exp, 0 where a query sees no key.
            k, v, keys: as for ``forward``.
            grads: the sums.
        """
        if not self.runs or not keys:
            return
        if self.mask.documents is not None:
            self._backward_documents(dout, out, lse, k, v, keys, grads)
            return
        if not self.mask.plain:
            pair = BlockSparse(self.q, k, self.mask, self.runs, keys)
            gradients = pair.backward(dout, self.q, k, v, out, lse, *self.scores)
            if gradients is not None:
                grads.add(slice(0, gradients[0].shape[2]), slice(0, gradients[1].shape[2]), *gradients)
            return
        for tile in tiles(self.runs, keys, self.mask.causal):
            do, q, o, s = (x[:, :, tile.queries] for x in (dout, self.q, out, lse))
            there = k[:, :, tile.keys], v[:, :, tile.keys]
            gradients = block.backward(do, q, *there, o, s, self.scores.scale, tile.causal, softcap=self.scores.softcap)
            grads.add(tile.queries, tile.keys, *gradients)

    def _forward_documents(self, total: block.Merged, k: Tensor, v: Tensor, keys: Runs) -> None:
        squares, rectangles = self._pieces(k, keys)
        if squares:
            rows_q, rows_k, rows_v = (_rows(x) for x in (self.q, k, v))
            out, lse = torch.zeros_like(_rows(total.out)), torch.full_like(_rows(total.lse), -torch.inf)
            for piece in squares:
                q, own_k, own_v = _take(rows_q, piece.queries), _take(rows_k, piece.keys), _take(rows_v, piece.keys)
                part, runs = block.Merged((*q.shape[:3], v.shape[3]), q), ((0, q.shape[2]),)
                self._in_document(q, runs, runs).forward(part, own_k, own_v, runs)
                for sums, own in ((out, part.out), (lse, part.lse)):
                    _put(sums, piece, own)
            total.add(slice(None), _by_heads(out, len(k)), _by_heads(lse, len(k)))
        for there in rectangles:
            part = total.part(there.row, there.queries)
            own_k, own_v = (x[there.row, :, there.keys] for x in (k, v))
            q = self.q[there.row, :, there.queries]
            self._in_document(q, there.query_runs, there.key_runs).forward(part, own_k, own_v, there.key_runs)

    def _backward_documents(
        self, dout: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, keys: Runs, grads: Gradients
    ) -> None:
        squares, rectangles = self._pieces(k, keys)
        if squares:
            rows = [_rows(x) for x in (dout, out, lse, self.q)]
            rows_k, rows_v = _rows(k), _rows(v)
            dq, dk, dv = (torch.zeros_like(_rows(x)) for x in (grads.dq, grads.dk, grads.dv))
            for piece in squares:
                do, o, s, q = (_take(x, piece.queries) for x in rows)
                if piece.padded is not None:
                    do = do.masked_fill(piece.padded[:, None, :, None], 0)  # so that padding has no gradient
                own_k, own_v, runs = _take(rows_k, piece.keys), _take(rows_v, piece.keys), ((0, q.shape[2]),)
                part = Gradients(q, own_k, own_v)
                self._in_document(q, runs, runs).backward(do, o, s, own_k, own_v, runs, part)
                sums = (dq, piece.queries, part.dq), (dk, piece.keys, part.dk), (dv, piece.keys, part.dv)
                for total, places, own in sums:
                    total.index_add_(0, places.flatten(), _rows(own))
            grads.add(slice(None), slice(None), *(_by_heads(x, len(k)) for x in (dq, dk, dv)))
        for there in rectangles:
            do, o, s, q = (x[there.row, :, there.queries] for x in (dout, out, lse, self.q))
            own_k, own_v = (x[there.row, :, there.keys] for x in (k, v))
            part = grads.part(there.row, there.queries, there.keys)
            self._in_document(q, there.query_runs, there.key_runs).backward(
                do, o, s, own_k, own_v, there.key_runs, part
            )

    def _pieces(self, k: Tensor, keys: Runs) -> tuple[list[Squares], list[Rectangle]]:
        mask, tokens = self.mask, (self.q.shape[2], k.shape[2])
        assert mask.documents is not None
        return mask.documents.pieces(self.runs, keys, tokens, mask.causal, mask.layout is not None, self.q.device)

    def _in_document(self, q: Tensor, runs: Runs, keys: Runs) -> Queries:
        """Return the queries of a piece, all of whose tokens lie in one document."""
        window = self.mask.window
        reach = max(runs[-1][1], keys[-1][1]) - min(runs[0][0], keys[0][0])
        if window is not None and reach <= window:
            window = None
        return Queries(q, runs, replace(self.mask, documents=None, window=window), self.scores)


class Gradients:
    """Sums of dq, dk and dv, in ``accumulation_dtype``.

    Args:
        q, k, v: tensors whose shapes the sums have.

    Attributes:
        dq: (B, H, T_local, dim).
        flat: dk and dv in one flat tensor, to be sent.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.dtype = block.accumulation_dtype(q.dtype)
        self.dq = torch.zeros(q.shape, dtype=self.dtype, device=q.device)
        self.begin(k, v)

    def begin(self, k: Tensor, v: Tensor) -> None:
        """Begin new sums of dk and dv, for other keys."""
        self.flat = torch.zeros(k.numel() + v.numel(), dtype=self.dtype, device=k.device)
        self.dk, self.dv = unpack(self.flat, k, v)

    def part(self, row: slice, queries: slice, keys: slice) -> Gradients:
        """Return a view of some rows' sums, for some of the queries and keys."""
        view = copy.copy(self)
        view.dq, view.dk, view.dv = self.dq[row, :, queries], self.dk[row, :, keys], self.dv[row, :, keys]
        return view

    def add(self, queries: slice, keys: slice, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Add the gradients of some queries and keys."""
        self.dq[:, :, queries] += dq
        self.dk[:, :, keys] += dk
        self.dv[:, :, keys] += dv


def pack(k: Tensor, v: Tensor) -> Tensor:
    """Return k and v as one flat tensor, to be sent in one message."""
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def unpack(flat: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of a flat tensor in the shapes of k and v. The inverse of ``pack``."""
    first, second = flat.split([k.numel(), v.numel()])
    return first.view(k.shape), second.view(v.shape)


def _rows(x: Tensor) -> Tensor:
    """Return the tokens of all rows, one after another: (B, H, T, ...) -> (B T, H, ...)."""
    return x.transpose(1, 2).flatten(0, 1)


def _by_heads(rows: Tensor, batch: int) -> Tensor:
    """Return (B T, H, ...) as (B, H, T, ...), a view. The inverse of ``_rows``."""
    return rows.unflatten(0, (batch, -1)).transpose(1, 2)


def _take(rows: Tensor, places: Tensor) -> Tensor:
    """Return the tokens at some places: (N, H, L, ...) from rows (B T, H, ...) and places (N, L)."""
    return _by_heads(rows.index_select(0, places.flatten()), len(places))


def _put(rows: Tensor, squares: Squares, value: Tensor) -> None:
    """Write the outputs of squares, (N, H, L, ...), into rows (B T, H, ...), without their padding."""
    places, tokens = squares.queries.flatten(), _rows(value)
    if squares.padded is not None:
        (held,) = (~squares.padded.flatten()).nonzero(as_tuple=True)
        places, tokens = places[held], tokens.index_select(0, held)
    rows.index_copy_(0, places, tokens)
