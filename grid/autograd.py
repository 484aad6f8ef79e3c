"""Helpers of custom backward passes: marks in the graph, hooks that hold no owner, and the casts of autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakMethod

import torch
from torch import Tensor

from .nest import map_tensors

T = TypeVar("T", Tensor, Tensor | None)


def mark(value: Any, action: Callable[[], None], exact: bool = False) -> Any:
    """Return a copy of a nest of tensors; the backward pass calls ``action`` once all their gradients are computed.

    Args:
        value: the nest.
        action: called before the gradients are passed on.
        exact: do not look inside subclasses of tuple, list and dict, as in ``map_tensors``.
    """
    tensors: list[Tensor] = []
    map_tensors(tensors.append, value, exact)
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    if not wanted:
        return value
    marked = dict(zip(map(id, wanted), _Mark.apply(action, *wanted), strict=True))
    return map_tensors(lambda tensor: marked.get(id(tensor), tensor), value, exact)


class _Mark(torch.autograd.Function):
    """Identity whose backward pass runs an action first."""

    @staticmethod
    def forward(ctx: Any, action: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.action = action
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.action()
        return (None, *gradients)


def weak(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """Make a parameter's hook of a method, without keeping the method's owner alive; it does nothing afterwards.

    Python's garbage collector does not see through the hooks of a tensor that C++ refers to as well. An owner that
    they held would never be freed, nor would its grid's sockets and threads.
    """
    reference = WeakMethod(method)

    def hook(parameter: Tensor) -> None:
        if (method := reference()) is not None:
            method(parameter)

    return hook


def product_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype in which autocast computes products with ``x``; None outside of autocast.

    Autocast casts where a product is called, so that autograd sees the casts. A custom function is called once, and
    its backward pass runs outside of autocast: it must cast to the dtype that was in force in its forward pass.
    """
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def cast(tensor: T, dtype: torch.dtype | None) -> T:
    """Cast as autocast does: floating-point tensors except float64. None as ``dtype`` or ``tensor`` changes nothing."""
    if dtype is None or tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)
