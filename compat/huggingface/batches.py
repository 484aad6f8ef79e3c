"""Batches of the replicas in the Trainer: the rows of one process, none of them twice.

accelerate fills the last batches of an epoch with the epoch's first rows, so that all processes have equally many full
batches. Here the last batch of a replica has its own rows only. A replica without any gets one row, which counts
nothing: ``share`` is 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import BatchSampler

from ...grid.loss_terms import Loss


class EvenBatches(BatchSampler):
    """Batches of another sampler, and behind them batches of one row until each replica has equally many.

    >>> rows = BatchSampler(range(5), batch_size=2, drop_last=False)
    >>> list(EvenBatches(rows, 2))
    [[0, 1], [2, 3], [4], [0]]
    >>> [EvenBatches(rows, 2).share(replica) for replica in range(2)]
    [2.0, 0.0]

    Args:
        batches: the sampler of all rows, in batches of a replica's size.
        replicas: number of replicas; batch ``i`` is trained by replica ``i % replicas``.
    """

    def __init__(self, batches: Any, replicas: int) -> None:
        super().__init__(batches.sampler, batches.batch_size, batches.drop_last)
        self.batches, self.replicas = batches, replicas

    def _missing(self) -> int:
        return 0 if self.drop_last else -len(self.batches) % self.replicas

    def __len__(self) -> int:
        return len(self.batches) + self._missing()

    def __iter__(self) -> Iterator[list[int]]:
        first: list[int] = []
        for batch in self.batches:
            first = first or batch[:1]
            yield batch
        for _ in range(self._missing()):
            yield list(first)

    def share(self, replica: int) -> float:
        """Return the rows of a replica's last batch, divided by the mean over the replicas."""
        rows = len(self.sampler) % (self.batch_size * self.replicas)  # type: ignore[arg-type]
        if rows == 0 or self.drop_last:
            return 1.0
        own = min(max(rows - replica * self.batch_size, 0), self.batch_size)
        return own * self.replicas / rows


def last_share(loader: Any, replica: int) -> float:
    """Return ``EvenBatches.share`` of a data loader; 1 if it has another sampler."""
    sampler = getattr(loader, "batch_sampler", None)
    while sampler is not None and not isinstance(sampler, EvenBatches):
        sampler = getattr(sampler, "batch_sampler", None)  # accelerate's, of a replica and of a resumed epoch
    return 1.0 if sampler is None else sampler.share(replica)


def weighted(loss: Any, share: float, is_divided: bool) -> Any:
    """Return a replica's loss, weighted so that the mean over the replicas is the loss of one process.

    Args:
        loss: the loss, or named losses.
        share: the replica's rows divided by the mean over the replicas.
        is_divided: the loss is a sum divided by a number of all replicas' items; rows then need no weight.
    """
    if isinstance(loss, Loss):
        metrics = {name: _metric(value, share) for name, value in loss.metrics.items()}
        return Loss(weighted(loss.terms, share, False), loss.factors, metrics)
    if isinstance(loss, Mapping):
        return {name: weighted(value, share, False) for name, value in loss.items()}
    if isinstance(loss, tuple):  # the engine divides each replica's pair by its own weight
        return loss[0] * share, loss[1]
    return loss * (bool(share) if is_divided else share)


def _metric(value: Any, share: float) -> Any:
    return (value[0] * bool(share), value[1] * bool(share)) if isinstance(value, tuple) else value * share


def without_labels(inputs: Any) -> Any:
    """Return inputs whose labels count nothing."""
    return {**inputs, "labels": torch.full_like(inputs["labels"], -100)} if "labels" in inputs else inputs
