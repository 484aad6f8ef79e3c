"""Policy loss of drawn answers with rewards: GRPO, DAPO, Dr. GRPO and GSPO, on any grid.

With p the probability of a token by the model that is trained, o that by which it was drawn, A the advantage of its
answer, and r = p / o (of level ``sequence`` r is the geometric mean over the answer's tokens, one number for all),

    l = -min(r A, clamp(r, 1 - clip, 1 + clip_high) A)  +  beta k,      k = q/p - log(q/p) - 1

where q is the token's probability by a reference model. k estimates the KL divergence of p from q, and is multiplied by
r unless ``correct_kl`` is False. The loss of a batch of N answers is

    grpo     the mean over answers of the mean of l over the answer's tokens
    dapo     the mean of l over the tokens of all answers
    dr_grpo  the sum of l over all tokens / (N L), with a constant number L of tokens

Sources: Shao et al. 2024, arXiv:2402.03300, equations 3 and 4; Yu et al. 2025, arXiv:2503.14476, equation 8 (``dapo``,
``clip_high``); Liu et al. 2025, arXiv:2503.20783 (``dr_grpo``); Zheng et al. 2025, arXiv:2507.18071, equations 5 and 7
(``sequence``, with ``grpo``); for k, Schulman 2020, "Approximating KL divergence", and the factor r DeepSeek-AI 2025,
arXiv:2512.02556.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ...base.checks import check_count, check_positive
from ...base.errors import nearest
from ...base.formulas import CHUNK_TOKENS
from ...grid import Grid
from ...grid.agreement.agreement import largest
from ...grid.loss_terms import Loss
from ...models.log_probs import LogProbsLoss, summed_over_context
from .answer_losses import Recording

PolicyKind = Literal["grpo", "dapo", "dr_grpo"]
Level = Literal["token", "sequence"]
OLD = "old"  # entry of the labels: log-probability of each token when it was drawn, (B, T)
ADVANTAGES = "advantages"  # entry of the labels: advantage of each answer, (B,)
TOKEN_REFERENCE = "reference"  # entry of the labels: log-probability of each token by the reference model, (B, T)


def grpo_loss(
    grid: Grid,
    vocab_size: int,
    kind: PolicyKind = "dapo",
    beta: float = 0.0,
    clip: float = 0.2,
    clip_high: float | None = None,
    level: Level = "token",
    *,
    correct_kl: bool = True,
    max_new_tokens: int | None = None,
    temperature: float = 1.0,
    chunk_tokens: int | None = CHUNK_TOKENS,
) -> LogProbsLoss:
    """Return the ``loss_fn`` of a ``PipelineModule`` for answers that were drawn from it, with advantages.

    The labels of a microbatch of B answers are a dict with ``labels``, integers (B, T), -100 for the prompt and for
    padding; ``advantages``, (B,); ``old``, (B, T), the log-probability of each label when it was drawn; and with a
    ``beta`` ``reference``, (B, T), that by the reference model. ``Rollouts`` makes them. Values at labels of -100 do
    not count.

    The loss has the term ``kind`` and these metrics, most of them TRL's: ``clip_ratio/low_mean``,
    ``clip_ratio/high_mean`` and ``clip_ratio/region_mean``, the shares of tokens (or answers, of level ``sequence``)
    that are clipped; ``ratio``, the mean of r; ``sampling/sampling_logp_difference/mean``, the mean over tokens of
    abs(log p - log o), which at the first step of new answers is the error of ``old``; and with a ``beta`` ``kl``.

    Args:
        grid: the grid of the model.
        vocab_size: V, the size of the whole vocabulary.
        kind: ``grpo``, ``dapo`` or ``dr_grpo``.
        beta: coefficient of the KL divergence from the reference model; 0: none.
        clip, clip_high: ratios below 1 - clip and above 1 + clip_high are clipped; ``clip_high`` None: ``clip``.
        level: ratio of each ``token``, or one of each ``sequence``.
        correct_kl: multiply k by r, so that its gradient equals the KL divergence's, as TRL does by default; False:
            the equation of GRPO's paper.
        max_new_tokens: L, for ``dr_grpo`` alone: the most tokens of an answer.
        temperature: temperature at which the answers were drawn: p is softmax(logits / temperature).
        chunk_tokens: tokens of a chunk of logits, at most; None: compute whole logits.

    Raises:
        ValueError: an unknown kind or level, a number out of its range, or an option that the kind does not have.
    """
    policy = _Policy(grid, kind, beta, clip, clip if clip_high is None else clip_high, level, correct_kl)
    policy.length = max_new_tokens
    policy.check()
    check_positive("grpo_loss", temperature=temperature)
    return LogProbsLoss(grid, vocab_size, policy, chunk_tokens=chunk_tokens, temperature=temperature)


@dataclass
class _Policy(Recording):
    """Loss of the log-probabilities of B answers; arguments as for ``grpo_loss``.

    Attributes:
        length: L of ``dr_grpo``.
        difference: largest abs(log p - log o) of the microbatches since it was last read, of this rank.
    """

    grid: Grid
    kind: PolicyKind
    beta: float
    clip: float
    clip_high: float
    level: Level
    correct_kl: bool
    length: int | None = None
    difference: Tensor | None = field(default=None, init=False)

    def check(self) -> None:
        """Raise ValueError for arguments that cannot be used."""
        for what, given, known in (
            ("policy loss", self.kind, get_args(PolicyKind)),
            ("level", self.level, get_args(Level)),
        ):
            if given not in known:
                raise ValueError(f"there is no {what} {given!r}; {nearest(str(given), known)}")
        if not self.beta >= 0:
            raise ValueError(f"beta is {self.beta}: give 0 (no reference model) or a number above 0, such as 0.04")
        if not (0 < self.clip < 1 and self.clip_high > 0):
            raise ValueError(
                f"clip is {self.clip} and clip_high {self.clip_high}: give a clip between 0 and 1, such as 0.2, and a "
                "clip_high above 0, such as 0.28"
            )
        if (self.kind == "dr_grpo") == (self.length is None):
            raise ValueError(
                "dr_grpo divides by a constant number of tokens: give max_new_tokens, the most tokens of an answer"
                if self.length is None
                else f"{self.kind} divides by the tokens that there are, but dr_grpo by max_new_tokens: leave it out"
            )
        if self.length is not None:
            check_count("grpo_loss", max_new_tokens=self.length)

    def largest_difference(self) -> float:
        """Return the largest abs(log p - log o) of all ranks since the last call. Collective."""
        mine, self.difference = self.difference, None
        (most,) = largest(self.grid, [0.0 if mine is None else float(mine)])
        return most

    def __call__(self, log_probs: Tensor, labels: Any) -> Loss:
        """Return the loss; see ``grpo_loss``.

        Args:
            log_probs: (B, T) of this rank's tokens, 0 for labels that do not count.
            labels: dict, of this rank's tokens.
        """
        mask = (labels["labels"] != -100).to(log_probs.dtype)  # (B, T)
        if self.records is not None:
            self.records.append(log_probs.detach())
            return Loss({self.kind: (torch.zeros_like(log_probs[0, 0]), mask.sum())})
        share = 1 / self.grid.context.size  # of an answer, where each rank of the context axis computes the whole
        lengths = summed_over_context(mask.sum(1), self.grid.context)  # (B,)
        advantages = _entry(labels, ADVANTAGES, log_probs[:, 0], "advantage of each row")[:, None]
        old = _entry(labels, OLD, log_probs, "log-probability of each label when it was drawn")
        change = (log_probs - old).masked_fill(mask == 0, 0.0)  # (B, T)
        if self.level == "token":
            ratio, counts = change.exp(), mask
        else:
            logs = summed_over_context(change.sum(1), self.grid.context) / lengths.clamp(min=1)
            ratio, counts = logs.exp()[:, None], (lengths * share)[:, None]  # (B, 1)
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip_high)
        rows = (-torch.minimum(ratio * advantages, clipped * advantages) * counts).sum(1)
        if self.beta:
            kl = self._kl(log_probs, labels, mask, ratio)
            rows = rows + self.beta * kl
        terms: dict[str, Any] = {self.kind: self._mean(rows, lengths, mask)}

        def mean(values: Tensor) -> tuple[Tensor, Any]:
            values = values.detach().to(mask.dtype)
            if self.level == "sequence":
                return values.sum() * share, len(mask) * share
            return (values * mask).sum(), mask.sum()

        low = (ratio < 1 - self.clip) & (advantages < 0)
        high = (ratio > 1 + self.clip_high) & (advantages > 0)
        metrics = {f"clip_ratio/{name}_mean": mean(each) for name, each in (("low", low), ("high", high))}
        metrics["clip_ratio/region_mean"] = mean(low | high)
        metrics["ratio"] = mean(ratio)
        difference = change.detach().abs()
        metrics["sampling/sampling_logp_difference/mean"] = difference.sum(), mask.sum()
        most = difference.max()
        self.difference = most if self.difference is None else torch.maximum(self.difference, most)
        if self.beta:
            metrics["kl"] = kl.detach().sum(), mask.sum()
        return Loss(terms, metrics=metrics)

    def weight(self, labels: Any) -> dict[str, Any]:
        """Return the number of answers, or of ``dapo`` that of tokens."""
        if self.kind == "dapo":
            return {self.kind: (labels["labels"] != -100).sum()}
        return {self.kind: len(labels["labels"]) / self.grid.context.size}

    def _mean(self, rows: Tensor, lengths: Tensor, mask: Tensor) -> tuple[Tensor, Any]:
        """Return the sum and the weight of the losses.

        Args:
            rows: (B,) sums over the tokens; those of all ranks of the context axis add up.
            lengths: (B,) numbers of tokens.
            mask: (B, T) of this rank's tokens.
        """
        if self.kind == "dapo":
            return rows.sum(), mask.sum()
        divisors = lengths.clamp(min=1) if self.length is None else self.length
        return (rows / divisors).sum(), len(rows) / self.grid.context.size

    def _kl(self, log_probs: Tensor, labels: Any, mask: Tensor, ratio: Tensor) -> Tensor:
        """Return the sum over the tokens of each row of k, or of k r: (B,)."""
        reference = _entry(labels, TOKEN_REFERENCE, log_probs, "log-probability of each label by the reference model")
        ahead = (reference - log_probs).masked_fill(mask == 0, 0.0)
        kl = ahead.exp() - ahead - 1  # (B, T), 0 outside the mask
        if not self.correct_kl:
            return kl.sum(1)
        if self.level == "token":
            return (kl * ratio).sum(1)
        axis = self.grid.context
        return summed_over_context(kl.sum(1), axis) * ratio[:, 0] / axis.size


def _entry(labels: Any, name: str, like: Tensor, what: str) -> Tensor:
    """Return an entry of the labels, in the dtype of the log-probabilities.

    Raises:
        ValueError: it is missing, or of another shape.
    """
    found = labels.get(name)
    if not isinstance(found, Tensor) or found.shape != like.shape:
        given = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else found
        raise ValueError(
            f"grpo_loss needs the {what}, {tuple(like.shape)}, as labels[{name!r}], which is {given}: make the "
            "microbatches with triax.methods.Rollouts"
        )
    return found.to(like.dtype)
