"""The sharded optimizer: each rank steps the range it owns, then every rank gets all of it (ZeRO)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from .buckets import Bucket

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

    Attributes:
        optimizer: torch's, over the owned ranges: for learning-rate schedulers and for a look at its state.
    """

    def __init__(self, make: MakeOptimizer, buckets: Sequence[Bucket], groups: Sequence[dict[str, Any]]) -> None:
        self._buckets = [bucket for bucket in buckets if bucket.trained]
        owned = [[bucket.master for bucket in self._buckets if bucket.group == i] for i in range(len(groups))]
        self.optimizer = make([{**options, "params": masters} for options, masters in zip(groups, owned, strict=True)])

    @torch.no_grad()
    def step(self, scale: Tensor | None, without: Collection[Tensor] = ()) -> None:
        """Scale the owned gradients, in place, by one number; step; share the result.

        Args:
            scale: 0-dim; one over the batch's weight, times what clipping asks for. None is 1.
            without: parameters that had no gradient on any replica, which stand still, as torch's ``None`` does.
        """
        gradients = [bucket.owned_gradient for bucket in self._buckets]
        if gradients and scale is not None:
            torch._foreach_mul_(gradients, scale)
        # Without a gradient, decay and momentum would move a parameter all the same.
        frozen = [part for bucket in self._buckets for part in self._frozen(bucket, without)]
        kept = [part.clone() for part in frozen]
        self.optimizer.step()
        for part, before in zip(frozen, kept, strict=True):
            part.copy_(before)
        under_way = [pending for bucket in self._buckets if (pending := bucket.publish()) is not None]
        for pending in under_way:
            pending.wait()

    def _frozen(self, bucket: Bucket, without: Collection[Tensor]) -> list[Tensor]:
        """The parts of a master and of its state that belong to parameters which stand still."""
        master = bucket.master
        if master is None or not (spans := bucket.frozen(without)):
            return []
        state = [t for t in self.optimizer.state.get(master, {}).values() if isinstance(t, Tensor)]
        flat = [master.detach(), *(tensor for tensor in state if tensor.shape == master.shape)]
        return [tensor[start:stop] for tensor in flat for start, stop in spans]
