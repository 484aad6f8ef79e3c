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

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base.errors import nearest
from ..base.formulas import CHUNK_TOKENS
from ..grid import Grid
from ..grid.loss_terms import Loss
from ..models.log_probs import LogProbsLoss

Kind = Literal["dpo", "ipo", "simpo", "orpo"]
REFERENCE = "reference"  # entry of the labels: log-probability of each row by the reference model, (B,)


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
class _Pairs:
    """Loss of the log-probabilities of 2 P rows; arguments as for ``preference_loss``.

    Attributes:
        records: log-probabilities of the rows of each microbatch, in place of a loss; None: compute the loss.
    """

    grid: Grid
    kind: Kind
    beta: float
    margin: float
    records: list[Tensor] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"there is no preference loss {self.kind!r}; {nearest(self.kind, get_args(Kind))}")
        if not self.beta > 0:
            raise ValueError(f"beta is {self.beta}: give a number above 0, such as 0.1")
        if self.margin and self.kind != "simpo":
            raise ValueError(f"{self.kind} has no margin, but simpo has: leave it out")

    @property
    def uses_reference(self) -> bool:
        """True if the loss needs the log-probabilities of a reference model."""
        return self.kind in ("dpo", "ipo")

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Context in which evaluations append the log-probabilities of the rows of each microbatch to a list."""
        self.records = []
        try:
            yield self.records
        finally:
            self.records = None

    def __call__(self, log_probs: Tensor, labels: Any) -> Loss:
        """Return the loss; see ``preference_loss``.

        Args:
            log_probs: (2 P, T) of this rank's tokens.
            labels: dict.
        """
        counts = self._whole((labels["labels"] != -100).sum(1).to(log_probs.dtype))
        rows = self._whole(log_probs.sum(1))
        reference = torch.zeros_like(rows)
        if self.records is not None:
            self.records.append(rows.detach())
        elif self.uses_reference:
            reference = self._reference(labels, rows)
        _check_pairs(rows)
        pairs, each = len(rows) // 2, 1 / self.grid.context.size
        better, worse = ((rows - reference) / (1 if self.kind == "dpo" else counts.clamp(min=1))).chunk(2)
        mean = lambda losses: (losses.sum() * each, pairs * each)  # noqa: E731
        terms: dict[str, Any] = {self.kind: mean(self._losses(better, worse))}
        if self.kind == "orpo":
            tokens = (labels["labels"][:pairs] != -100).sum()
            terms = {"nll": (-log_probs[:pairs].sum(), tokens)} | terms
        if self.kind == "ipo":  # rewards are not by token
            better, worse = (rows - reference).chunk(2)
        chosen, rejected = self.beta * better.detach(), self.beta * worse.detach()
        metrics = {"chosen": chosen, "rejected": rejected, "margins": chosen - rejected}
        metrics["accuracies"] = (chosen > rejected).to(chosen.dtype)
        factors = {"orpo": self.beta} if self.kind == "orpo" else {}
        return Loss(terms, factors, {f"rewards/{name}": mean(values) for name, values in metrics.items()})

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

    def _whole(self, rows: Tensor) -> Tensor:
        """Return the sums of rows over the context axis.

        Each rank of the axis computes the whole loss and counts 1 / c of it, so its own part has c times the gradient.
        """
        if (parts := self.grid.context.size) == 1:
            return rows
        whole = rows.detach().clone()
        self.grid.context.all_reduce(whole)
        return whole + parts * (rows - rows.detach())

    def _reference(self, labels: Any, rows: Tensor) -> Tensor:
        found = labels.get(REFERENCE)
        if not isinstance(found, Tensor) or found.shape != rows.shape:
            what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else found
            raise ValueError(
                f"{self.kind} needs the reference's log-probability of each of {len(rows)} rows as "
                f"labels['reference'], which is {what}: make the microbatches with triax.methods.with_reference"
            )
        return found.to(rows.dtype)


def _check_pairs(rows: Tensor) -> None:
    if len(rows) % 2 or not len(rows):
        raise ValueError(
            f"a microbatch has {len(rows)} rows, but pairs need an even number: give the better answers, then the "
            "worse ones"
        )
