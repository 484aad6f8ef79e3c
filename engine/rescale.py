"""fp16's loss scale where nobody scales the loss: on the gradients that come into a module's outputs.

``engine.backward(loss)`` multiplies the loss by its engine's scale. ``loss.backward()``, over one engine or several,
multiplies nothing: each engine's scale then comes in where the backward pass enters its module. So it does where one
engine's ``backward`` runs into another one's module, which has a scale of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# The scale of the loss whose backward pass runs now. The device threads of autograd read it too.
_RUNNING = [1.0]


@contextmanager
def scaled_by(scale: float) -> Iterator[None]:
    """Within it a backward pass runs whose loss was multiplied by this."""
    _RUNNING.append(scale)
    try:
        yield
    finally:
        _RUNNING.pop()


def rescaled(value: Any, scale: Callable[[], float]) -> tuple[Any, bool]:
    """A module's outputs, whose gradients will be multiplied by what is missing from ``scale()``; and whether all are.

    False: there is something in them that cannot be looked into.
    """
    if isinstance(value, Tensor):
        wanted = value.requires_grad and value.is_floating_point()
        return (_Rescale.apply(scale, value) if wanted else value), True
    if isinstance(value, Mapping):
        made: Any = copy.copy(value)  # a model's output has a class of its own
        parts = {key: rescaled(item, scale) for key, item in value.items()}
        for key, (part, _) in parts.items():
            made[key] = part
        return made, all(seen for _, seen in parts.values())
    if isinstance(value, (tuple, list)):
        items = [rescaled(item, scale) for item in value]
        parts_ = [part for part, _ in items]
        made = type(value)(*parts_) if hasattr(value, "_fields") else type(value)(parts_)
        return made, all(seen for _, seen in items)
    return value, value is None or isinstance(value, (bool, int, float, str))


class _Rescale(torch.autograd.Function):
    """The identity; its backward multiplies."""

    @staticmethod
    def forward(ctx: Any, scale: Callable[[], float], tensor: Tensor) -> Tensor:
        ctx.scale = scale
        # A loss is copied: whoever has it may scale it in place, which a view of another would refuse.
        return tensor.view_as(tensor) if tensor.dim() else tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        factor = ctx.scale() / _RUNNING[-1]
        return None, gradient if factor == 1.0 else gradient * factor
