"""KTO: loss of answers that are each desirable or not, without pairs, on any grid.

With log p(y) the log-probability of an answer y (its labels alone) and r(y) its log-probability by the reference model,
the loss of an answer is

    desirable     d (1 - sigmoid(beta (log p(y) - r(y) - z)))
    undesirable   u (1 - sigmoid(beta (z - log p(y) + r(y))))

where z, the baseline, estimates the divergence of the model from the reference: the mean of log p(y') - r(y') over a
batch of prompts with answers y' to other prompts, at least 0, without a gradient. Source: Ethayarajh et al. 2024,
arXiv:2402.01306, equations 7 and 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...base.formulas import CHUNK_TOKENS
from ...grid import Grid
from ...grid.loss_terms import Loss
from ...models.log_probs import LogProbsLoss
from .answer_losses import BASELINE, AnswerLoss


def kto_loss(
    grid: Grid,
    vocab_size: int,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    chunk_tokens: int | None = CHUNK_TOKENS,
) -> LogProbsLoss:
    """Return the ``loss_fn`` of a ``PipelineModule`` for answers that are each desirable or not.

    A microbatch has B rows. Its labels are a dict with ``labels``, integers (B, T), -100 for the prompt and for
    padding; ``desirable``, bool (B,); ``reference``, (B,), which ``with_reference`` adds; and ``baseline``, (B,), which
    ``with_baseline`` adds before each step.

    The loss has the term ``kto``, the mean over all rows of the batch, and the metrics ``rewards/chosen`` and
    ``rewards/rejected``, the mean of beta (log p - r) over the desirable answers and over the others, and ``kl``, the
    baseline, as TRL names them.

    Args:
        grid: the grid of the model.
        vocab_size: V, the size of the whole vocabulary.
        beta: strength of the divergence's penalty.
        desirable_weight, undesirable_weight: d and u. The paper advises to choose them so that d times the number of
            desirable answers is 1 to 4/3 of u times the number of the others.
        chunk_tokens: tokens of a chunk of logits, at most; None: compute whole logits.

    Raises:
        ValueError: ``beta`` or a weight is not above 0.
    """
    answers = _Unpaired(grid, "kto", beta, desirable_weight, undesirable_weight)
    return LogProbsLoss(grid, vocab_size, answers, chunk_tokens=chunk_tokens)


@dataclass
class _Unpaired(AnswerLoss):
    """Loss of the log-probabilities of B rows; arguments as for ``kto_loss``."""

    desirable_weight: float
    undesirable_weight: float

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("desirable_weight", "undesirable_weight"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}: give a number above 0; 1 is the usual one")

    def __call__(self, log_probs: Tensor, labels: Any) -> Loss:
        """Return the loss; see ``kto_loss``.

        Args:
            log_probs: (B, T) of this rank's tokens.
            labels: dict.
        """
        rows = self.rows(log_probs)
        baseline = self.entry(labels, BASELINE, rows, "make each step's microbatches with triax.methods.with_baseline")
        desirable = self._desirable(labels, rows)
        ratios = self.beta * (rows - self.reference(labels, rows))
        signed = torch.where(desirable, ratios - self.beta * baseline, self.beta * baseline - ratios)
        desired, undesired = rows.new_tensor((self.desirable_weight, self.undesirable_weight))
        weights = torch.where(desirable, desired, undesired)
        metrics: dict[str, Any] = {"kl": self.mean(baseline)}
        for name, which in (("rewards/chosen", desirable), ("rewards/rejected", ~desirable)):
            parts = self.grid.context.size
            metrics[name] = ((ratios.detach() * which).sum() / parts, which.sum() / parts)
        return Loss({"kto": self.mean(weights * (1 - torch.sigmoid(signed)))}, metrics=metrics)

    def weight(self, labels: Any) -> dict[str, Any]:
        """Return the number of rows."""
        return {"kto": len(labels["labels"]) / self.grid.context.size}

    def _desirable(self, labels: Any, rows: Tensor) -> Tensor:
        if self.records is not None:
            return torch.ones_like(rows, dtype=torch.bool)
        found = labels.get("desirable")
        if not isinstance(found, Tensor) or found.shape != rows.shape or found.dtype != torch.bool:
            what = f"a {found.dtype} of shape {tuple(found.shape)}" if isinstance(found, Tensor) else found
            raise ValueError(
                f"kto needs labels['desirable'], a torch.bool tensor of shape {tuple(rows.shape)}, True for a "
                f"desirable answer, but it is {what}"
            )
        return found
