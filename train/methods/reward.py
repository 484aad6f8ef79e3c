"""Reward models: a score of an answer, learned from pairs of a better and a worse one, on any grid.

With r the score at a row's last token, w the better answer and l the worse one, the loss of a pair is

    -log sigmoid(r_w - r_l - margin)  +  center (r_w + r_l)^2

Sources: Bradley and Terry 1952; Ouyang et al. 2022, arXiv:2203.02155, equation 1; the margin: Touvron et al. 2023,
arXiv:2307.09288, section 3.2.2; the centering: Eisenstein et al. 2023, arXiv:2312.09244, equation 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...context.order import positions
from ...grid import Grid
from ...grid.comm.regions import all_reduce_copy
from ...grid.loss_terms import Loss


def reward_loss(grid: Grid, center: float = 0.0) -> RewardLoss:
    """Return the ``loss_fn`` of a reward model, a ``PipelineModule`` of ``reward_layers``, for pairs of answers.

    A microbatch has 2 P rows: the better answers, then the worse ones in the same order, padded on the right. Its
    labels are a dict with ``lengths``, integers (2 P,), the number of tokens of each row with its prompt, and if the
    pairs have margins with ``margin``, (P,).

    The loss has the term ``bradley_terry`` and, with ``center``, the term ``center``, both means over the pairs; and
    the metrics ``mean_reward``, ``accuracy`` and ``margin``, r_w - r_l, as TRL names them. TRL's ``min_reward`` and
    ``max_reward`` are no means, and are left out.

    Args:
        grid: the grid of the model.
        center: TRL's ``center_rewards_coefficient``, such as 0.01; 0: the scores may drift.

    Raises:
        ValueError: ``center`` is negative.
    """
    if not center >= 0:
        raise ValueError(f"center is {center}: give a coefficient of at least 0, such as 0.01")
    return RewardLoss(grid, center)


@dataclass(frozen=True)
class RewardLoss:
    """Loss function of ``reward_loss``; arguments as there."""

    grid: Grid
    center: float

    def __call__(self, scores: Tensor, labels: Any) -> Loss:
        """Return the loss.

        Args:
            scores: (2 P, T) of this rank's tokens, of ``RewardHead``.
            labels: dict.
        """
        if scores.dim() != 2:
            raise ValueError(
                f"the model returned scores of shape {tuple(scores.shape)}, but reward_loss needs one for each token, "
                "(rows, tokens): make the model of triax.methods.reward_layers(...)"
            )
        rows = self._last(scores.to(torch.promote_types(scores.dtype, torch.float32)), _lengths(labels, len(scores)))
        better, worse = rows.chunk(2)
        margins, pairs, parts = labels.get("margin"), len(better), self.grid.context.size
        if margins is not None and margins.shape != better.shape:
            raise ValueError(f"the margins have the shape {tuple(margins.shape)}: give one for each of {pairs} pairs")
        gaps = better - worse if margins is None else better - worse - margins.to(rows.dtype)

        def mean(values: Tensor, count: int = pairs) -> tuple[Tensor, float]:
            # Each rank of the context axis computes the whole sum and counts a part of it. Its gradient stays whole,
            # because a row's last token lies on one rank.
            total = values.sum()
            return total - (1 - 1 / parts) * total.detach(), count / parts

        terms = {"bradley_terry": mean(-F.logsigmoid(gaps))}
        if self.center:
            terms["center"] = mean((better + worse).square())
        rows, better, worse = rows.detach(), better.detach(), worse.detach()
        metrics = {"mean_reward": mean(rows, len(rows)), "accuracy": mean((better > worse).to(rows.dtype))}
        factors = {"center": self.center} if self.center else {}
        return Loss(terms, factors, {**metrics, "margin": mean(better - worse)})

    def weight(self, labels: Any) -> dict[str, float]:
        """Return the number of pairs, for each term."""
        pairs = len(_lengths(labels, None)) // 2 / self.grid.context.size
        return dict.fromkeys(("bradley_terry", *(["center"] if self.center else [])), pairs)

    def _last(self, scores: Tensor, lengths: Tensor) -> Tensor:
        """Return the score at each row's last token, (2 P,), on every rank of the context axis."""
        context, local = self.grid.context, scores.shape[1]
        held = positions(local * context.size, context.size, context.rank, local).to(scores.device)
        if lengths.device.type == "cpu" and bool(((lengths < 1) | (lengths > local * context.size)).any()):
            raise ValueError(
                f"the lengths of the rows are from {int(lengths.min())} to {int(lengths.max())}, but the rows have "
                f"{local * context.size} tokens: give the number of tokens of each row, without padding"
            )
        is_last = held == (lengths - 1)[:, None]  # (2 P, T)
        return all_reduce_copy(scores.masked_fill(~is_last, 0.0).sum(1), context)


def _lengths(labels: Any, rows: int | None) -> Tensor:
    """Return the rows' lengths, of this number of rows or of any even one."""
    found = labels.get("lengths") if isinstance(labels, dict) else None
    if not isinstance(found, Tensor) or found.dim() != 1 or found.is_floating_point() or rows not in (None, len(found)):
        what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else repr(found)
        count = "rows" if rows is None else rows
        raise ValueError(
            f"reward_loss needs the number of tokens of each row, integers ({count},), as labels['lengths'], which is "
            f"{what}"
        )
    if len(found) % 2 or not len(found):
        raise ValueError(
            f"a microbatch has {len(found)} rows, but pairs need an even number: give the better answers, then the "
            "worse ones"
        )
    return found
