"""The sharded optimizer: each rank steps the range it owns, then every rank gets all of it (ZeRO)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from .arriving import publish
from .buckets import Bucket
from .subgroups import SubGroups

# A shard is a flat range that starts and ends anywhere: only optimizers that treat every element alone can step it.
# (Adafactor, LBFGS and Muon need whole tensors.)
ELEMENTWISE = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def needs_whole_tensors(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether it is one of torch's, or made from one, that does not treat every element alone."""
    bases = [base.__name__ for base in kind.__mro__ if base.__module__.startswith("torch.optim.")]
    return bool(bases) and bases[0] != "Optimizer" and bases[0] not in ELEMENTWISE


class RangeStepper:
    """Steps the owned range of each bucket with one of torch's own optimizers, on flat tensors.

    The optimizer must work element by element (Adam, AdamW, SGD, ...): a flat range is then stepped exactly as
    its parameters would be, and holds 1/N of the state. Rajbhandari et al. 2020, section 5.1.

    Args:
        make: makes the optimizer from parameter groups.
        buckets: of this rank.
        groups: the options of each parameter group, in the order of ``Managed.group``.
        together: elements of new weights on their way to the replicas at once; None: all.

    Attributes:
        optimizer: torch's, over the owned ranges: for learning-rate schedulers and for a look at its state.
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
        self._sub_groups: SubGroups | None = None
        if self._buckets and self._buckets[0].memory.offload.portions:
            self._sub_groups = SubGroups(make, self._buckets, groups)
            self.optimizer = self._sub_groups.optimizer
            return
        owned = [[bucket.master for bucket in self._buckets if bucket.group == i] for i in range(len(groups))]
        self.optimizer = make([{**options, "params": masters} for options, masters in zip(groups, owned, strict=True)])

    def rooms(self, bucket: Bucket) -> list[Tensor]:
        """Where the state of a bucket is kept, if it is stepped in sub-groups."""
        return [] if self._sub_groups is None else [*self._sub_groups.rooms.get(bucket, {}).values()]

    @torch.no_grad()
    def step(self, scale: float, without: Collection[Tensor] = ()) -> None:
        """Scale the owned gradients, in place, by one number; step; share the result.

        Args:
            scale: one over the batch's weight, times what clipping asks for.
            without: parameters that had no gradient on any replica, which stand still, as torch's ``None`` does.
        """
        if self._sub_groups is not None:
            self._sub_groups.step(scale, without)
        else:
            self._step(scale, without)
        publish(self._buckets, self._together)

    def _step(self, scale: float, without: Collection[Tensor]) -> None:
        """All at once, where everything is in memory."""
        self._scale(scale)
        # Without a gradient, decay and momentum would move a parameter all the same.
        frozen = [part for bucket in self._buckets for part in self._frozen(bucket, without)]
        kept = [(part, part.clone()) for masters in frozen for part in masters]
        for master, *_ in frozen:
            master.zero_()  # so that decay makes nothing of state that this step makes
        self.optimizer.step()
        for part, before in kept:
            part.copy_(before)
        for bucket in self._buckets:
            bucket.update()

    def _scale(self, scale: float) -> None:
        if self._buckets and scale != 1.0:
            torch._foreach_mul_([bucket.owned_gradient for bucket in self._buckets], scale)

    def _frozen(self, bucket: Bucket, without: Collection[Tensor]) -> list[list[Tensor]]:
        """Of each span of parameters that stand still: its part of the master, and of the state."""
        master = bucket.master
        if master is None or not (spans := bucket.frozen(without)):
            return []
        state = [t for t in self.optimizer.state.get(master, {}).values() if isinstance(t, Tensor)]
        flat = [master.detach(), *(tensor for tensor in state if tensor.shape == master.shape)]
        return [[tensor[start:stop] for tensor in flat] for start, stop in spans]
