"""Losses and statistics that balance the experts' loads.

| ``balance`` | the fraction f_e of choices that expert e gets is taken over |
|---|---|
| ``sequence`` | one sequence: equal on every grid and accumulation (DeepSeek-V3, arXiv:2412.19437) |
| ``batch`` | the whole batch of the step before (the present batch's is known only after its first backward passes) |
| ``microbatch`` | one microbatch of one replica: **changes with the grid**; the default of other libraries |
| ``bias`` | no loss: a bias per expert for the selection, moved after each step (arXiv:2408.15664) |

The loss of a sample is E sum_e f_e P_e (Switch Transformer, arXiv:2101.03961), where P_e is the mean share of expert e
over the sample's tokens (for ``microbatch``, over those of the microbatch). The f_e add up to 1, not to k, so that the
loss of balanced experts is 1. A batch's loss is the mean over its samples.

A sequence's tokens may lie on several ranks. f is then summed over these, without a gradient. The loss is linear in P,
so each rank has the part of the loss that its own tokens give, and these parts and their gradients add up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..grid.comm.axis import Axis
from .router import Routing


class Statistics:
    """Loads and lengths of the sequences of one microbatch.

    Args:
        routing: routing of this rank's tokens.
        valid: bool (B, T), False for padding; None: all tokens count.
        axes: axes over which a sequence is sharded. Collective over them if ``whole`` is True.
        whole: sum over the axes.

    Attributes:
        own: int64 (E,), choices of each expert by this rank's tokens.
        loads: int64 (B, E), choices of each expert by the tokens of each sequence: of the whole sequences if ``whole``.
        tokens: int64 (B,), number of tokens of each sequence, alike.
    """

    def __init__(self, routing: Routing, valid: Tensor | None, axes: Sequence[Axis], whole: bool) -> None:
        batch, _, experts = routing.logits.shape
        chosen = routing.experts.flatten(1)  # (B, T k), in which E means none
        counts = torch.zeros(batch, experts + 1, dtype=torch.int64, device=chosen.device)
        self.loads = counts.scatter_add_(1, chosen, torch.ones_like(chosen))[:, :experts].contiguous()
        self.own = self.loads.sum(0)
        if whole:
            for axis in axes:
                axis.all_reduce(self.loads)
        self.tokens = self.loads.sum(1) // routing.experts.shape[-1]


def balance_loss(shares: Tensor, fractions: Tensor, tokens: Tensor, valid: Tensor | None) -> Tensor:
    """Return this rank's part of the load-balancing loss, summed over the samples: ().

    Args:
        shares: (B, T, E), the router's scores of this rank's tokens.
        fractions: (E,) or (B, E), fractions f of the choices, without a gradient.
        tokens: (B,), numbers of tokens over which P is the mean.
        valid: bool (B, T); None: all tokens count.
    """
    if valid is not None:
        shares = shares * valid[..., None]
    means = shares.sum(1) / tokens.clamp(min=1)[:, None]  # (B, E), this rank's part of P
    return shares.shape[-1] * (means * fractions.to(shares.dtype)).sum()


def z_loss(logits: Tensor, tokens: Tensor, valid: Tensor | None) -> Tensor:
    """Return this rank's part of the z-loss, summed over the samples: () (arXiv:2202.08906).

    The z-loss of a sample is the mean of ``logsumexp(logits)^2`` over its tokens.

    Args:
        logits: (B, T, E).
        tokens: (B,), numbers of tokens of the whole sequences.
        valid: bool (B, T); None: all tokens count.
    """
    squares = logits.logsumexp(-1).square()  # (B, T)
    if valid is not None:
        squares = squares * valid
    return (squares.sum(1) / tokens.clamp(min=1)).sum()


def fractions(loads: Tensor) -> Tensor:
    """Return each expert's fraction of the choices, in float64: (..., E); equal fractions if there are no choices."""
    total = loads.sum(-1, keepdim=True)
    equal = torch.full((), 1.0 / loads.shape[-1], dtype=torch.float64, device=loads.device)
    return torch.where(total > 0, loads.double() / total.clamp(min=1), equal)
