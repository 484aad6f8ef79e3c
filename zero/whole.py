"""An optimizer that needs whole tensors, in stage 0: it steps views of the flat weights, in the tensors' own shapes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .buckets import Bucket
from .optimizer import MakeOptimizer, RangeStepper


@dataclass(frozen=True)
class WholeTensors:
    """Says of what makes an optimizer that it is one for whole tensors (Adafactor, Muon)."""

    make: MakeOptimizer

    def __call__(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Make it from parameter groups."""
        return self.make(groups)


class WholeStepper(RangeStepper):
    """Steps each tensor as a whole, on every replica alike: for stage 0, where all of them have all of it.

    Arguments and attributes are those of ``RangeStepper``; the optimizer is over tensors of the parameters' shapes.
    """

    def __init__(
        self,
        make: MakeOptimizer,
        buckets: Sequence[Bucket],
        groups: Sequence[dict[str, Any]],
        together: int | None = None,
    ) -> None:
        self._together = together
        self._buckets = [bucket for bucket in buckets if bucket.trained]
        self._sub_groups = None
        self._views: list[tuple[Tensor, nn.Parameter, Bucket, slice]] = []  # a parameter, its master, and where it lies
        chosen: list[list[nn.Parameter]] = [[] for _ in groups]
        for bucket in self._buckets:
            assert bucket.master is not None and bucket.group is not None
            for slot, member in zip(bucket.flat.slots, bucket.members, strict=True):
                span, shape = slice(slot.start, slot.stop), member.parameter.shape
                master = nn.Parameter(bucket.master.detach()[span].view(shape))
                self._views.append((member.parameter, master, bucket, span))
                chosen[bucket.group].append(master)
        self.optimizer = make([{**options, "params": some} for options, some in zip(groups, chosen, strict=True)])

    def _step(self, scale: float, without: Collection[Tensor]) -> None:
        self._scale(scale)
        for parameter, master, bucket, span in self._views:
            stands = not parameter.requires_grad or (len(without) > 0 and parameter in without)
            master.grad = None if stands else bucket.owned_gradient[span].view(master.shape)
        self.optimizer.step()
        for bucket in self._buckets:
            bucket.update()
