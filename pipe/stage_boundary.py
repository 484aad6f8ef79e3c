"""Boundary: the start of a stage's autograd graph, which collects the gradients to send to the stage before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from .schema import Schema


class Boundary:
    """The inputs of one stage for one microbatch, and after the backward pass their gradients.

    Attributes:
        tensors: the inputs, as part of the graph.

    The tensors that require a gradient enter the graph as outputs of one node, not as leaves. So a layer may change
    them in place, as in a model that is not cut, and all their gradients arrive in one call.
    """

    def __init__(self, tensors: list[Tensor], schema: Schema) -> None:
        wanted = [i for i, spec in enumerate(schema.tensors) if spec.grad]
        self.tensors = tensors
        self._specs = [schema.tensors[i] for i in wanted]
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._gradients: tuple[Tensor | None, ...] = (None,) * len(wanted)
        if wanted:
            anchor = torch.empty((), requires_grad=True)
            entered = _EnterGraph.apply(self, anchor, *(tensors[i] for i in wanted))
            self.tensors = list(tensors)
            for i, tensor in zip(wanted, entered, strict=True):
                self.tensors[i] = tensor

    @property
    def gradients(self) -> list[Tensor]:
        """Gradients of the tensors that require one; zeros for a tensor that the outputs do not depend on."""
        return [
            torch.zeros(spec.shape, dtype=spec.dtype, device=self._device) if gradient is None else gradient
            for spec, gradient in zip(self._specs, self._gradients, strict=True)
        ]

    def fill(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Store the gradients that the graph's first node received."""
        self._gradients = gradients


class _EnterGraph(torch.autograd.Function):
    """Autograd function that passes tensors into the graph, and their gradients to the boundary.

    ``anchor`` is an input that requires a gradient: without one autograd would not record the function.
    """

    @staticmethod
    def forward(ctx: Any, boundary: Boundary, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.boundary = boundary
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.boundary.fill(gradients)  # type: ignore[attr-defined]
        return (None,) * (2 + len(gradients))
