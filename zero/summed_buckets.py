"""Buckets by how they keep the sum of their gradients over the replicas: whole or transient.

                    gradients                                 owned_gradient
WholeBucket         of all passes; after the sum, reduced     a view of them
  stages 0, 1, ties
TransientBucket     of one pass, or of a step; freed when     the parts of the sums, which add up
  stages 2, 3       their sum starts
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ..grid import Axis
from ..grid.comm.pending import Done, Pending, Then
from .bucket import Bucket
from .flat import PARTIAL
from .gradient_buffer import GradientBuffer


class WholeBucket(Bucket):
    """Bucket whose gradients stay whole on every rank. They are summed once a step, in place."""

    transient = False

    def _make_owned_gradient(self) -> None:
        self._set_gradients(torch.zeros_like(self.weights, dtype=self._accumulation_dtype))

    def begin(self) -> None:
        super().begin()
        if self.is_copied:
            buffer = self._made_buffer()
            buffer.clear()
            self._clear_padding(buffer.flat)
        else:
            self._buffer = None
            self._set_owned_gradient(self.owned_gradient.new_empty(0))

    def _start_sum(self, gradients: Tensor) -> Pending:
        return self.sum() if self._sums_here else Done()

    def reopen(self, tensor_axis: Axis) -> None:
        """Let another backward pass of the step add to gradients that ``start_reduction`` has summed already.

        One rank keeps each sum, and the others set theirs to zero, so that the next reduction gives the sum of all
        passes. (In a transient bucket the parts of the sums add up.)
        """
        if self.gradients is None:
            return
        if self._sums_here:  # over the data axis
            start, stop = self.owned
            if not self.counts:
                start = stop
            self._copies_summed = False
            self.gradients[:start].zero_()
            self.gradients[stop:].zero_()
        if not tensor_axis.is_first:
            self.gradients[slice(*self.flat.runs[PARTIAL])].zero_()
        if self._prescale != 1.0:
            self.gradients.div_(self._prescale)

    def complete(self) -> None:
        if self._buffer is None:  # on one replica, without a gradient
            self._made_buffer().fill()

    def _set_gradients(self, gradients: Tensor, views: Sequence[Tensor] | None = None) -> GradientBuffer:
        self._set_owned_gradient(gradients[slice(*self.owned)] if self.sharded else gradients)
        return super()._set_gradients(gradients, views)


class TransientBucket(Bucket):
    """Bucket whose gradients are freed when their sum starts, after each backward pass or once a step.

    A step's ``owned_gradient`` is undefined (``_summed`` is False) until the first sum has ended.
    """

    transient = True
    _summed = False

    def _make_owned_gradient(self) -> None:
        self._set_owned_gradient(self.memory.states.zeros(self.owned_numel, self._accumulation_dtype))

    @property
    def _keeps_sum(self) -> bool:
        """True if the sum itself becomes the owned gradient: it is the only one of the step.

        Sub-groups have views of the owned gradient, which must stay.
        """
        return not self.reduces_every_backward and not self.memory.offload.portions

    def begin(self) -> None:
        super().begin()
        self._summed, self._buffer = False, None
        if self._keeps_sum:
            self._set_owned_gradient(self.owned_gradient.new_empty(0))  # until the sum takes its place

    def discard(self, parameter: Tensor, event: Literal["zero", "drop"]) -> None:
        super().discard(parameter, event)
        if self._summed:
            low, high = self.owned
            start, stop = (min(max(bound, low), high) for bound in self.span(parameter))  # type: ignore[arg-type]
            self.owned_gradient[start - low : stop - low].zero_()

    def _start_sum(self, gradients: Tensor) -> Pending:
        self._buffer = None
        if self.direct and self.shown.access is None:
            for member in self.members:
                member.parameter.grad = None  # a view of them, which would keep them
        part, pending = self._start_part(gradients)
        return Then(pending, lambda: self._accumulate(part))

    def complete(self) -> None:
        if not self._summed:
            device = self.owned_gradient.device
            self._accumulate(torch.zeros(self.owned_numel, dtype=self._accumulation_dtype, device=device))

    def _accumulate(self, part: Tensor) -> None:
        """Add the owned range of a sum over the data axis, (owned_numel,), to ``owned_gradient``."""
        if self._copies_summed:  # by a pass before this one: one copy keeps the sum
            self._copies_summed = False
            if not self.counts:
                self.owned_gradient.zero_()
        if not self._summed and self._keeps_sum:
            part = part.to(self._accumulation_dtype)
            alone = part.untyped_storage().nbytes() == part.numel() * part.element_size()
            self._set_owned_gradient(part if alone else part.clone())
        else:
            self.memory.states.accumulate(self.owned_gradient, part, first=not self._summed)
        self._summed = True
        self.memory.evict(self.owned_gradient)
