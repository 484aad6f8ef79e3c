"""Options of the sum of gradients over replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..base.checks import LARGEST
from ..base.option_error import refusal
from .base import Options, option
from .precision import Dtype


@dataclass(frozen=True, kw_only=True)
class GradientReduction(Options):
    """Sum of gradients over replicas: its dtype and its factors.

    >>> triax.EngineOptions(reduction=triax.GradientReduction(dtype="fp32")).plain(given=True)
    {'reduction': {'dtype': 'fp32'}}
    """

    op: Literal["mean", "sum"] = option(
        "mean",
        "mean: the mean of the replicas' gradients; sum: their sum. Each replica's gradient is the mean over its own "
        "samples.",
    )
    dtype: Dtype | None = option(None, "Dtype in which gradients are summed; None: the dtype of accumulation.")
    low_precision_modules: tuple[str, ...] | None = option(
        None,
        "Classes of modules (torch.nn.Linear) whose gradients are summed in autocast's dtype; all other gradients are "
        "summed in the dtype of accumulation. None: dtype holds for all.",
    )
    prescale: bool = option(
        False,
        "Divide gradients by the number of replicas before they are summed, so that the sum does not overflow in a "
        "narrow dtype. The step stays the same.",
    )
    predivide: float = option(1.0, "Divide gradients by this number before they are summed.", above=0, most=LARGEST)

    def check(self) -> None:
        """Check that one option sets the dtype."""
        if self.dtype and self.low_precision_modules:
            raise refusal(
                "<dtype> and <low_precision_modules> both set the dtype in which gradients are summed over "
                "replicas: give one of them",
            )
