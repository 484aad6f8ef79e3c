"""A point of the graph at which the backward pass calls something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .nest import map_tensors


def mark(value: Any, action: Callable[[], None]) -> Any:
    """The same nest, whose backward pass calls ``action`` when the gradients of all its tensors are there."""
    tensors: list[Tensor] = []
    map_tensors(tensors.append, value)
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    if not wanted:
        return value
    marked = dict(zip(map(id, wanted), _Mark.apply(action, *wanted), strict=True))
    return map_tensors(lambda tensor: marked.get(id(tensor), tensor), value)


class _Mark(torch.autograd.Function):
    """The identity; its backward runs an action first."""

    @staticmethod
    def forward(ctx: Any, action: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.action = action
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.action()
        return (None, *gradients)
