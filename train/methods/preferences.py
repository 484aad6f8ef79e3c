"""Losses of preferences between two answers to a prompt: DPO, IPO, SimPO and ORPO, on any grid.

With log p(y) the log-probability of an answer y (its labels alone), n(y) its number of tokens, r(y) its log-probability
by the reference model, w the better answer and l the worse one, the loss of a pair is

    dpo    -log sigmoid(beta (log p(w) - r(w) - log p(l) + r(l)))
    ipo    ((log p(w) - r(w)) / n(w) - (log p(l) - r(l)) / n(l) - 1 / (2 beta))^2
    simpo  -log sigmoid(beta (log p(w) / n(w) - log p(l) / n(l)) - margin)
    orpo   -beta log sigmoid(log odds(w) - log odds(l)), beside -log p(w) as a mean over tokens

where odds(y) = P / (1 - P), P = exp(log p(y) / n(y)). Sources: Rafailov et al. 2023, arXiv:2305.18290, equation 7; Azar
et al. 2023, arXiv:2310.12036, equation 17; Meng et al. 2024, arXiv:2405.14734, equation 6; Hong et al. 2024,
arXiv:2403.07691, equations 6 and 7. IPO is divided by the numbers of tokens, as its authors and TRL do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ...base.errors import nearest
from ...base.formulas import CHUNK_TOKENS
from ...grid import Grid
from ...grid.loss_terms import Loss
from ...models.log_probs import LogProbsLoss, summed_over_context
from .answer_losses import AnswerLoss

Kind = Literal["dpo", "ipo", "simpo", "orpo"]


def preference_loss(
    grid: Grid,
    vocab_size: int,
    kind: Kind = "dpo",
    beta: float = 0.1,
    margin: float = 0.0,
    chunk_tokens: int | None = CHUNK_TOKENS,
) -> LogProbsLoss:
    """Return the ``loss_fn`` of a ``PipelineModule`` for pairs of answers.

    A microbatch has 2 P rows: the better answers, then the worse ones in the same order. Its labels are a dict with
    ``labels``, integers (2 P, T), -100 for the prompt and for padding; DPO and IPO also need ``reference``, (2 P,),
    which ``with_reference`` adds.

    The loss has the term ``kind`` (of ORPO also ``nll``, the mean over the tokens of the better answers), the mean over
    all pairs of the batch, and the metrics ``rewards/chosen``, ``rewards/rejected``, ``rewards/margins`` and
    ``rewards/accuracies``, as TRL names them. A reward is beta times the log-probability, of DPO and IPO less the
    reference's, of SimPO and ORPO by token.

    Args:
        grid: the grid of the model.
        vocab_size: V, the size of the whole vocabulary.
        kind: ``dpo``, ``ipo``, ``simpo`` or ``orpo``.
        beta: strength; TRL's defaults are 0.1, of SimPO's paper 2 to 2.5.
        margin: SimPO's target margin, gamma.
        chunk_tokens: tokens of a chunk of logits, at most; None: compute whole logits.

    Raises:
        ValueError: an unknown kind, a number out of its range, or an option that the kind does not have.
    """
    pairs = _Pairs(grid, kind, beta, margin)
    return LogProbsLoss(grid, vocab_size, pairs, chunk_tokens=chunk_tokens)


@dataclass
class _Pairs(AnswerLoss):
    """Loss of the log-probabilities of 2 P rows; arguments as for ``preference_loss``."""

    margin: float

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"there is no preference loss {self.kind!r}; {nearest(self.kind, get_args(Kind))}")
        super().__post_init__()
        if self.margin and self.kind != "simpo":
            raise ValueError(f"{self.kind} has no margin, but simpo has: leave it out")

    @property
    def uses_reference(self) -> bool:
        """True if the loss needs the log-probabilities of a reference model."""
        return self.kind in ("dpo", "ipo")

    def __call__(self, log_probs: Tensor, labels: Any) -> Loss:
        """Return the loss; see ``preference_loss``.

        Args:
            log_probs: (2 P, T) of this rank's tokens.
            labels: dict.
        """
        counts = summed_over_context((labels["labels"] != -100).sum(1).to(log_probs.dtype), self.grid.context)
        rows = self.rows(log_probs)
        reference = self.reference(labels, rows) if self.uses_reference else torch.zeros_like(rows)
        _check_pairs(rows)
        better, worse = ((rows - reference) / (1 if self.kind == "dpo" else counts.clamp(min=1))).chunk(2)
        terms: dict[str, Any] = {self.kind: self.mean(self._losses(better, worse))}
        if self.kind == "orpo":
            pairs = len(rows) // 2
            tokens = (labels["labels"][:pairs] != -100).sum()
            terms = {"nll": (-log_probs[:pairs].sum(), tokens)} | terms
        if self.kind == "ipo":  # rewards are not by token
            better, worse = (rows - reference).chunk(2)
        chosen, rejected = self.beta * better.detach(), self.beta * worse.detach()
        metrics = {"chosen": chosen, "rejected": rejected, "margins": chosen - rejected}
        metrics["accuracies"] = (chosen > rejected).to(chosen.dtype)
        factors = {"orpo": self.beta} if self.kind == "orpo" else {}
        return Loss(terms, factors, {f"rewards/{name}": self.mean(values) for name, values in metrics.items()})

    def weight(self, labels: Any) -> dict[str, Any]:
        """Return the number of pairs, and of the tokens of better answers for ORPO."""
        pairs = len(labels["labels"]) // 2
        weights: dict[str, Any] = {self.kind: pairs / self.grid.context.size}
        if self.kind == "orpo":
            weights["nll"] = (labels["labels"][:pairs] != -100).sum()
        return weights

    def _losses(self, better: Tensor, worse: Tensor) -> Tensor:
        """Return the loss of each pair, (P,)."""
        if self.kind == "ipo":
            return (better - worse - 1 / (2 * self.beta)).square()
        if self.kind == "orpo":
            odds = [each - torch.log(-torch.expm1(each)) for each in (better, worse)]
            return -F.logsigmoid(odds[0] - odds[1])
        return -F.logsigmoid(self.beta * (better - worse) - self.margin)


def _check_pairs(rows: Tensor) -> None:
    if len(rows) % 2 or not len(rows):
        raise ValueError(
            f"a microbatch has {len(rows)} rows, but pairs need an even number: give the better answers, then the "
            "worse ones"
        )
