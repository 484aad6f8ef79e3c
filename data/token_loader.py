"""Loader of packed rows: the microbatches of one replica, from a place that any grid resumes from, read by threads.

Global batch k has rows k * ``train`` to (k + 1) * ``train`` of the run, on every grid. A replica takes a contiguous
part of them, and its microbatches parts of that. So a microbatch is a function of its number: threads make the next
ones while the model computes, and a place is the number of a row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..base.checks import THREADS, check_seed
from ..base.errors import ConfigError
from .balance import Balance, BalancedRows
from .mixture import Rows
from .packing import IGNORED
from .token_file import Array

Batch = tuple[Any, Tensor]  # ((ids, documents), labels), or (ids, labels)


class PackedData(Protocol):
    """Protocol: the members of ``TokenData`` that a loader uses."""

    length: int
    document_mask: bool

    @property
    def facts(self) -> dict[str, Any]: ...

    def rows(self, seed: int) -> Rows: ...


class TokenLoader:
    """Iterator over the microbatches of one replica: ``((ids, documents), labels)``, int64 (micro, T) each.

    ``train_batch`` takes it as it is. Without ``document_mask`` an item is ``(ids, labels)``. Labels are the next
    tokens of the same document; -100 where there is none, or where it does not count in the loss.

    Args:
        data: the rows.
        train, micro: rows in a global batch, and in a microbatch.
        replica, replicas: this replica's number, and the number of replicas.
        seed: seed of the order of documents and rows.
        threads: threads that make microbatches ahead; 0: the caller's thread makes them.
        epochs: number of epochs, after which the iterator ends; rows without labels fill its last global batch. None:
            it never ends.
        pin_memory: copy microbatches to pinned memory, for a GPU.
        balance: rule by which the documents of a step are dealt out to microbatches (balance.py). A microbatch is then
            one row (1, L) of any length. None: microbatches are ``micro`` rows in their order.

    Attributes:
        dataset: the data.
        rows: the rows for the seed: ``rows.count`` of them are an epoch.
        seeks: number of times that the place was set.

    Raises:
        ConfigError: batch sizes that do not divide, epochs of a mixture, or too many threads.
    """

    def __init__(
        self,
        data: PackedData,
        train: int,
        micro: int,
        replica: int = 0,
        replicas: int = 1,
        seed: int = 0,
        *,
        threads: int = 1,
        epochs: int | None = None,
        pin_memory: bool = False,
        balance: Balance | None = None,
    ) -> None:
        if micro < 1 or replicas < 1 or train < 1 or train % (micro * replicas):
            raise ConfigError(
                f"A global batch of {train} rows is not a multiple of {replicas} replicas with microbatches of {micro} "
                f"rows. Give a multiple of {max(1, micro * replicas)}."
            )
        if not 0 <= replica < replicas:
            raise ConfigError(f"replica is {replica}, but there are replicas 0 to {replicas - 1}.")
        self.dataset = data
        self.rows = data.rows(check_seed(seed))
        if epochs is not None and self.rows.is_mixture:
            raise ConfigError("A mixture has no epochs, because its members end at different rows. Leave epochs out.")
        if not 0 <= threads <= THREADS:
            raise ConfigError(f"threads is {threads}, but a loader has 0 to {THREADS}. Each makes microbatches ahead.")
        if balance is not None and not data.document_mask:
            raise ConfigError("balance moves documents, but document_mask is false, with which rows count as a whole.")
        self._train, self._micro, self._seed = train, micro, seed
        self._share = train // replicas
        self._replica = replica
        self._per_batch = self._share // micro  # microbatches of a global batch
        self._balanced = None if balance is None else BalancedRows(self.rows, train, replicas, self._per_batch, balance)
        self._end = None if epochs is None else epochs * self.rows.count
        self._start = 0  # row at which the microbatches are counted
        self._read = 0  # microbatches since
        self._ahead: deque[Future[Batch]] = deque()
        self._threads, self._pin_memory = threads, pin_memory
        self._pool: ThreadPoolExecutor | None = None
        self.seeks = 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._is_over(self._read):
            self.close()
            raise StopIteration
        if not self._threads:
            batch = self._make(self._start, self._read)
        else:
            self._pool = self._pool or ThreadPoolExecutor(self._threads, "triax data")
            while len(self._ahead) < 2 * self._threads and not self._is_over(self._read + len(self._ahead)):
                self._ahead.append(self._pool.submit(self._make, self._start, self._read + len(self._ahead)))
            try:
                batch = self._ahead.popleft().result()
            except BaseException:
                self._drop()  # the next call makes this microbatch again
                raise
        self._read += 1
        return batch

    def __len__(self) -> int:
        """Return the number of microbatches in an epoch, or in ``epochs``, the last global batch included."""
        rows = self.rows.count if self._end is None else self._end
        return -(-rows // self._train) * self._per_batch

    @property
    def epoch(self) -> float:
        """Epochs that were read, with the fraction of the present one; of a mixture, of all members together."""
        return self._row() / self.rows.count

    def seek(self, step: int) -> None:
        """Go to the microbatches of a step, counted from 0 with the present batch size."""
        self._go(step * self._train)

    def state_dict(self) -> dict[str, Any]:
        """Return the place, for JSON: the first row of the next global batch, or of the one that was read in part.

        It also has the seed and the facts on which the rows depend, which ``load_state_dict`` compares.
        """
        return {"row": self._row(), "seed": self._seed, **self.dataset.facts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a place. The grid and the batch sizes may differ from those of the run that saved it.

        Raises:
            ConfigError: a place of other data, another row length or another seed.
        """
        row = state.get("row")
        if type(row) is not int or not 0 <= row < 2**62:
            raise ConfigError(f"The row of the position is {row!r}, but it must be a whole number of at least 0.")
        for key, expected in (("seed", self._seed), *self.dataset.facts.items()):
            if key not in state or state[key] != expected:
                raise ConfigError(
                    f"The position belongs to data with {key} {state.get(key)}, but here it is {expected}, so the rows "
                    "differ. Give the former, or start from the first row."
                )
        self._go(row)

    def advance(self, microbatches: int) -> None:
        """Advance the place by microbatches that other ranks read, so that all ranks save the same place."""
        self._drop()
        self._read += microbatches

    def close(self) -> None:
        """End the threads. The next item starts them again."""
        self._drop()
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None

    def _row(self) -> int:
        return self._start + self._read // self._per_batch * self._train

    def _go(self, row: int) -> None:
        self._drop()
        self._start, self._read = row, 0
        self.seeks += 1

    def _drop(self) -> None:
        for future in self._ahead:
            future.cancel()
        self._ahead.clear()

    def _is_over(self, microbatch: int) -> bool:
        return self._end is not None and self._start + microbatch // self._per_batch * self._train >= self._end

    def _make(self, start: int, microbatch: int) -> Batch:
        """Make a microbatch of this replica: its number counts from the row ``start``."""
        batch, part = divmod(microbatch, self._per_batch)
        step = start + batch * self._train
        masked = self.dataset.document_mask
        if self._balanced is not None:
            count = self._train if self._end is None else min(max(self._end - step, 0), self._train)
            return self._batch(self._balanced.read(step, count, self._replica * self._per_batch + part))
        first = step + self._replica * self._share + part * self._micro
        ids, labels, *documents = np.empty((2 + masked, self._micro, self.dataset.length), np.int64)
        count = self._micro if self._end is None else min(max(self._end - first, 0), self._micro)
        for array, padding in zip((ids, labels, *documents), (0, IGNORED, 0), strict=False):
            array[count:] = padding
        if count:
            self.rows.fill(first, count, ids, labels, documents[0] if masked else None)
        return self._batch((ids, *documents, labels))

    def _batch(self, columns: Sequence[Array]) -> Batch:
        made = [torch.from_numpy(column) for column in columns]
        if self._pin_memory:
            made = [tensor.pin_memory() for tensor in made]
        return (tuple(made[:2]) if self.dataset.document_mask else made[0]), made[-1]
