"""Queue of weight gradients that are computed after the gradients of the inputs: the split backward of zero bubble.

``pipe/backward.py`` splits torch's own layers. A function of another folder that has an attribute ``deferred`` splits
itself: a product of column-parallel layers, a grouped product of experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .autograd import sees_sums
from .torch_private import has_hooks, in_transform

Accumulate = Callable[[Tensor], object]  # adds one contribution to a gradient


class Deferred:
    """Queue of the weight gradients of one backward pass, by parameter.

    Attributes:
        active: True while that backward pass runs. At other times a layer calls autograd itself (a gradient
            penalty, a force), and its nodes return whole gradients.
    """

    def __init__(self) -> None:
        self._queue: dict[Tensor, list[Accumulate]] = {}
        self.active = False

    def takes(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Return True if the gradients of ``weight`` and ``bias`` may be computed later than the gradient of ``x``.

        Each must be a leaf without hooks of the user: then only its own ``.grad`` depends on its gradient. A transform
        of ``torch.func`` takes no function with a backward pass of its own. Products of complex numbers are left to
        autograd, which conjugates.
        """
        if not torch.is_grad_enabled() or in_transform() or x.is_complex() or weight.is_complex():
            return False
        parameters = [p for p in (weight, bias) if p is not None and p.requires_grad]
        return bool(parameters) and all(p.is_leaf and not has_hooks(p) and not sees_sums(p) for p in parameters)

    def add(self, parameter: Tensor, accumulate: Accumulate) -> None:
        """Queue one contribution to a parameter's gradient.

        ``accumulate`` is called later with the tensor in which the gradient accumulates, and adds the contribution to
        it.
        """
        self._queue.setdefault(parameter, []).append(accumulate)

    def add_linear(self, weight: Tensor, bias: Tensor | None, dy: Tensor, x: Callable[[], Tensor]) -> None:
        """Queue a linear layer's dW = dyᵀ x and db = Σ dy; ``x()`` returns the input when they are computed."""
        gradients = rows(dy)
        if weight.requires_grad:
            self.add(weight, lambda into: _add_product(into, gradients.T, rows(x())))
        if bias is not None and bias.requires_grad:
            self.add(bias, lambda into: into.add_(gradients.sum(0)))

    @torch.no_grad()
    def run(self, target: Callable[[Tensor], Tensor | None], done: Callable[[Tensor], None]) -> None:
        """Compute the queued weight gradients.

        Args:
            target: function that returns the tensor in which a parameter's gradient accumulates, or None if it
                accumulates in ``.grad``.
            done: called with each parameter after its last contribution.
        """
        while self._queue:
            parameter = next(iter(self._queue))
            into = target(parameter)
            if into is None:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                into = parameter.grad
            for accumulate in self._queue.pop(parameter):
                accumulate(into)
            done(parameter)


def rows(x: Tensor) -> Tensor:
    """Return a tensor as a matrix, whose rows are its last dim."""
    return x.reshape(-1, x.shape[-1])


def _add_product(into: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute ``into += a @ b``, in one kernel if the dtypes are equal."""
    if into.dtype == a.dtype:
        into.addmm_(a, b)
    else:
        into.add_(a @ b)
