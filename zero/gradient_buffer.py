"""Unsharded gradients of one bucket in a flat tensor."""

from __future__ import annotations

from torch import Tensor

from .guarded_gradient import GuardedGradient


class GradientBuffer:
    """Flat tensor in which the gradients of a bucket accumulate, with a view of it for each parameter.

    Args:
        flat: (numel,), the gradients.
        views: parameter -> its gradient, a view of ``flat``.

    Attributes:
        flat, views: as given.
        empty: parameters without a gradient here so far. The values of their views are undefined.
        filled: parameters without a gradient, whose views are zero.
        guards: parameter -> its view as a guard, where ``ShownGradients`` has needed one.
    """

    def __init__(self, flat: Tensor, views: dict[Tensor, Tensor]) -> None:
        self.flat, self.views = flat, views
        self.empty: set[Tensor] = set()
        self.filled: set[Tensor] = set()
        self.guards: dict[Tensor, GuardedGradient] = {}

    def clear(self) -> None:
        """Forget all gradients."""
        self.empty, self.filled = set(self.views), set()

    def fill(self) -> set[Tensor]:
        """Put zeros in place of missing gradients; return their parameters."""
        missing, self.empty = self.empty, set()
        for parameter in missing:
            self.views[parameter].zero_()
        self.filled |= missing
        return missing
