"""Lending of experts: ranks whose experts are hot lend them to idle ranks, so that all compute equally many tokens.

Least-Loaded Expert Parallelism (arXiv:2601.17111). The router is not changed; for each call of a layer:

counts (ranks, E)     of each rank's tokens, exchanged before the tokens; they alone determine all that follows
shares (ranks, E)     tokens of each expert that each rank computes, those of one expert on one rank or several
weights               copied from the owner to the borrower, in the forward pass and again in the backward pass
gradients             returned by borrowers in the backward pass, and added to the owner's in the order of the ranks

The table has the costs of an expert axis of n ranks with S slots each. M is the bytes of an expert's weights, and M'
those of its largest weight. A copy lives while its layer is computed; nothing is kept between the two passes.

| bytes | |
|---|---|
| sent by a rank that lends c copies and borrows b experts | c M forward; (c + b) M backward |
| copies of weights on a rank, at most | S M forward; S M backward, and S M of gradients |
| messages of a rank, at most, beside the copies | (n - 1) M' |
| sums of gradients that the owner holds until W, under a split backward, at most | M for each of its experts |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..grid.comm.axis import Axis

Array = Any  # of numpy


def assign(loads: Array, ranks: int, slots: int) -> Array:
    """Return how many tokens of each expert each rank computes: (ranks, E) from the loads (E,).

    The busiest rank gives tokens of its largest expert to the idlest rank with a free slot, until no rank has more than
    the mean, rounded up, or no slot is left that helps. Rank r owns experts r E / ranks to (r + 1) E / ranks - 1.

    >>> assign(np.array([6, 2, 0, 0]), 2, 1)
    array([[2, 2, 0, 0],
           [4, 0, 0, 0]])
    """
    own = len(loads) // ranks
    shares = np.zeros((ranks, len(loads)), dtype=np.int64)
    for rank in range(ranks):
        shares[rank, rank * own : (rank + 1) * own] = loads[rank * own : (rank + 1) * own]
    work, free = shares.sum(1), np.full(ranks, slots)
    limit = -(-int(work.sum()) // ranks)
    while True:
        busiest, open_ = int(work.argmax()), (free > 0) & (work < limit)
        if work[busiest] <= limit or not open_.any():
            return shares
        idlest, expert = int(np.where(open_, work, limit).argmin()), int(shares[busiest].argmax())
        moved = min(work[busiest] - limit, limit - work[idlest], shares[busiest, expert])
        shares[[busiest, idlest], expert] += [-moved, moved]
        work[[busiest, idlest]] += [-moved, moved]
        free[idlest] -= 1


class Assignment:
    """Rows that this rank sends and receives in one call of a layer, and the experts that each rank borrows.

    The tokens of an expert are in the order of the ranks that have them, and are computed in parts by the ranks that
    own or borrow the expert, again in the order of the ranks.

    Args:
        counts: (ranks, E), tokens of each rank for each expert.
        rank: this rank.
        slots: largest number of experts that a rank borrows.

    Attributes:
        leaving: (ranks, E), rows of this rank for each expert, by the rank that computes them.
        arriving: (ranks, E), rows for each expert that this rank computes, by the rank that sends them.
        borrowed: for each rank the experts that it borrows: those behind its own ones first, then those before.
        lengths: numbers of rows of this rank's experts, then of the borrowed ones.
    """

    def __init__(self, counts: Array, rank: int, slots: int) -> None:
        ranks, experts = counts.shape
        own, shares = experts // ranks, assign(counts.sum(0), ranks, slots)
        ends, last = counts.cumsum(0), shares.cumsum(0)  # within the tokens of each expert
        starts, first = ends - counts, last - shares
        self.leaving = (np.minimum(ends[rank], last) - np.maximum(starts[rank], first)).clip(0)
        self.arriving = (np.minimum(ends, last[rank]) - np.maximum(starts, first[rank])).clip(0)
        others = [(np.arange(own, experts) + each * own) % experts for each in range(ranks)]
        self.borrowed = [each[shares[r, each] > 0].tolist() for r, each in enumerate(others)]
        mine = [*range(rank * own, (rank + 1) * own), *self.borrowed[rank]]
        self.lengths: list[int] = shares[rank, mine].tolist()


class Loan:
    """Exchange of the weights of borrowed experts, and of their gradients. Each method is collective over the axis.

    Round j exchanges the j-th borrowed expert of each rank. There are always as many rounds as slots: ranks that take
    turns at their collectives count them.

    Args:
        axis: the expert axis.
        borrowed: for each rank the experts that it borrows.
        own: number of experts that a rank owns.
        slots: largest number of experts that a rank borrows.

    Attributes:
        own: number of experts that this rank owns.
    """

    def __init__(self, axis: Axis, borrowed: Sequence[Sequence[int]], own: int, slots: int) -> None:
        self.own, self._axis, self._size = own, axis, len(borrowed[axis.rank])
        # Of each round: this rank's experts that it lends; how many copies go to each rank; and come from each.
        self._rounds: list[tuple[list[int], list[int], list[int]]] = []
        for j in range(slots):
            experts = [each[j] if j < len(each) else -1 for each in borrowed]
            lent = [expert // own == axis.rank for expert in experts]
            places = [expert % own for expert, mine in zip(experts, lent, strict=True) if mine]
            source = experts[axis.rank] // own
            self._rounds.append((places, [*map(int, lent)], [int(rank == source) for rank in range(axis.size)]))

    def borrow(self, weight: Tensor) -> Tensor:
        """Return the weights of the borrowed experts: (borrowed, ...) from this rank's (own, ...)."""
        copies = weight.new_empty(self._size, *weight.shape[1:])
        for j, (places, send, receive) in enumerate(self._rounds):
            leaving = torch.stack([weight[place] for place in places]) if places else weight[:0].contiguous()
            self._axis.all_to_all(copies[j : j + 1], leaving, receive=receive, send=send)
            del leaving  # before the next round's copies are made
        return copies

    def give_back(self, gradient: Tensor, into: Tensor | None = None) -> dict[int, Tensor]:
        """Return the gradients of borrowed experts, (borrowed, ...), to their owners.

        Args:
            gradient: those of the experts that this rank borrows.
            into: (own, ...), to which those of the experts that this rank lends are added.

        Returns:
            Without ``into``, their sums, by the number of the expert among this rank's own.
        """
        sums: dict[int, Tensor] = {}
        for j, (places, lent, borrowed) in enumerate(self._rounds):
            arriving = gradient.new_empty(len(places), *gradient.shape[1:])
            self._axis.all_to_all(arriving, gradient[j : j + 1].contiguous(), receive=lent, send=borrowed)
            for number, place in enumerate(places):
                if into is not None:
                    into[place] += arriving[number]
                elif place in sums:
                    sums[place] += arriving[number]
                else:
                    sums[place] = arriving[number].clone()
            del arriving  # before the next round's
        return sums

    def join(self, weight: Tensor) -> Tensor:
        """Return this rank's weights and, behind them, the borrowed ones: (own + borrowed, ...). Differentiable."""
        return torch.cat([weight, _Borrow.apply(weight, self)])

    def separate(self, gradient: Tensor) -> Tensor:
        """Return the gradient of this rank's weights, (own, ...), from that of ``join``'s output. Differentiable."""
        mine: Tensor = gradient[: self.own] + _GiveBack.apply(gradient[self.own :], self)
        return mine


class _Borrow(torch.autograd.Function):
    """Copies of the borrowed experts' weights, whose gradients are returned to the owners."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, loan: Loan) -> Tensor:
        ctx.loan = loan
        return loan.borrow(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _GiveBack.apply(gradient, ctx.loan), None


class _GiveBack(torch.autograd.Function):
    """Gradients of the weights that this rank lends, (own, ...), from those of the experts that each rank borrows."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, loan: Loan) -> Tensor:
        ctx.loan = loan
        into = gradient.new_zeros(loan.own, *gradient.shape[1:])
        loan.give_back(gradient, into)
        return into

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> Any:
        return _Borrow.apply(weight, ctx.loan), None
