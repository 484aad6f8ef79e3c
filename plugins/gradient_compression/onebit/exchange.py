"""Gradient exchange of 1-bit optimizers: a plain sum in some steps, local gradients in the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ....grid import Grid
from ....zero.gradient_norm import counted_squares
from ....zero.gradients import all_reduce_gradients
from ....zero.protocols import GradientBucket


class OneBitExchange:
    """Sums gradients over the replicas in the steps that need the sum, and keeps them local in the other steps.

    Local gradients are multiplied by the number of replicas, which makes them the mean over this replica's share of
    the batch.

    Attributes:
        summed: function that returns True if the next step needs summed gradients.
        local: True while the gradients are local, and so differ between replicas.
    """

    def __init__(self, grid: Grid, buckets: Sequence[GradientBucket]) -> None:
        self._axis, self._first = grid.data_context, grid.tensor.is_first
        self.summed: Callable[[], bool] = lambda: True
        self.local = False

    def gradients(self, buckets: Sequence[GradientBucket]) -> None:
        """Sum the gradients, or scale the local ones, which then differ between replicas."""
        self.local = self._axis.size > 1 and not self.summed()
        if self._axis.size > 1 and not self.local:
            all_reduce_gradients(self._axis, buckets)
        for bucket in buckets if self.local else ():
            assert bucket.gradients is not None
            bucket.gradients.mul_(self._axis.size)

    def squares(self, buckets: Sequence[GradientBucket], device: torch.device) -> Tensor:
        """Return this rank's share of the squared norm of the local gradients, averaged over the replicas.

        The sum of the shares of all ranks of the grid is that average.
        """
        total = torch.zeros((), dtype=torch.float64, device=device)
        for bucket in buckets:
            if bucket.trained and bucket.gradients is not None:
                for part in counted_squares(bucket, bucket.gradients, self._first):
                    total += part
        return total.div_(self._axis.size)

    def state(self) -> dict[str, list[Tensor]]:
        """Return an empty dict, because the compression errors are part of the optimizer state."""
        return {}
