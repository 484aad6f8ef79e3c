"""The order of samples: a function of (seed, epoch) alone, cut over replicas and microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from ..grid.random import derive


class BatchOrder(Sampler[list[int]]):
    """The samples of each of one replica's microbatches, for one epoch; whoever reads it to the end begins the next.

    Global batch k holds the same samples on every grid: of a permutation drawn from (seed, epoch), the k-th
    ``train`` ones. A replica takes a contiguous part of them, and its microbatches parts of that. Samples that do
    not fill a last global batch are left out of that epoch.
    """

    def __init__(self, samples: int, train: int, micro: int, replica: int, replicas: int, seed: int) -> None:
        if samples < train:
            raise ValueError(f"training_data has {samples} samples, less than one global batch of {train}")
        self._samples, self._train, self._micro = samples, train, micro
        self._replica, self._replicas, self._seed = replica, replicas, seed
        self.epoch = 0
        self._skip = 0  # global batches at the start of the next epoch that were trained on already

    def seek(self, step: int) -> None:
        """Whoever reads next begins with the global batch of this step, counted from 0, on whatever grid."""
        self.epoch, self._skip = divmod(step, self._samples // self._train)

    def __iter__(self) -> Iterator[list[int]]:
        epoch, skip = self.epoch, self._skip
        self._skip = 0
        generator = torch.Generator().manual_seed(derive(self._seed, "data", epoch))
        order = torch.randperm(self._samples, generator=generator).tolist()
        share = self._train // self._replicas
        for start in range(skip * self._train, self._samples - self._train + 1, self._train):
            mine = order[start + self._replica * share : start + (self._replica + 1) * share]
            for at in range(0, share, self._micro):
                yield mine[at : at + self._micro]
        self.epoch = epoch + 1

    def __len__(self) -> int:
        return self._samples // self._train * (self._train // self._replicas // self._micro)


class Loader(DataLoader[Any]):
    """A loader whose items are microbatches. ``len`` is those of a whole epoch."""

    def seek(self, step: int) -> None:
        """The next iterator begins with the microbatches of this step, counted from 0: to go on where a run ended.

        What it gives depends on the step and the seed alone, so that the grid may be another one.
        """
        order = self.batch_sampler
        assert isinstance(order, BatchOrder)
        order.seek(step)


def make_loader(
    dataset: Dataset[Any],
    order: BatchOrder,
    collate: Callable[[list[Any]], Any] | None,
    workers: int = 0,
    pin_memory: bool = False,
) -> Loader:
    """A loader whose items are microbatches, read by so many processes (0: by this one)."""
    return Loader(dataset, batch_sampler=order, collate_fn=collate, num_workers=workers, pin_memory=pin_memory)


def repeat(loader: DataLoader[Any]) -> Iterator[Any]:
    """The loader's microbatches, epoch after epoch, each in an order of its own."""
    while True:
        yield from loader
