"""Numbers of a step that are summed over all ranks, in the one all-reduce at its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class StepSums(NamedTuple):
    """This rank's numbers of a step (floats, or tensors on a GPU, so that nothing waits), or their sums over all ranks.

    Attributes:
        loss: sum of the losses.
        weight: sum of the weights of the losses; None for a plain module, where each microbatch has the weight 1.
        unused: number of parameters and stages without a gradient, and of changes by hand (``UsedParameters.unused``).
        strayed: number of ranks on which the step has changed a buffer that is not broadcast yet; None if the model
            has no buffers.
    """

    loss: Any
    weight: Any
    unused: Any
    strayed: Any

    def numbers(self) -> list[Any]:
        """Return the numbers that are there."""
        return [number for number in self if number is not None]

    def summed(self, sums: Sequence[float]) -> StepSums:
        """Return the record of the sums of ``numbers``."""
        left = iter(sums)
        return StepSums(*(None if number is None else next(left) for number in self))
