"""Replicas that step on their own and meet every H steps: local SGD, and DiLoCo's outer step on what they come to.

common   the weights of the last meeting, the same on every replica
         each replica steps away from them, H times, and nothing is sent
meeting  g = mean over replicas of (common - weights)       one all-reduce, in any dtype
         v = momentum v + g;  common -= lr (g + momentum v)  Nesterov, alike on every replica
         weights = common

With lr 1 and no momentum the new common weights are the mean of the replicas': local SGD (Stich 2019, algorithm 1).
With AdamW within, lr 0.7 and momentum 0.9 it is DiLoCo (Douillard et al. 2023, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..grid import Axis
from .buckets import Bucket
from .replicas import Replicas

__all__ = ["Meetings", "Outer", "agreed_steps", "masters_of"]


@dataclass(frozen=True)
class Outer:
    """The step of a meeting: Nesterov's, as ``torch.optim.SGD(nesterov=True)`` has it.

    Attributes:
        lr: 1 with no momentum takes the replicas' mean.
        momentum: 0: none is kept.
    """

    lr: float = 1.0
    momentum: float = 0.0

    def step(self, common: Tensor, velocity: Tensor | None, gradient: Tensor) -> None:
        """Move the common weights, in place.

        Args:
            common: (numel,)
            velocity: (numel,), moved too; None without momentum.
            gradient: (numel,): the mean of the replicas' differences. It is used up.
        """
        if velocity is not None:
            velocity.mul_(self.momentum).add_(gradient)
            gradient.add_(velocity, alpha=self.momentum)
        common.sub_(gradient, alpha=self.lr)


def masters_of(buckets: Sequence[Bucket]) -> list[Tensor]:
    """What is stepped of each bucket that is trained, (numel,)."""
    return [bucket.master.detach() for bucket in buckets if bucket.master is not None]


def agreed_steps(axis: Axis, since: int, device: torch.device) -> int:
    """Steps since the last meeting, where they decide what replicas do together. Collective, 16 bytes.

    Raises:
        ValueError: on every rank: replicas have taken unlike numbers.
    """
    both = torch.tensor([since, -since], dtype=torch.int64, device=device)
    with axis.traffic.aside():
        axis.all_reduce(both, op="max")
    most, least = int(both[0]), -int(both[1])
    if most != least:
        raise ValueError(
            f"since they met, one replica has taken {most} steps and another {least}; this one {since}: have all take "
            "as many before meet(), leave() or a checkpoint; or set local_updates.type to async_diloco, in which they "
            "may meet and leave after unlike numbers"
        )
    return most


class Meetings:
    """The common weights, and the meetings at which they move. Collective over the data axis.

    Args:
        replicas: of this replica alone: all of each bucket is its own.
        axis: over which the replicas meet.
        outer: what a meeting does.
        dtype: in which differences travel; None: that of the masters.
        average: average the optimizer's state too, element by element, in the dtype it has.

    Attributes:
        buckets: those that are trained.
        common: of each bucket, (numel,).
        velocity: of each bucket, (numel,); none without momentum.
        met: meetings so far.
    """

    def __init__(
        self, replicas: Replicas, axis: Axis, outer: Outer, dtype: torch.dtype | None = None, average: bool = False
    ) -> None:
        self._replicas, self._axis, self.outer = replicas, axis, outer
        self._average = average
        self.buckets = [bucket for bucket in replicas.buckets if bucket.trained]
        self._masters = masters_of(self.buckets)
        self._dtypes = [dtype if dtype and m.is_floating_point() else m.dtype for m in self._masters]
        self.met = 0
        for master in self._masters:  # all begin with the first one's
            axis.broadcast(master)
        self.common = [master.clone() for master in self._masters]
        self.velocity = [torch.zeros_like(master) for master in self._masters] if outer.momentum else []
        self._show()

    @torch.no_grad()
    def meet(self) -> None:
        """Bring the replicas together: afterwards all have the new common weights. Collective."""
        for number, (master, common) in enumerate(zip(self._masters, self.common, strict=True)):
            sent = self.difference(number)
            self._axis.all_reduce(sent)
            self.outer.step(common, self._velocity(number), sent.to(common.dtype).div_(self._axis.size))
            master.copy_(common)
        self._show()
        if self._average:
            self._average_state()
        self.met += 1

    def difference(self, number: int, start: Tensor | None = None) -> Tensor:
        """How far a bucket's weights have come from ``start`` (by default the common ones), (numel,), as it travels."""
        difference = (self.common[number] if start is None else start) - self._masters[number]
        return difference.to(self._dtypes[number])

    @contextmanager
    def commonly(self) -> Iterator[None]:
        """Within it the model has the common weights of the last meeting. Nothing is sent."""
        own = [master.clone() for master in self._masters]
        self.take(self.common)
        try:
            yield
        finally:
            self.take(own)

    @torch.no_grad()
    def take(self, weights: Sequence[Tensor]) -> None:
        """Give the model these weights, (numel,) for each bucket."""
        for master, new in zip(self._masters, weights, strict=True):
            master.copy_(new)
        self._show()

    def adopt(self) -> None:
        """What the model has now, alike on every replica, is common; momentum begins anew."""
        for common, master in zip(self.common, self._masters, strict=True):
            common.copy_(master)
        for velocity in self.velocity:
            velocity.zero_()

    def held(self) -> int:
        """Bytes that this rank holds for it between two steps."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.common, *self.velocity))

    def bytes_of(self) -> tuple[float, float]:
        """Bytes that this rank sends in a meeting, by the formula; and for a step whose gradients are all-reduced.

        An all-reduce of M bytes over N replicas sends 2 (N-1)/N M from each.
        """
        share = 2 * (self._axis.size - 1) / self._axis.size
        meeting = sum(m.numel() * dtype.itemsize for m, dtype in zip(self._masters, self._dtypes, strict=True))
        return share * meeting, share * sum(master.numel() * master.element_size() for master in self._masters)

    def _velocity(self, number: int) -> Tensor | None:
        return self.velocity[number] if self.velocity else None

    def _show(self) -> None:
        for bucket in self.buckets:
            bucket.update()

    def _average_state(self) -> None:
        """The mean of what the replicas' optimizers remember of each element."""
        optimizer = self._replicas.optimizer
        assert optimizer is not None
        kept: list[list[Tensor]] = []
        for bucket in self.buckets:
            assert bucket.master is not None
            state = optimizer.state.get(bucket.master, {})
            kept.append([v for v in state.values() if isinstance(v, Tensor) and v.shape == bucket.master.shape])
        # A replica whose every step so far was skipped has no state yet: then nobody's is averaged.
        counts = torch.tensor([len(each) for each in kept], dtype=torch.int64, device=self._replicas.device)
        least, most = counts.clone(), counts.clone()
        self._axis.all_reduce(least, op="min")
        self._axis.all_reduce(most, op="max")
        for each, alike in zip(kept, (least == most).tolist(), strict=True):
            for value in each if alike else ():
                self._axis.all_reduce(value)
                value.div_(self._axis.size)
