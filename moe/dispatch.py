"""Dispatch: tokens to the ranks of their experts and back, over the expert axis.

tokens (N, D), experts (N, k)
    sort the pairs (token, expert) by expert        stable: within an expert in the order of the tokens
    all-to-all of the counts, then of the rows      uneven; nothing at expert=1
    sort the received rows by expert                within an expert by the rank that sent them
    experts
    the same way back, then a weighted sum over k   in the original order of k

If experts are lent (``lending.py``), each rank gathers the counts of all, and the rows of an expert go to one rank or
several: pairs are sorted by the rank that computes them, too, and rows by this rank's experts and the borrowed ones.

Gradients go the same ways. No sum depends on the order in which messages arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..grid.comm.axis import Axis
from ..grid.ranges import split
from .grouped import Groups
from .lending import Assignment, Loan


class Dispatch:
    """Way of this rank's tokens to their experts and back. Collective over the axis.

    Args:
        experts: int64 (N, k), the experts of each token; ``count`` means none.
        count: E, the number of experts.
        axis: the expert axis, whose rank r holds experts r E / size to (r + 1) E / size - 1.
        complete: True if every entry of ``experts`` is an expert. (A GPU then need not be waited for.)
        lend: largest number of experts that a rank borrows.

    Attributes:
        groups: numbers of rows of each of this rank's experts, and of the borrowed ones.
    """

    def __init__(self, experts: Tensor, count: int, axis: Axis, complete: bool = False, lend: int = 0) -> None:
        self._axis, (self._tokens, self._k) = axis, experts.shape
        flat = experts.flatten()
        counts = torch.zeros(count + 1, dtype=torch.int64, device=flat.device)
        counts, known = counts.scatter_add_(0, flat, torch.ones_like(flat))[:count], None
        if flat.is_meta:  # a dry run: each expert is given as many
            spans = [split(flat.numel(), count, expert) for expert in range(count)]
            known = [stop - start for start, stop in spans]
            counts = torch.tensor(known, device=flat.device)
        order = flat.argsort(stable=True)  # entries without an expert come last
        if lend and axis.size > 1:
            self._lend(order, counts, lend)
            return
        self._pairs = order if complete else order[: int(counts.sum())]
        self._receive, self._send, self._order = [0], [0], None
        if axis.size == 1:
            self.groups = Groups(counts, known)
            return
        sent = counts.view(axis.size, -1).contiguous()  # (ranks, E / size)
        received = torch.empty_like(sent)
        axis.all_to_all(received, sent)
        leaving, table = torch.stack([sent, received]).tolist()  # on a GPU it waits for the device, once
        self._send, self._receive = [sum(row) for row in leaving], [sum(row) for row in table]
        lengths = [sum(column) for column in zip(*table, strict=True)]
        self.groups = Groups(received.sum(0), lengths)
        # The expert of each received row, which come rank by rank and expert by expert.
        ids = torch.arange(sent.shape[1], device=flat.device).repeat(axis.size)
        self._order = ids.repeat_interleave(received.flatten(), output_size=sum(lengths)).argsort(stable=True)

    def _lend(self, order: Tensor, counts: Tensor, slots: int) -> None:
        """Lend experts: the rows of an expert go to several ranks.

        Args:
            order: (pairs,), the pairs sorted by expert, with those that have no expert last.
            counts: (E,), this rank's tokens of each expert.
            slots: largest number of experts that a rank borrows.
        """
        axis, (count,), device = self._axis, counts.shape, counts.device
        table = counts.new_empty(axis.size * count)
        axis.all_gather(table, counts.contiguous())
        if table.is_meta:  # a dry run: all ranks give each expert as many tokens, and nothing is lent
            table = counts.repeat(axis.size)
        host = table.cpu().numpy().reshape(axis.size, count)  # on a GPU it waits for the device, once
        plan = Assignment(host, axis.rank, 0 if table.is_meta else slots)
        self._send, self._receive = plan.leaving.sum(1).tolist(), plan.arriving.sum(1).tolist()
        numbers = [plan.leaving.T.ravel(), plan.arriving.ravel(), np.array(plan.lengths)]
        sizes = [len(each) for each in numbers]
        packed = torch.from_numpy(np.concatenate(numbers)).to(device, non_blocking=True)
        leaving, arriving, lengths = packed.split(sizes)
        own = count // axis.size
        self.groups = Groups(lengths, plan.lengths, Loan(axis, plan.borrowed, own, slots))
        # The rank that computes each pair, and the expert of each received row: its number from this rank's first on.
        to = torch.arange(axis.size, device=device).repeat(count)
        to = to.repeat_interleave(leaving, output_size=sum(self._send))
        self._pairs = order[: sum(self._send)].index_select(0, to.argsort(stable=True))
        ids = torch.arange(count, device=device).roll(axis.rank * own).repeat(axis.size)
        self._order = ids.repeat_interleave(arriving, output_size=sum(plan.lengths)).argsort(stable=True)

    def scatter(self, x: Tensor) -> Tensor:
        """Return the rows of this rank's experts, sorted by expert: (rows, D) from this rank's tokens (N, D)."""
        rows: Tensor = _PickRows.apply(x, self._pairs, self._k)
        if self._axis.size > 1:
            rows = _exchange(rows, self._axis, self._receive, self._send)
            rows = _PickRows.apply(rows, self._order, 1)
        return rows

    def gather(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the experts' outputs for this rank's tokens: (N, D).

        Args:
            rows: (rows, D), the outputs of this rank's experts, in the order of ``scatter``.
            weights: (N, k).
        """
        if self._axis.size > 1:
            rows = _PlaceRows.apply(rows, self._order, rows.shape[0])
            rows = _exchange(rows, self._axis, self._send, self._receive)
        outputs = _PlaceRows.apply(rows, self._pairs, self._tokens * self._k).view(self._tokens, self._k, rows.shape[1])
        return (weights.to(rows.dtype)[:, None] @ outputs)[:, 0]


class _PickRows(torch.autograd.Function):
    """Rows ``places // k`` of x. Backward, the gradients of a row are summed in the order of k."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.shape, ctx.k = x.shape, k
        return x.index_select(0, places if k == 1 else places // k)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (places,), (rows, width) = ctx.saved_tensors, ctx.shape
        placed = _PlaceRows.apply(gradient, places, rows * ctx.k)
        return placed if ctx.k == 1 else placed.view(rows, ctx.k, width).sum(1), None, None


class _PlaceRows(torch.autograd.Function):
    """Tensor of ``length`` rows that has row i of x at ``places[i]``, and zeros elsewhere. All places differ."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, length: int) -> Tensor:
        ctx.save_for_backward(places)
        new = x.new_empty if length == places.shape[0] else x.new_zeros
        return new(length, x.shape[1]).index_copy_(0, places, x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (places,) = ctx.saved_tensors
        return _PickRows.apply(gradient, places, 1), None, None


class _RowExchange(torch.autograd.Function):
    """All-to-all of rows, whose backward pass is the all-to-all in the other direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, receive: Sequence[int], send: Sequence[int]) -> Tensor:
        ctx.axis, ctx.receive, ctx.send = axis, receive, send
        y = x.new_empty(sum(receive), x.shape[1])
        axis.all_to_all(y, x.contiguous(), receive=receive, send=send)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _exchange(gradient, ctx.axis, ctx.send, ctx.receive), None, None, None


def _exchange(x: Tensor, axis: Axis, receive: Sequence[int], send: Sequence[int]) -> Tensor:
    y: Tensor = _RowExchange.apply(x, axis, receive, send)
    return y
