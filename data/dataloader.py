"""Data loaders of microbatches, whose order of samples depends on (seed, epoch) alone and not on the grid.

BatchOrder         samples of a replica's microbatches, for a data set with a length
Stream             microbatches of a data set that is read from start to end
Loader             torch's loader over one of these; its position can be saved and set
RepeatingLoader    starts a loader again at its end
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

from ..base.checks import check_seed
from ..base.seeds import derive
from .balance import Balance
from .token_data import TokenData
from .token_loader import TokenLoader


class BatchOrder(Sampler[list[int]]):
    """Sampler: the samples of each microbatch of one replica, for one epoch. Read to its end, it starts the next epoch.

    Global batch k holds the same samples on every grid: number k * ``train`` to (k + 1) * ``train`` of a permutation
    drawn from (seed, epoch). A replica takes a contiguous part of them, and its microbatches parts of that.

    Args:
        samples: number of samples in the data set.
        train, micro: number of samples in a global batch, and in a microbatch.
        replica, replicas: this replica's number, and the number of replicas.
        seed: seed of the permutation.
        drop_last: leave out the samples of an epoch that do not fill a last global batch; if False, the epoch's first
            samples fill it.

    Attributes:
        batches: number of global batches in an epoch.
        epoch: number of the epoch that the next iterator reads.
        first: number of global batches that the next iterator skips, once; set to resume a run.
    """

    def __init__(
        self, samples: int, train: int, micro: int, replica: int, replicas: int, seed: int, drop_last: bool = True
    ) -> None:
        if samples < train:
            raise ValueError(f"training_data has {samples} samples, less than one global batch of {train}.")
        self.samples, self.train, self.micro = samples, train, micro
        self.replica, self.replicas, self.seed = replica, replicas, check_seed(seed)
        self.batches = samples // train if drop_last else -(-samples // train)
        self.epoch = self.first = 0
        self._drawn, self._order = -1, torch.empty(0, dtype=torch.int64)  # the order of an epoch

    def __iter__(self) -> Iterator[list[int]]:
        epoch, first, self.first = self.epoch, self.first, 0
        if self._drawn != epoch:  # once for an epoch: ``fault_tolerance`` sets the position in every step
            generator = torch.Generator().manual_seed(derive(self.seed, "data", epoch))
            self._order = torch.randperm(self.samples, generator=generator)
            rest = self.batches * self.train - self.samples
            self._order = torch.cat([self._order, self._order[: max(0, rest)]])
            self._drawn = epoch
        order = self._order
        for batch in range(first, self.batches):
            yield from _cut(order[batch * self.train : (batch + 1) * self.train].tolist(), self)
        self.epoch = epoch + 1

    def __len__(self) -> int:
        return self.batches * (self.train // self.replicas // self.micro)


class Stream(IterableDataset[list[Any]]):
    """Microbatches of one replica, from a data set that is only read from start to end, in its own order.

    Every replica reads all samples and keeps its part. If the data set has ``set_epoch``, it is called with the epoch.
    Samples that do not fill a last global batch are left out.

    Args:
        dataset: an iterable of samples.
        train, micro, replica, replicas: as in ``BatchOrder``.
    """

    samples, batches, seed = 0, None, 0  # unknown; and nothing is drawn

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
    """Yield a replica's microbatches of a global batch."""
    share = of.train // of.replicas
    rows = batch[of.replica * share : (of.replica + 1) * share]
    for at in range(0, share, of.micro):
        yield rows[at : at + of.micro]


