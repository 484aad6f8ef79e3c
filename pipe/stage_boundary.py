"""Boundary of a stage's autograd graph: its start, which collects the gradients to send back, and its end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ..base.autograd import mark
from .schema import Schema, flatten


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
    def gradients(self) -> list[Tensor | None]:
        """Gradients of the tensors that require one; None for a tensor that the outputs do not depend on.

        Zeros for all, if the outputs depend on none of them: every stage runs its backward pass.
        """
        if self.reached:
            return list(self._gradients)
        return [torch.zeros(spec.shape, dtype=spec.dtype, device=self._device) for spec in self._specs]

    @property
    def reached(self) -> bool:
        """True if the backward pass gave a gradient to a tensor that requires one, or if none requires one."""
        return not self._specs or any(gradient is not None for gradient in self._gradients)

    def fill(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Store the gradients that the graph's first node received."""
        self._gradients = gradients


def joined(outputs: Any) -> Any:
    """Return a stage's outputs, joined as the outputs of one node of the autograd graph.

    A backward pass that starts from some of the outputs then visits everything that computed any of them, so that all
    replicas visit the same layers.
    """
    several = sum(tensor.requires_grad for tensor in flatten(outputs)[0]) > 1
    return mark(outputs, lambda: None) if several else outputs


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
