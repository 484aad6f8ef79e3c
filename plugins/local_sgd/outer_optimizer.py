"""Local SGD and DiLoCo: replicas take H optimizer steps of their own, then an outer optimizer synchronizes them.

common           weights after the last synchronization, the same on every replica
local steps      each replica takes H steps from the common weights; nothing is sent
synchronization  g = mean over replicas of (common - weights)       one all-reduce, in any dtype
                 v = momentum v + g;  common -= lr (g + momentum v)  Nesterov's step, the same on every replica
                 weights = common

With lr 1 and no momentum the new common weights are the replicas' mean: local SGD (Stich 2019, algorithm 1).
With AdamW as the inner optimizer, lr 0.7 and momentum 0.9 it is DiLoCo (Douillard et al. 2023, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ...grid.comm.axis import Axis
from ...zero.data_axis import ZeroDataAxis


@dataclass(frozen=True)
class NesterovStep:
    """Update of the outer optimizer, as ``torch.optim.SGD(nesterov=True)`` computes it.

    Attributes:
        lr: learning rate of the outer step. With 1 and no momentum, the new weights are the mean over the replicas.
        momentum: momentum of the outer step. With 0, no velocity is stored.
    """

    lr: float = 1.0
    momentum: float = 0.0

    def __call__(self, common: Tensor, velocity: Tensor | None, gradient: Tensor) -> None:
        """Update the common weights in place.

        Args:
            common: (numel,), the common weights of one bucket.
            velocity: (numel,), which is updated in place too; None without momentum.
            gradient: (numel,), the mean of the replicas' differences. It is overwritten.
        """
        if velocity is not None:
            velocity.mul_(self.momentum).add_(gradient)
            gradient.add_(velocity, alpha=self.momentum)
        common.sub_(gradient, alpha=self.lr)


def agreed_steps(axis: Axis, since: int, device: torch.device) -> int:
    """Return ``since``, after checking that it is equal on all replicas. Collective, sends 16 bytes.

    Args:
        axis: the axis of the replicas.
        since: number of optimizer steps that this replica has taken since the last synchronization.
        device: device of the message.

    Raises:
        ValueError: replicas have taken different numbers of steps. Every rank raises it.
    """
    both = torch.tensor([since, -since], dtype=torch.int64, device=device)
    with axis.traffic.uncounted():
        axis.all_reduce(both, op="max")
    most, least = int(both[0]), -int(both[1])
    if most != least:
        raise ValueError(
            f"since the last synchronization one replica has taken {most} steps and another {least}; this one "
            f"{since}: let all take the same number before synchronize(), leave() or a checkpoint; or set "
            "local_updates.type to async_diloco, in which they may synchronize and leave after different numbers of "
            "steps"
        )
    return most


class OuterOptimizer:
    """Common weights of the replicas, and the outer steps that update them. Collective over the data axis.

    Args:
        data_axis: the data axis of this replica alone, in which every bucket is unsharded.
        axis: the axis of the replicas.
        step: the update of the outer optimizer.
        dtype: dtype in which differences are sent; None means the dtype of the master weights.
        average: average the state of the inner optimizer over the replicas too, element by element, in the dtype of
            that state.

    Attributes:
        asynchronous: True if a replica does not wait for the others at a synchronization.
        common: the common weights, one tensor (numel,) for each trained bucket.
        start: the weights at the start of this round, one tensor (numel,) for each bucket; here the common weights.
        velocity: the velocity of the outer optimizer, one tensor (numel,) for each bucket; empty without momentum.
        synchronizations: number of synchronizations so far.
    """

    asynchronous = False

    def __init__(
        self,
        data_axis: ZeroDataAxis,
        axis: Axis,
        step: NesterovStep,
        dtype: torch.dtype | None = None,
        average: bool = False,
    ) -> None:
        self._data_axis, self._axis, self._step, self._average = data_axis, axis, step, average
        self._buckets = [bucket for bucket in data_axis.buckets if bucket.trained]
        self._masters = [bucket.master.detach() for bucket in self._buckets if bucket.master is not None]
        self._dtypes = [dtype if dtype and m.is_floating_point() else m.dtype for m in self._masters]
        self.synchronizations = 0
        for master in self._masters:  # all start from the first replica's
            axis.broadcast(master)
        self.common = self.start = [master.clone() for master in self._masters]
        self.velocity = [torch.zeros_like(master) for master in self._masters] if step.momentum else []
        self._update_weights()

    def end_step(self) -> bool:
        """Count an optimizer step, and return True if the round must end early, before its full number of steps."""
        return False

    @torch.no_grad()
    def synchronize(self) -> None:
        """End the round: every replica takes the new common weights. Collective."""
        self.step(self._mean_differences())
        if self._average:
            self._average_state()

    def _mean_differences(self) -> Iterator[Tensor]:
        for common, sent in zip(self.common, self.differences(), strict=True):
            self._axis.all_reduce(sent)
            yield sent.to(common.dtype).div_(self._axis.size)

    @torch.no_grad()
    def step(self, gradients: Iterable[Tensor]) -> None:
        """Take the outer step, and set the weights to the new common weights.

        Args:
            gradients: for each trained bucket (numel,), the mean of the replicas' differences. They are overwritten.
        """
        velocities: Sequence[Tensor | None] = self.velocity or [None] * len(self.common)
        for master, common, velocity, gradient in zip(self._masters, self.common, velocities, gradients, strict=True):
            self._step(common, velocity, gradient)
            master.copy_(common)
        self._update_weights()
        self.synchronizations += 1

    def synchronize_all(self, since: int) -> None:
        """Synchronize at once, unless no replica has taken a step. Collective.

        Args:
            since: steps of this replica since its last synchronization.

        Raises:
            ValueError: replicas have taken different numbers of steps. Every rank raises it.
        """
        if agreed_steps(self._axis, since, self._data_axis.device):
            self.synchronize()

    @property
    def present(self) -> list[int]:
        """Numbers of the replicas that have not left the training: all replicas, in synchronous training."""
        return list(range(self._axis.size))

    def differences(self, weight: float = 1.0) -> Iterator[Tensor]:
        """Yield ``weight`` times each bucket's weights at the start of the round minus its weights now, to be sent."""
        self._data_axis.written.take()
        for start, master, dtype in zip(self.start, self._masters, self._dtypes, strict=True):
            difference = start - master
            yield (difference if weight == 1.0 else difference.mul_(weight)).to(dtype)

    @contextmanager
    def common_weights(self) -> Iterator[None]:
        """Replace the model's weights by the common weights within this context. Nothing is sent."""
        self._data_axis.written.take()
        own = [master.clone() for master in self._masters]
        self._set_weights(self.common)
        try:
            yield
        finally:
            self._set_weights(own)

    @torch.no_grad()
    def _set_weights(self, weights: Sequence[Tensor]) -> None:
        for master, new in zip(self._masters, weights, strict=True):
            master.copy_(new)
        self._update_weights()

    def _update_weights(self) -> None:
        for bucket in self._buckets:
            bucket.update()

    def restart(self) -> None:
        """Copy the model's weights, equal on every replica, to the common weights, and set the velocity to zero."""
        self._data_axis.written.take()
        for common, master in zip(self.common, self._masters, strict=True):
            common.copy_(master)
        self.start_round()
        for velocity in self.velocity:
            velocity.zero_()

    def start_round(self) -> None:
        """Start a round by setting the model's weights to the common weights."""
        for start, common in zip(self.start, self.common, strict=True):
            start.copy_(common)

    def memory(self) -> int:
        """Return the bytes that the outer optimizer holds on this rank between two steps."""
        return total_bytes((*self.common, *self.velocity))

    def traffic_formula(self) -> tuple[float, float]:
        """Return the bytes that this rank sends in a synchronization, and in a step that all-reduces gradients.

        An all-reduce of M bytes over N replicas sends 2 (N-1)/N M from each.
        """
        share = 2 * (self._axis.size - 1) / self._axis.size
        sent = sum(m.numel() * dtype.itemsize for m, dtype in zip(self._masters, self._dtypes, strict=True))
        return share * sent, share * total_bytes(self._masters)

    def report(self) -> dict[str, float]:
        """Return the outer optimizer's additional entries for the traffic report."""
        return {}

    def _average_state(self) -> None:
        """Average the elementwise state of the inner optimizer over the replicas."""
        kept: list[list[Tensor]] = []
        for master, _ in self._data_axis.stepper.masters():
            state = self._data_axis.stepper.optimizer.state.get(master, {})
            kept.append([v for v in state.values() if isinstance(v, Tensor) and v.shape == master.shape])
        # A replica that has skipped every step so far has no state yet. In that case the state is not averaged.
        counts = torch.tensor([len(values) for values in kept], dtype=torch.int64, device=self._data_axis.device)
        least, most = counts.clone(), counts.clone()
        self._axis.all_reduce(least, op="min")
        self._axis.all_reduce(most, op="max")
        for values, everywhere in zip(kept, (least == most).tolist(), strict=True):
            for value in values if everywhere else ():
                self._axis.all_reduce(value)
                value.div_(self._axis.size)


def total_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the total number of bytes of some tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
