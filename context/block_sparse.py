"""Attention by blocks: computes only the blocks of scores that a mask keeps.

Queries and keys are cut into blocks. For each block of queries the kept blocks of keys are listed, and their keys are
gathered side by side. Neighbouring blocks of queries with almost the same list share one, and lists of equal length are
computed together. For both, lists are lengthened, in sum by a fifth at most. Scores that the mask excludes are masked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from . import block
from .mask import Mask, count
from .order import Runs

_BLOCK = 128  # tokens in a block where the mask itself has no blocks
_GATHERED = 2**22  # elements of gathered keys held at a time


class Cut(NamedTuple):
    """Local tokens cut into n blocks of ``size`` tokens."""

    size: int
    positions: Tensor  # int64 (n, size): position of each token, -1 where there is none
    source: Tensor  # int64 (n size,): index of each token among the local ones, ``tokens`` where there is none
    place: Tensor  # int64 (tokens,): inverse of ``source``
    tokens: int  # local tokens without padding

    @property
    def whole(self) -> bool:
        """True if the blocks are the tokens, without gaps."""
        return self.tokens == len(self.source)

    def blocks(self, x: Tensor) -> Tensor:
        """Return local tokens (B, H, T_local, d) in blocks, contiguous (B, H, n, size, d). Gaps are 0."""
        x = x[:, :, : self.tokens]
        if not self.whole:
            padded = torch.cat([x, x.new_zeros(*x.shape[:2], 1, x.shape[3])], 2)
            x = padded.index_select(2, self.source.to(x.device))
        return x.unflatten(2, (-1, self.size)).contiguous()

    def local(self, x: Tensor) -> Tensor:
        """Return blocks (B, H, n, size, ...) as local tokens (B, H, tokens, ...); the inverse of ``blocks``."""
        x = x.flatten(2, 3)
        return x if self.whole else x.index_select(2, self.place.to(x.device))


def cut(runs: Runs, mask: Mask) -> Cut:
    """Cut tokens at the positions ``runs`` into blocks.

    If the mask has blocks, the cuts are at multiples of its block, else blocks are counted from the beginning of each
    run.
    """
    size = mask.block
    if mask.layout is None:
        longest = max(stop - start for start, stop in runs)
        size = -(-longest // -(-longest // _BLOCK))
    pieces = []
    for start, stop in runs:
        first = start - start % size if mask.layout is not None else start
        places = torch.arange(first, first + -(-(stop - first) // size) * size)
        pieces.append(places.masked_fill((places < start) | (places >= stop), -1))
    positions, tokens = torch.cat(pieces), count(runs)
    rows = (positions >= 0).nonzero()[:, 0]
    source = torch.full_like(positions, tokens).index_copy_(0, rows, torch.arange(tokens))
    return Cut(size, positions.view(-1, size), source, rows, tokens)


class BlockGroup(NamedTuple):
    """Blocks of queries that are computed in one call, each with equally many blocks of keys."""

    queries: Tensor  # int64 (R, heads per call, h): rows of the queries' blocks
    keys: Tensor  # int64 (R, key heads per call, M): rows of the keys' blocks
    mask: Tensor | None  # bool (R, 1, h size, M size): what the queries see; None: everything


class Lists(NamedTuple):
    """Lists of kept blocks of keys, each for ``height`` neighbouring blocks of queries."""

    height: int
    unit: Tensor  # int64 (N,): row, or row and head, of the queries
    first: Tensor  # int64 (N,): the first block of queries
    kept: Tensor  # bool (N, nk): blocks that one of the queries' blocks keeps
    lengths: Tensor  # int64 (N,): blocks that are computed, some more than are kept


class BlockSparse:
    """Attention of local queries with local keys by blocks, under a mask.

    Args:
        q: (B, H, T_local, dim), for its sizes.
        k: (B, K, T_local, dim), for its sizes.
        mask: the rule.
        queries, keys: positions of the tokens; not empty.
    """

    def __init__(self, q: Tensor, k: Tensor, mask: Mask, queries: Runs, keys: Runs) -> None:
        self.mask, self.q_cut, self.k_cut = mask, cut(queries, mask), cut(keys, mask)
        self.batch, self.heads, self.key_heads = q.shape[0], q.shape[1], k.shape[1]
        self.per_head = mask.layout is not None and mask.layout.shape[0] > 1
        self.kept = self._kept()  # (B, heads or 1, nq, nk)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """Return output and log-sum-exp of the queries without padding; None if they see no key."""
        if not bool(self.kept.any()):
            return None
        rows_q, rows_k, rows_v = self._rows(self.q_cut, q), self._rows(self.k_cut, k), self._rows(self.k_cut, v)
        out = rows_q.new_zeros(rows_q.shape[0], self.q_cut.size, v.shape[-1])
        lse = rows_q.new_full(out.shape[:2], -torch.inf, dtype=block.accumulation_dtype(q.dtype))
        for group in self._groups(q.device, max(q.shape[-1], v.shape[-1])):
            bias = _bias(group.mask, q.dtype)
            there = group.queries.flatten()
            there_k, there_v = _side(rows_k, group.keys), _side(rows_v, group.keys)
            o, s = block.forward(_side(rows_q, group.queries), there_k, there_v, scale, mask=bias, softcap=softcap)
            out[there], lse[there] = (self._as_rows(self.q_cut, x) for x in (o, s))
        return self._local(out), self._local(lse)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return dq, dk and dv of the tokens without padding; None if the queries see no key."""
        if not bool(self.kept.any()):
            return None
        rows_q, rows_o, rows_do = (self._rows(self.q_cut, x) for x in (q, out, dout))
        rows_l = self._rows(self.q_cut, lse[..., None])[..., 0]
        rows_k, rows_v = self._rows(self.k_cut, k), self._rows(self.k_cut, v)
        wide = block.accumulation_dtype(q.dtype)
        dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (rows_q, rows_k, rows_v))
        for group in self._groups(q.device, max(q.shape[-1], v.shape[-1])):
            do, own_q, o, s = (_side(x, group.queries) for x in (rows_do, rows_q, rows_o, rows_l))
            there_k, there_v = _side(rows_k, group.keys), _side(rows_v, group.keys)
            bias = _bias(group.mask, q.dtype)
            grads = block.backward(do, own_q, there_k, there_v, o, s, scale, mask=bias, softcap=softcap)
            dq[group.queries.flatten()] = self._as_rows(self.q_cut, grads[0].to(wide))
            for total, grad in ((dk, grads[1]), (dv, grads[2])):
                total.index_add_(0, group.keys.flatten(), self._as_rows(self.k_cut, grad.to(wide)))
        return self._local(dq), self._local(dk, keys=True), self._local(dv, keys=True)

    def work(self) -> int:
        """Return the number of scores that are computed, over all rows and heads."""
        blocks = sum(lists.height * int(lists.lengths.sum()) for lists in self._lists())
        return blocks * (1 if self.per_head else self.heads) * self.q_cut.size * self.k_cut.size

    def _rows(self, cut: Cut, x: Tensor) -> Tensor:
        """Return blocks as rows: (B heads n, size, d)."""
        rows: Tensor = rearrange(cut.blocks(x), "b heads n size dim -> (b heads n) size dim")
        return rows

    def _as_rows(self, cut: Cut, x: Tensor) -> Tensor:
        """Return the blocks of a group, which lie behind one another, as rows: (R heads n, size, ...)."""
        rows: Tensor = rearrange(x, "r heads (n size) ... -> (r heads n) size ...", size=cut.size)
        return rows

    def _local(self, rows: Tensor, keys: bool = False) -> Tensor:
        heads = self.key_heads if keys else self.heads
        return (self.k_cut if keys else self.q_cut).local(rows.unflatten(0, (self.batch, heads, -1)))

    def _kept(self) -> Tensor:
        """Return for each block of scores whether it holds a score that the mask keeps: bool (B, heads or 1, nq, nk).

        Documents are compared by the smallest and the largest number in a block, which may keep a block too many.
        """
        mask, empty = self.mask, torch.iinfo(torch.int64).max
        q, k = self.q_cut.positions, self.k_cut.positions
        q_low, k_low = (x.masked_fill(x < 0, empty).amin(1) for x in (q, k))  # each block has a token
        q_high, k_high = q.amax(1), k.amax(1)
        kept = torch.ones(1, 1, len(q), len(k), dtype=torch.bool)
        if mask.causal:
            kept &= k_low <= q_high[:, None]
        if mask.window is not None:
            kept &= (q_low[:, None] - k_high < mask.window) & (k_low - q_high[:, None] < mask.window)
        if mask.layout is not None:
            kept = kept & mask.layout[:, q_low // mask.block][:, :, k_low // mask.block]
        if mask.documents is not None:
            bounds = []
            for x in (q, k):
                numbers, gap = mask.documents.numbers[:, x.clamp(min=0)].long(), x < 0  # (B, n, size)
                bounds += [numbers.masked_fill(gap, empty).amin(2), numbers.masked_fill(gap, -empty).amax(2)]
            q_first, q_last, k_first, k_last = bounds
            meet = (q_first[:, :, None] <= k_last[:, None]) & (k_first[:, None] <= q_last[:, :, None])
            kept = kept & meet[:, None]
        return kept.expand(self.batch, -1, -1, -1)

    def _lists(self) -> Iterator[Lists]:
        """Yield the lists, tall ones first. Neighbours share a list that is an eighth longer than theirs at most."""
        units = self.kept.flatten(0, 1)  # (B or B heads, nq, nk)
        left = units.any(2)
        for height in (8, 4, 2, 1):
            if height > 1 and height * self.q_cut.size > _BLOCK:
                continue
            n = units.shape[1] // height * height
            rows, free = (x[:, :n].unflatten(1, (-1, height)) for x in (units, left))  # (U, n / height, height, ...)
            either = rows.any(2)
            shared = free.all(2) & (8 * height * either.sum(2) <= 9 * rows.sum((2, 3)))
            free[shared] = False  # a view of ``left``
            unit, number = shared.nonzero(as_tuple=True)
            kept = either[unit, number]
            yield Lists(height, unit, number * height, kept, _rounded(kept.sum(1)).clamp(max=units.shape[2]))

    def _groups(self, device: torch.device, dim: int) -> Iterator[BlockGroup]:
        """Yield the blocks of queries that see something, in groups of equally long lists."""
        heads = 1 if self.per_head else self.key_heads
        for lists in self._lists():
            # The kept blocks of keys come first, in order. A list that is too long ends with others, which are masked.
            order = lists.kept.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
            for length in lists.lengths.unique().tolist():
                (chosen,) = (lists.lengths == length).nonzero(as_tuple=True)
                step = max(1, _GATHERED // (length * self.k_cut.size * dim * heads))
                for some in chosen.split(step):
                    yield self._group(lists, some, order[some, :length], device)

    def _group(self, lists: Lists, chosen: Tensor, columns: Tensor, device: torch.device) -> BlockGroup:
        nq, nk = self.kept.shape[2:]
        unit, row = lists.unit[chosen], lists.first[chosen, None] + torch.arange(lists.height)  # (R,), (R, h)
        if self.per_head:
            rows = unit // self.heads
            heads = (unit % self.heads)[:, None]
            key_heads = heads // (self.heads // self.key_heads)
        else:
            rows, heads, key_heads = unit, torch.arange(self.heads)[None], torch.arange(self.key_heads)[None]
        queries = ((rows[:, None] * self.heads + heads) * nq)[:, :, None] + row[:, None]
        keys = ((rows[:, None] * self.key_heads + key_heads) * nk)[:, :, None] + columns[:, None]
        own_positions, places = self.q_cut.positions[row].flatten(1).to(device), self.k_cut.positions[columns]
        surplus = torch.arange(columns.shape[1]) >= lists.kept[chosen].sum(1)[:, None]
        places = places.masked_fill(surplus[:, :, None], -1).flatten(1).to(device)
        seen = self.mask.allowed(own_positions, places, rows)
        if lists.height > 1 and self.mask.layout is not None:
            kept = self.kept.flatten(0, 1)[unit[:, None, None], row[:, :, None], columns[:, None]].to(
                device
            )  # (R, h, M)
            cells = seen.unflatten(2, (-1, self.k_cut.size)).unflatten(1, (-1, self.q_cut.size))
            cells &= kept[:, :, None, :, None]
        # Gaps among the queries: their outputs are dropped.
        everything = bool((seen | (own_positions < 0)[:, :, None]).all())
        return BlockGroup(queries.to(device), keys.to(device), None if everything else seen[:, None])


def _side(rows: Tensor, index: Tensor) -> Tensor:
    """Return blocks side by side: (R, heads, M size, ...) from rows and their indices (R, heads, M)."""
    return rows[index].flatten(2, 3)


def _bias(seen: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if seen is None:
        return None
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


def _rounded(counts: Tensor) -> Tensor:
    """Round lengths up to five significant bits, so that there are few different ones."""
    unit = 2.0 ** (counts.clamp(min=1).double().log2().floor() - 4).clamp(min=0)
    return (counts / unit).ceil().mul(unit).long()
