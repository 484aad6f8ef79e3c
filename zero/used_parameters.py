"""Parameters that have a gradient in a step, on any replica: the optimizer leaves the others out, as torch's do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..grid import Axis, Grid
from .bucket import Bucket
from .gradient_access import GradientAccess
from .gradients import GradientReducer
from .written_weights import WrittenWeights


class UsedParameters:
    """Trained parameters of this rank that have a gradient in the step, and the agreement of the replicas on them.

    Before they agree, the replicas compare what user code has changed by hand: gradients, and weights.

    Args:
        buckets: the trained buckets.
        grid: the grid of the replicas.
        reducer: notes which gradients the backward passes have given.
        access: notes if user code has read or changed gradients.
        written: notes if user code has written to weights.
        compressed: True if the replicas' gradients are compressed.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        grid: Grid,
        reducer: GradientReducer,
        access: GradientAccess,
        written: WrittenWeights,
        compressed: bool,
    ) -> None:
        self._buckets, self._grid, self._compressed = buckets, grid, compressed
        self._reducer, self._access, self._written = reducer, access, written
        self._parameters = [member.parameter for bucket in buckets for member in bucket.members]
        self._elsewhere: set[Tensor] = set()  # parameters with a gradient on replicas outside of the grid

    @property
    def by_hand(self) -> int:
        """Number of the kinds of values, gradients and weights, that user code has changed in this step."""
        return int(self._access.touched) + bool(self._written)

    def unused(self) -> int:
        """Return the number of parameters without a gradient on this rank in this step.

        It is larger if user code has read or changed gradients, or written to weights: ``agree`` must then be called.
        """
        return len(self._reducer.unused()) + self.by_hand

    def flags(self) -> Tensor:
        """Return 1 for each parameter that has a gradient on this rank in this step, else 0, float64 in host memory."""
        unused = self._reducer.unused()
        return torch.tensor([float(p not in unused) for p in self._parameters], dtype=torch.float64)

    def use_elsewhere(self, counts: Tensor) -> None:
        """Set, for ``agree``, on how many replicas, this one included, ``flags`` was 1."""
        self._elsewhere = {p for p, count in zip(self._parameters, counts.tolist(), strict=True) if count}

    def agree(self, axes: Sequence[Axis]) -> set[Tensor]:
        """Return the parameters without a gradient on any replica. Collective.

        It also makes what user code has written to weights part of the masters.

        Args:
            axes: the axes of the replicas, and of the shards of a parameter.

        Raises:
            RuntimeError: user code has changed gradients or weights differently on different replicas.
        """
        unused = self._reducer.unused() - self._elsewhere
        if self._compressed:  # a residual of earlier steps may be all of a gradient
            pairs = [(bucket, member.parameter) for bucket in self._buckets for member in bucket.members]
            unused = {p for bucket, p in pairs if p in unused and not bucket.gradient_of(p).any()}
        changed, written = self._access.touched, bool(self._written)
        while True:
            flags = [written, changed, *(parameter not in unused for parameter in self._parameters)]
            most = torch.tensor(flags, dtype=torch.uint8, device=self._grid.device)
            for axis in axes:
                axis.all_reduce(most, op="max")
            any_written, any_changed, *used = most.tolist()
            if any_written:
                self._written.require_equal()
                self._written.take()
                self._written.forget()
                written = False
            elif any_changed:
                self._access.require_equal(self._grid.data_context)
                changed = False
            else:
                return {parameter for parameter, flag in zip(self._parameters, used, strict=True) if not flag}
