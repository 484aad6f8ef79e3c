"""Auxiliary losses: losses within the model, such as a mixture of experts' load balance, in the one division.

The gradient of a batch is a sum over its samples that the engine divides once, by the batch's weight W. An auxiliary
loss is a mean over the batch's N samples. Its gradient must therefore be W / N times the gradient of its sum, and so
W must be known before the first backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..base.autograd import runs_again


class AuxiliaryLosses:
    """Weight of auxiliary losses, and their values in the step that runs now. An engine and its model share it.

    Attributes:
        weight: weight of one sample, W / N. None if the main loss is a mean over each microbatch: then the weight is
            1 / (samples of the microbatch).
        scale: factor of the loss in the backward pass, such as fp16's loss scale. It is read in the backward pass.
        values: name -> sum over this step's samples so far on this rank, times ``weight``.
    """

    def __init__(self) -> None:
        self.weight: float | None = None
        self.scale = 1.0
        self.values: dict[str, Tensor] = {}

    def attach(self, x: Tensor, name: str, loss: Tensor, coefficient: float = 1.0, counted: bool = True) -> Tensor:
        """Return x. The backward pass of the result also runs that of a loss, with the right weight.

        Without gradients it does nothing. A recomputation has the gradient, but its value is not recorded again.

        Args:
            x: (B, ...) with samples in dim 0, an output of the layer.
            name: name of the value, unique in the model.
            loss: (), this rank's sum of the loss over the samples.
            coefficient: factor of the loss's gradient. The recorded value is without it.
            counted: False on ranks whose value another rank records too.
        """
        if not torch.is_grad_enabled():
            return x
        weight = 1.0 / max(x.shape[0], 1) if self.weight is None else self.weight
        if counted and not runs_again():
            value = loss.detach().double() * weight
            self.values[name] = self.values[name] + value if name in self.values else value
        if not loss.requires_grad:
            return x
        y: Tensor = _AttachLoss.apply(x, loss, self, weight * coefficient)
        return y


class _AttachLoss(torch.autograd.Function):
    """Identity of x whose backward pass gives a loss its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, state: AuxiliaryLosses, weight: float) -> Tensor:
        ctx.state, ctx.weight, ctx.dtype, ctx.device = state, weight, loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        factor = torch.full((), ctx.weight * ctx.state.scale, dtype=ctx.dtype, device=ctx.device)
        return gradient, factor, None, None


class AuxiliaryLayer(nn.Module):
    """Base class of layers with auxiliary losses, or with expert loads that are summed over the batch.

    Attributes:
        name: the layer's whole-model name.
        auxiliary: the state that the engine and the model share.
        loads: (E,) tokens that each expert was given in this step so far, on this rank. None before the first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.name = ""
        self.auxiliary = AuxiliaryLosses()
        self.loads: Tensor | None = None

    def bind(self, name: str, auxiliary: AuxiliaryLosses) -> None:
        """Set the layer's name and the state that it shares with the engine."""
        self.name, self.auxiliary = name, auxiliary

    @property
    def experts(self) -> int:
        """Number of experts, the length of ``loads``."""
        raise NotImplementedError

    @property
    def loss_names(self) -> Sequence[str]:
        """Names of the layer's auxiliary losses."""
        raise NotImplementedError

    def end_step(self, loads: Tensor) -> None:
        """End a step.

        Args:
            loads: (E,) the tokens that each expert was given in the step, summed over all ranks.
        """
        raise NotImplementedError