class Loader(DataLoader[Any]):
    """torch's ``DataLoader`` with microbatches as items. ``len`` is the number of microbatches in a whole epoch.

    Each ``for`` loop is an epoch; after a loop that was left early, the same epoch starts again. ``state_dict`` holds
    the position. The microbatches from there on depend on the position and on the seed alone, also on another grid.

    Args:
        dataset: data set of samples.
        order: order of the samples, or a ``Stream``, which is then used in place of ``dataset``.
        options: further options of torch's ``DataLoader``.

    Attributes:
        seeks: number of times that the position was set. ``RepeatingLoader`` starts a new iterator when it changes.
    """

    def __init__(self, dataset: Dataset[Any], order: BatchOrder | Stream, **options: Any) -> None:
        self._order = order
        self._epoch = 0
        self._first = 0  # global batches to skip at the start of the next iterator
        self._read = 0  # microbatches of the epoch that were read
        self._batch_length = order.train // order.replicas // order.micro  # microbatches of a global batch
        self.seeks = 0
        generator = torch.Generator()  # its own: a loader must not change the numbers that the model draws
        if isinstance(order, BatchOrder):
            super().__init__(dataset, batch_sampler=order, generator=generator, **options)
        else:
            super().__init__(order, batch_size=None, generator=generator, **options)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        epoch, first, self._first = self._epoch, self._first, 0
        self._read = first * self._batch_length
        self._order.epoch, self._order.first = epoch, first
        assert self.generator is not None
        self.generator.manual_seed(derive(self._order.seed, "workers", epoch, self._order.replica))
        for item in super().__iter__():
            self._read += 1
            yield item
        self._epoch, self._read = epoch + 1, 0

    def seek(self, step: int) -> None:
        """Start the next iterator with the microbatches of this step, counted from 0, to resume a run.

        Raises:
            ValueError: the data set is a stream, whose epochs have no known length. Use ``load_state_dict`` instead.
        """
        if self._order.batches is None:
            raise ValueError(
                "seek(step) needs the length of an epoch, but an IterableDataset has none. Save state_dict() and load "
                "it with load_state_dict()."
            )
        self._seek(*divmod(step, self._order.batches))

    def state_dict(self) -> dict[str, int]:
        """Return the position: epoch and first sample of the next global batch, or of the one that was read in part.

        It also has the number of samples and the seed, which ``load_state_dict`` compares.
        """
        epoch, batches, order = self._epoch, self._read // self._batch_length, self._order
        if batches == order.batches:
            epoch, batches = epoch + 1, 0
        return {"epoch": epoch, "sample": batches * order.train, "samples": order.samples, "seed": order.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set the position. The grid and the batch size may differ from the saved ones if a global batch starts there.

        Raises:
            ValueError: a state of another data set or seed, or in the middle of a global batch of this size.
        """
        order = self._order
        for key in ("epoch", "sample"):
            if type(state.get(key)) is not int or not 0 <= state[key] < 2**62:
                raise ValueError(f"{key} of the position is {state.get(key)!r}, but it must be a number from 0 on")
        for key, expected in (("samples", order.samples), ("seed", order.seed)):
            if state.get(key) != expected:
                raise ValueError(
                    f"The position belongs to training_data with {key} {state.get(key)}, but here it is {expected}."
                )
        first, middle = divmod(state["sample"], order.train)
        if middle:
            raise ValueError(
                f"{state['sample']} samples of epoch {state['epoch']} were read, which is not a multiple of the global "
                f"batch of {order.train}. Set the batch size to its former value, or to a divisor of it."
            )
        if order.batches is not None and first >= order.batches:
            self._seek(state["epoch"] + 1, 0)
        else:
            self._seek(state["epoch"], first)

    def advance(self, microbatches: int) -> None:
        """Advance the position by microbatches that other ranks read, so that all ranks save the same position."""
        self._read += microbatches
        if self._order.batches is not None:
            epochs, self._read = divmod(self._read, self._order.batches * self._batch_length)
            self._epoch += epochs

    def _seek(self, epoch: int, first: int) -> None:
        self._epoch, self._first, self._read = epoch, first, first * self._batch_length
        self.seeks += 1


class RepeatingLoader:
    """Iterator over a loader that starts it again at its end, without end.

    >>> loader = triax.RepeatingLoader(["a", "b", "c"])
    >>> [next(loader) for _ in range(5)]
    ['a', 'b', 'c', 'a', 'b']

    Args:
        loader: an object that can be iterated over repeatedly.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._seeks = -1
        self._items: Iterator[Any] = iter(())

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        seeks = getattr(self.loader, "seeks", 0)
        if seeks != self._seeks:  # the first time, or its position was set
            self._seeks, self._items = seeks, iter(self.loader)
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
    balance: Balance | None = None,
) -> Loader | TokenLoader:
    """Return a loader with microbatches as items.

    Args:
        dataset: with a length, or an ``IterableDataset``, or ``TokenData``, whose rows have their own order.
        train, micro, replica, replicas, seed, drop_last: as in ``BatchOrder``.
        collate: makes a microbatch of a list of samples; by default torch's function.
        workers: processes that read ahead; 0: this process reads.
        pin_memory: as in torch's loader.
        balance: as for ``TokenLoader``.

    Raises:
        ValueError: less than one global batch of data, several workers for a stream, or ``balance`` without
            ``TokenData``.
        TypeError: a data set with neither a length nor an order of its own.
    """
    if isinstance(dataset, TokenData):
        if collate is not None:
            raise ValueError(
                "collate_fn has no samples to collate, because TokenData makes whole batches. Leave it out."
            )
        threads = workers or dataset.threads
        made: dict[str, Any] = {"threads": threads, "pin_memory": pin_memory, "balance": balance}
        return TokenLoader(dataset, train, micro, replica, replicas, seed, **made)
    if balance is not None:
        raise ValueError(
            f"batch.balance deals out the documents of triax.data.TokenData, but training_data is a "
            f"{type(dataset).__name__}. Leave batch.balance out."
        )
    options: dict[str, Any] = {"collate_fn": collate, "num_workers": workers, "pin_memory": pin_memory}
    if isinstance(dataset, IterableDataset):
        if workers > 1:
            raise ValueError(
                f"{workers} workers would each read the whole IterableDataset. Give num_local_io_workers=1, which "
                "reads ahead, or a data set with a length."
            )
        options["collate_fn"] = collate or default_collate
        return Loader(dataset, Stream(dataset, train, micro, replica, replicas), **options)
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"training_data is a {type(dataset).__name__}, which has no length or no indices. Give a data set with "
            "both, or an IterableDataset."
        )
    return Loader(dataset, BatchOrder(len(dataset), train, micro, replica, replicas, seed, drop_last), **options)
