"""The order of samples: a function of (seed, epoch) alone, cut over replicas and microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

from ..grid.random import derive


class BatchOrder(Sampler[list[int]]):
    """The samples of each of one replica's microbatches, for one epoch; whoever reads it to the end begins the next.

    Global batch k holds the same samples on every grid: of a permutation drawn from (seed, epoch), the k-th
    ``train`` ones. A replica takes a contiguous part of them, and its microbatches parts of that.

    Args:
        samples: of the data set.
        train, micro: samples of a global batch, and of a microbatch.
        replica, replicas: which one this is, and of how many.
        seed: of the order.
        drop_last: leave samples out of an epoch that do not fill a last global batch; else the epoch's first ones fill
            it up.

    Attributes:
        epoch: the next one; ``first`` global batches at its start are passed over, once.
    """

    def __init__(
        self, samples: int, train: int, micro: int, replica: int, replicas: int, seed: int, drop_last: bool = True
    ) -> None:
        if samples < train:
            raise ValueError(f"training_data has {samples} samples, less than one global batch of {train}")
        self.samples, self.train, self.micro = samples, train, micro
        self.replica, self.replicas, self.seed = replica, replicas, seed
        self.batches = samples // train if drop_last else -(-samples // train)  # global ones, of an epoch
        self.epoch = self.first = 0

    def __iter__(self) -> Iterator[list[int]]:
        epoch, first, self.first = self.epoch, self.first, 0
        generator = torch.Generator().manual_seed(derive(self.seed, "data", epoch))
        order = torch.randperm(self.samples, generator=generator).tolist()
        order += order[: max(0, self.batches * self.train - self.samples)]
        for batch in range(first, self.batches):
            yield from _cut(order[batch * self.train : (batch + 1) * self.train], self)
        self.epoch = epoch + 1

    def __len__(self) -> int:
        return self.batches * (self.train // self.replicas // self.micro)


class Stream(IterableDataset[list[Any]]):
    """The same of a data set that can only be read from its start to its end, whose order is its own.

    Every replica reads all of it, and keeps its part. A ``set_epoch`` of the data set is called with the epoch. Samples
    that do not fill a last global batch are left out.

    Args:
        dataset: gives samples.
        train, micro, replica, replicas: of ``BatchOrder``.
    """

    samples, batches, seed = 0, None, 0  # not known; and nothing is drawn

    def __init__(self, dataset: Iterable[Any], train: int, micro: int, replica: int, replicas: int) -> None:
        self.dataset = dataset
        self.train, self.micro, self.replica, self.replicas = train, micro, replica, replicas
        self.epoch = self.first = 0

    def __iter__(self) -> Iterator[list[Any]]:
        first, self.first = self.first, 0
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)
        source = islice(self.dataset, first * self.train, None)
        while len(batch := list(islice(source, self.train))) == self.train:
            yield from _cut(batch, self)


def _cut(batch: list[Any], of: BatchOrder | Stream) -> Iterator[list[Any]]:
    """A replica's microbatches of a global batch."""
    share = of.train // of.replicas
    mine = batch[of.replica * share : (of.replica + 1) * share]
    for at in range(0, share, of.micro):
        yield mine[at : at + of.micro]


