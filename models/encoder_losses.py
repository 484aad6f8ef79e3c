"""Losses of encoders, as sums and weights: of masked tokens, and of the classes of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from .layers import NextTokenLoss

Problem = Literal["single_label_classification", "multi_label_classification", "regression"]


class MaskedLMLoss(NextTokenLoss):
    """Cross entropy of masked tokens: the labels are the tokens themselves, and -100 where none is masked.

    It is ``NextTokenLoss``, whose labels belong to the tokens of their own places here. Sums and numbers of labels are
    added up over microbatches and replicas, and divided once. A microbatch may be a dict with ``labels``.
    """

    next_tokens: ClassVar[bool] = False


@dataclass(frozen=True)
class ClassificationLoss:
    """Loss of the classes of rows, returned as the sum of the losses and their number, like transformers' mean.

    | problem | labels | loss |
    |---|---|---|
    | ``single_label_classification`` | integers (B,); -100: no label | cross entropy |
    | ``multi_label_classification`` | 0 or 1, (B, C) | binary cross entropy of each class |
    | ``regression`` | numbers (B,) or (B, C) | squared error |

    >>> triax.models.ClassificationLoss()(torch.zeros(2, 4), torch.tensor([3, 0]))  # 2 ln 4, and 2 labels
    (tensor(2.7726), tensor(2))

    Args:
        problem_type: the problem, by transformers' names.

    Raises:
        ValueError: there is no such problem; in a call, the labels have another shape.
    """

    problem_type: Problem = "single_label_classification"

    def __post_init__(self) -> None:
        if self.problem_type not in get_args(Problem):
            raise ValueError(f"problem_type is {self.problem_type!r}. Give one of {', '.join(get_args(Problem))}.")

    def __call__(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses, in float32 at least, and their number, from logits (B, C)."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.problem_type == "single_label_classification":
            return F.cross_entropy(logits, labels, reduction="sum"), self.weight(labels)
        if labels.numel() != logits.numel():
            raise ValueError(
                f"the labels are {tuple(labels.shape)}, but the logits {tuple(logits.shape)}. Give as many."
            )
        entropy = self.problem_type == "multi_label_classification"
        loss = F.binary_cross_entropy_with_logits if entropy else F.mse_loss
        return loss(logits, labels.view_as(logits).to(logits.dtype), reduction="sum"), self.weight(labels)

    def weight(self, labels: Tensor) -> Tensor:
        """Return the number of losses, (): the engine asks for it before the forward pass of a step."""
        if self.problem_type == "single_label_classification":
            return torch.count_nonzero(labels != -100)
        return torch.tensor(labels.numel(), device=labels.device)
