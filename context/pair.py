"""Attention of a part of the queries with a part of the keys: by dense tiles for a plain mask, by blocks for others.

A part is the tokens at some positions of the whole sequence, e.g. the tokens of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import block
from .block_sparse import BlockSparse
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
