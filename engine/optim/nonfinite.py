"""Losses and gradients that are NaN or infinite: raise, skip the step, or go on (the option ``nan_loss``)."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from torch import Tensor

from ...base.errors import AgreedError
from ...grid import Grid
from ...zero.bucket import Bucket

MOST_IN_A_ROW = 50  # skipped steps, after which a run is at its end
Policy = Literal["raise", "skip", "ignore"]
MicrobatchLosses = Mapping[int, Sequence[Tensor | float]]  # index of a microbatch -> its loss, and maybe its weight


class NonFinitePolicy:
    """Checks the loss and the gradient norm of a step before the weights change.

    Every rank decides from the same sums, so that all decide the same. Under fp16, gradients overflow regularly and the
    loss scaler skips these steps; the loss itself is not scaled and is checked here.

    Args:
        policy: ``raise`` an error, ``skip`` the step, or ``ignore``, with which the weights are updated anyway.
        scaled: True if a loss scaler checks the gradients.

    Attributes:
        skipped: number of steps that this policy skipped.
        in_a_row: number of them since the last step that was taken.
    """

    def __init__(self, policy: Policy, scaled: bool) -> None:
        self._policy, self._scaled = policy, scaled
        self.skipped = self.in_a_row = 0

    def skips(
        self,
        grid: Grid,
        loss: float | None,
        norm: float | None,
        losses: MicrobatchLosses,
        buckets: Sequence[Bucket],
    ) -> bool:
        """Return True if the optimizer step must be skipped because the loss or the gradient norm is not finite.

        Collective if one of them is not finite, unless the policy is ``ignore``.

        Args:
            grid: the grid whose ranks take the step together.
            loss: the step's loss. None if the engine was not given a loss.
            norm: the norm of the model's gradient over all ranks. None if it was not computed.
            losses: this rank's losses.
            buckets: the parameters of this rank, to name one that is not finite, or whose gradient is not.

        Raises:
            AgreedError: on every rank, if something is not finite and the policy is ``raise``; errors of ``skip``.
        """
        if self._policy == "ignore":
            return False
        if all(value is None or math.isfinite(value) for value in (loss, None if self._scaled else norm)):
            self.in_a_row = 0
            return False
        if loss is not None and not math.isfinite(loss):
            what = f"the loss is {loss}"
        else:
            what = f"the norm of the gradient is {norm}"
        told = sorted(text for text in grid.world.all_gather_json(_describe(grid, losses, buckets)) if text)
        where = f": {'; '.join(text for _, text in told[:4])}" if told else ""
        if self._policy == "raise":
            raise AgreedError(
                f"{what}{where}. No weight was changed. Check these samples and the learning rate, or set nan_loss to "
                '"skip" to leave such steps out, or to "ignore"'
            )
        self.skip(f"{what}{where}")
        if grid.rank == 0:
            logging.getLogger("triax").warning("%s%s: step skipped (%d so far)", what, where, self.skipped)
        return True

    def skip(self, reason: str) -> None:
        """Count a step that is skipped on every rank.

        Raises:
            AgreedError: too many steps in a row were skipped, so that the run does not train.
        """
        self.skipped += 1
        self.in_a_row += 1
        if self.in_a_row >= MOST_IN_A_ROW:
            raise AgreedError(
                f"{reason}. This is the {self.in_a_row}th step in a row that is skipped, so that no weight changes any "
                "more. Lower the learning rate, look at the data and the model, or resume from an earlier checkpoint"
            )


def _describe(grid: Grid, losses: MicrobatchLosses, buckets: Sequence[Bucket]) -> tuple[int, str] | None:
    """Describe a value on this rank that is not finite: a weight, else a loss, else a gradient; None if all are finite.

    Each comes with its place in this order, in which one makes the next.
    """
    trained = [bucket for bucket in buckets if bucket.trained]
    if (name := _first_nonfinite((bucket, bucket.shard) for bucket in trained)) is not None:
        return 0, f"{grid.describe()}: the value of {name} is not finite"
    for index, (loss, *_) in sorted(losses.items()):
        if not math.isfinite(loss):
            return 1, f"{grid.describe()}: the loss of microbatch {index} is {float(loss)}"
    summed = ", summed over the replicas," if grid.data.size > 1 else ""
    name = _first_nonfinite((b, b.owned_gradient if b.gradients is None else b.gradients) for b in trained)
    return None if name is None else (2, f"{grid.describe()}: the gradient of {name}{summed} is not finite")


def _first_nonfinite(values: Iterable[tuple[Bucket, Tensor]]) -> str | None:
    """Name the first parameter whose values are not all finite; a bucket's tensor is whole or its owned range."""
    for bucket, flat in values:
        first = 0 if flat.numel() == bucket.flat.numel else bucket.owned[0]
        for slot, member in zip(bucket.flat.slots, bucket.members, strict=True):
            if not bool(flat[max(slot.start - first, 0) : max(slot.stop - first, 0)].isfinite().all()):
                return member.layout.name
    return None
