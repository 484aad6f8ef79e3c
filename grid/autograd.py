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
        value: the nest of tensors, for example a layer's output.
        action: function without arguments. The backward pass calls it before it passes the gradients on to the nodes
            that made the tensors.
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
    """Return a hook for a parameter that calls a method, but does not keep the method's object alive.

    Once the object is freed, the hook does nothing. A hook that held the object would keep it alive forever, together
    with its grid's sockets and threads, because Python's garbage collector does not follow hooks of tensors that C++
    also refers to.
    """
    reference = WeakMethod(method)

    def hook(parameter: Tensor) -> None:
        if (method := reference()) is not None:
            method(parameter)

    return hook


def product_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype in which autocast computes products with ``x``; None outside of autocast.

    Under autocast torch casts the arguments of ``F.linear`` and similar functions at the call, and autograd records the
    casts. The backward pass of a custom autograd function runs outside of autocast. Such a function must therefore
    store this dtype in its forward pass and cast with ``cast`` in its backward pass.
    """
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def cast(tensor: T, dtype: torch.dtype | None) -> T:
    """Cast as autocast does: floating-point tensors except float64. None as ``dtype`` or ``tensor`` changes nothing."""
    if dtype is None or tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)
