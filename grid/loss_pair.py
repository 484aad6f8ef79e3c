"""Pair (sum of the losses, weight), as a loss function returns it, told apart from two losses."""

from __future__ import annotations

from numbers import Real
from typing import Any

from torch import Tensor

_FORMS = "a mean (a 0-dim tensor), or a pair (sum of the losses, weight)"


def is_pair(value: Any) -> bool:
    """Return True if a loss function's value is a pair (sum, weight)."""
    return isinstance(value, (tuple, list)) and len(value) == 2


def sum_and_weight(value: Any, given: str, give: str) -> tuple[Tensor, Tensor | float]:
    """Return the sum of the losses and its weight. A mean has the weight 1.

    Args:
        value: a mean; or a pair, as a tuple or a list.
        given, give: for error messages: who gave the value, and what to do, as "loss_fn returned" and "return".

    Raises:
        ValueError: the value is neither, for instance two losses.
    """
    loss, weight = value if is_pair(value) else (value, 1.0)
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        raise ValueError(f"the loss that {given} is {_described(loss)}: {give} {_FORMS}")
    if not isinstance(weight, (Tensor, Real)):
        raise ValueError(f"the weight that {given} is {_described(weight)}, not a number: {give} {_FORMS}")
    if isinstance(weight, Tensor) and weight.numel() != 1:
        raise ValueError(
            f"the weight that {given} has the shape {tuple(weight.shape)}: {give} a pair (sum, weight) of 0-dim tensors"
        )
    if isinstance(weight, Tensor) and weight.requires_grad:
        raise ValueError(
            f"the second value of the pair that {given} requires a gradient. A pair is (sum of the losses, weight), "
            "which the engine divides, so that two losses would be trained as their quotient: "
            f"{give} one loss, such as the sum of both, a dict of both, or {_FORMS}, whose weight is a count without a "
            "gradient"
        )
    # A weight on a GPU is not read here, because the read would wait: see ``Result.sums``.
    there = isinstance(weight, Tensor) and weight.device.type != "cpu"
    if not there and not 0.0 <= float(weight) < float("inf"):
        raise ValueError(
            f"the weight that {given} is {float(weight):g}, but it must be a count, finite and not negative: {give} "
            f"{_FORMS}"
        )
    return loss, weight.view(()) if isinstance(weight, Tensor) else float(weight)


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    of = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
    return f"a {type(value).__name__}{of}"
