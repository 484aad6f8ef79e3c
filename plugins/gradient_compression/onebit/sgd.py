"""1-bit SGD: gradients summed with one bit an element, error feedback, and SGD with momentum on the sum."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ....base.errors import require_at_least
from .optimizer import LocalValue, OneBit, State
from .stepper import OneBitStepper


class OneBitSGD(OneBit):
    """1-bit SGD: SGD with momentum on gradients of which each replica sends the signs, and keeps the errors.

    Seide et al. 2014, 1-Bit Stochastic Gradient Descent, section 3: the error of a step is added to the gradient of the
    next, and the sum is compressed again on its way back. A compressed element is one of two values, the means of the
    elements of either sign, here of each chunk (the paper: of each column). Momentum and decay are torch's SGD's.

    Args:
        params: parameters, or groups of them.
        lr, momentum, weight_decay, nesterov: as in torch's SGD.
        freeze_step: first steps, whose gradients are not compressed.
    """

    stepper = OneBitStepper

    means = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        freeze_step: int = 0,
    ) -> None:
        require_at_least(0, freeze_step=freeze_step, momentum=momentum)
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, {**options, "nesterov": nesterov, "freeze_step": freeze_step})

    def _begin(self, p: Tensor) -> State:
        return {"momentum_buffer": torch.zeros_like(p)}

    def _collect(self, p: Tensor, g: Tensor, state: State, group: State, step: int) -> LocalValue | None:
        return None if self._summed(step) else LocalValue(p, g.clone(), torch.ones_like(g), exact=False)

    def _move(self, p: Tensor, state: State, group: State, step: int, local: LocalValue | None) -> None:
        gradient = p.grad if local is None else local.value
        assert gradient is not None
        gradient = gradient.add(p, alpha=group["weight_decay"])
        momentum = state["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
        p.sub_(gradient.add(momentum, alpha=group["momentum"]) if group["nesterov"] else momentum, alpha=group["lr"])
