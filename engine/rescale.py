"""fp16's loss scale where nobody scales the loss: on the gradients that come into a module's outputs.

``engine.backward(loss)`` multiplies the loss by its engine's scale. ``loss.backward()``, over one engine or several,
multiplies nothing: each engine's scale then comes in where the backward pass enters its module. So it does where one
engine's ``backward`` runs into another one's module, which has a scale of its own. Where gradients leave a module,
through its inputs, they are scaled as they were when they came in.
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
# The last backward pass (autograd's number of it) that came to a loss of ``scaled``: the scales of such losses in it.
_BY_HAND: dict[int, set[float]] = {}


@contextmanager
def scaled_by(scale: float) -> Iterator[None]:
    """Within it a backward pass runs whose loss was multiplied by this."""
    _RUNNING.append(scale)
    try:
        yield
    finally:
        _RUNNING.pop()


def scaled(loss: Tensor, scale: float) -> Tensor:
    """The loss times its engine's scale, for a backward pass that nobody says more about."""
    made = loss if scale == 1.0 else loss.float() * scale
    if made.requires_grad:
        made.register_hook(lambda _: _note(scale))
    return made


def _note(scale: float) -> None:
    task = torch._C._current_graph_task_id()
    if task not in _BY_HAND:
        _BY_HAND.clear()
    _BY_HAND.setdefault(task, set()).add(scale)


def missing(scale: float, by_hand: bool) -> float:
    """In a backward pass: what its gradients are to be multiplied by where they come into a module.

    Args:
        scale: of the module's engine.
        by_hand: some loss was multiplied by it already. It is this one, if nothing else is known of it.
    """
    scales = _BY_HAND.get(torch._C._current_graph_task_id(), set())
    if len(scales) == 1:
        return scale / _RUNNING[-1] / next(iter(scales))
    known = len(_RUNNING) > 1 and not scales
    return (1.0 if by_hand and not known else scale) / _RUNNING[-1]


def rescaled(
    value: Any,
    factor: Callable[[], float],
    leaving: bool = False,
    copies: Callable[[Tensor], bool] = lambda tensor: tensor.dim() == 0,
) -> tuple[Any, bool]:
    """A module's outputs, whose gradients will be multiplied by ``factor()``; and whether all are.

    False: there is something in them that cannot be looked into. What needs nothing stays the same object.

    Args:
        value: a nest.
        factor: asked when the backward pass comes.
        leaving: these are the module's inputs: divided.
        copies: which tensors are copied, so that they may be changed in place. (A loss is scaled so.)
    """
    if isinstance(value, Tensor):
        wanted = value.requires_grad and value.is_floating_point()
        return (_Rescale.apply(factor, leaving, 1.0, copies(value), value) if wanted else value), True
    if isinstance(value, Mapping):
        parts = {key: rescaled(item, factor, leaving, copies) for key, item in value.items()}
        changed = {key: part for key, (part, _) in parts.items() if part is not value[key]}
        made: Any = copy.copy(value) if changed else value  # a model's output has a class of its own
        for key, part in changed.items():
            made[key] = part
        return made, all(seen for _, seen in parts.values())
    if isinstance(value, (tuple, list)):
        items = [rescaled(item, factor, leaving, copies) for item in value]
        parts_, seen = [part for part, _ in items], all(seen for _, seen in items)
        if all(part is item for part, item in zip(parts_, value, strict=True)):
            return value, seen
        return (type(value)(*parts_) if hasattr(value, "_fields") else type(value)(parts_)), seen
    return value, value is None or isinstance(value, (bool, int, float, str))


class _Rescale(torch.autograd.Function):
    """The identity; its backward multiplies, or divides where gradients leave.

    A backward pass of a backward pass (a gradient penalty) comes in where that one left, and leaves where it came in.
    """

    @staticmethod
    def forward(
        ctx: Any, factor: Callable[[], float], leaving: bool, by: float, copied: bool, tensor: Tensor
    ) -> Tensor:
        ctx.factor, ctx.leaving, ctx.by = factor, leaving, by
        if by != 1.0:
            return tensor * by
        # Not a view, which could not be changed in place.
        return tensor.clone() if copied else tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        by = ctx.by / ctx.factor() if ctx.leaving else ctx.by * ctx.factor()
        if gradient.requires_grad:
            gradient = _Rescale.apply(ctx.factor, not ctx.leaving, by, False, gradient)
        elif by != 1.0:
            gradient = gradient * by
        return None, None, None, None, gradient