class Loader(DataLoader[Any]):
    """A loader whose items are microbatches. ``len`` is those of a whole epoch.

    Each ``for`` is an epoch, and begins it anew if the last one was left early. How far it is, ``state_dict`` says;
    what it gives from there on depends on that and on the seed alone, so that the grid may be another one.

    Args:
        dataset: of samples.
        order: in which they are read; or, in place of both, a ``Stream``.
        options: of torch's loader.

    Attributes:
        turn: how often somebody went elsewhere in it.
    """

    def __init__(self, dataset: Dataset[Any], order: BatchOrder | Stream, **options: Any) -> None:
        self._order = order
        self._epoch, self._first, self._given = 0, 0, 0  # microbatches given of the epoch; global batches to pass over
        self._each = order.train // order.replicas // order.micro  # microbatches of a global batch
        self.turn = 0
        generator = torch.Generator()  # of its own: a loader must not change what the model's dropout draws
        if isinstance(order, BatchOrder):
            super().__init__(dataset, batch_sampler=order, generator=generator, **options)
        else:
            super().__init__(order, batch_size=None, generator=generator, **options)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        epoch, first, self._first = self._epoch, self._first, 0
        self._given = first * self._each
        self._order.epoch, self._order.first = epoch, first
        assert self.generator is not None
        self.generator.manual_seed(derive(self._order.seed, "workers", epoch, self._order.replica))
        for item in super().__iter__():
            self._given += 1
            yield item
        self._epoch, self._given = epoch + 1, 0

    def seek(self, step: int) -> None:
        """The next iterator begins with the microbatches of this step, counted from 0: to go on where a run ended.

        Raises:
            ValueError: of a stream, whose epochs are of unknown length: ``load_state_dict`` knows where it was.
        """
        if self._order.batches is None:
            raise ValueError(
                "seek(step) needs the length of an epoch, and an IterableDataset has none: save state_dict() and load "
                "it with load_state_dict()"
            )
        self._go(*divmod(step, self._order.batches))

    def state_dict(self) -> dict[str, int]:
        """Where the next global batch begins: plain numbers. Of a batch that was given in part, its beginning."""
        epoch, batches, order = self._epoch, self._given // self._each, self._order
        if batches == order.batches:
            epoch, batches = epoch + 1, 0
        return {"epoch": epoch, "sample": batches * order.train, "samples": order.samples, "seed": order.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there: with as many replicas and samples in a batch as one likes, if a batch begins there.

        Raises:
            ValueError: it is of another data set or seed, or in the middle of a global batch of this size.
        """
        order = self._order
        for key, mine in (("samples", order.samples), ("seed", order.seed)):
            if state[key] != mine:
                raise ValueError(f"the position is of training_data with {key} {state[key]}, and here it is {mine}")
        first, middle = divmod(state["sample"], order.train)
        if middle:
            raise ValueError(
                f"{state['sample']} samples of epoch {state['epoch']} were read, which is no multiple of the global "
                f"batch of {order.train}: set train_batch_size to what it was, or to a divisor of that"
            )
        if order.batches is not None and first >= order.batches:
            self._go(state["epoch"] + 1, 0)
        else:
            self._go(state["epoch"], first)

    def advance(self, microbatches: int) -> None:
        """As many as that were read elsewhere: on ranks that read no data, so that all are at the same place."""
        self._given += microbatches
        if self._order.batches is not None:
            epochs, self._given = divmod(self._given, self._order.batches * self._each)
            self._epoch += epochs

    def _go(self, epoch: int, first: int) -> None:
        self._epoch, self._first, self._given = epoch, first, first * self._each
        self.turn += 1


class RepeatingLoader:
    """An iterator over a loader that begins it again at its end, for ever: DeepSpeed's class of this name.

    Args:
        loader: anything that can be iterated over again and again.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._turn = -1
        self._items: Iterator[Any] = iter(())

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        turn = getattr(self.loader, "turn", 0)
        if turn != self._turn:  # the first time, or it was told to go on elsewhere
            self._turn, self._items = turn, iter(self.loader)
        try:
            return next(self._items)
        except StopIteration:
            self._items = iter(self.loader)
            return next(self._items)


def make_loader(
    dataset: Any,
    train: int,
    micro: int,
    replica: int,
    replicas: int,
    seed: int,
    *,
    drop_last: bool = True,
    collate: Callable[[list[Any]], Any] | None = None,
    workers: int = 0,
    pin_memory: bool = False,
) -> Loader:
    """A loader whose items are microbatches.

    Args:
        dataset: with a length, or an ``IterableDataset``.
        train, micro, replica, replicas, seed, drop_last: of ``BatchOrder``.
        collate: makes a microbatch of a list of samples; by default torch's.
        workers: processes that read ahead; 0: this one reads.
        pin_memory: of torch's loader.

    Raises:
        ValueError: less than one global batch of data, or several workers for a stream.
        TypeError: the data set has neither a length nor an order of its own.
    """
    options: dict[str, Any] = {"collate_fn": collate, "num_workers": workers, "pin_memory": pin_memory}
    if isinstance(dataset, IterableDataset):
        if workers > 1:
            raise ValueError(
                f"{workers} workers would each read the whole IterableDataset: give num_local_io_workers=1, which "
                "reads ahead, or a data set with a length"
            )
        options["collate_fn"] = collate or default_collate
        return Loader(dataset, Stream(dataset, train, micro, replica, replicas), **options)
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"training_data is a {type(dataset).__name__}: give a data set with a length and indices, or an "
            "IterableDataset"
        )
    return Loader(dataset, BatchOrder(len(dataset), train, micro, replica, replicas, seed, drop_last), **options)
