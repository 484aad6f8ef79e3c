"""Negotiation before each collective of a Horovod script, and the queue in which the collectives run.

Before a collective the ranks compare their requests (kind, name, shapes, dtype) in a message of 16 bytes, as Horovod's
negotiation does. Requests that differ raise an error on every rank, before any data is sent. In contrast to Horovod,
collectives must be called in the same order on all ranks; a difference in names or shapes raises an error.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch

from ...base.errors import AgreedError
from ...grid import Axis, Grid
from ...grid.agreement.failure import all_or_none
from ...grid.comm.equal_facts import same

_CLOSE_TIMEOUT = 5.0  # seconds that ``close`` waits for the operations that are still running


class MismatchError(AgreedError, ValueError):
    """Requests of the ranks differ. Every rank raises this error with one message; further collectives may follow."""


class CollectiveRequest(NamedTuple):
    """Description of a collective: the part that must be equal on all ranks.

    Attributes:
        kind: ``allreduce``, ...
        name: the script's name for it, or a generated one.
        what: operation, shapes and dtype, as printed if ranks differ.
    """

    kind: str
    name: str
    what: str


class Handle:
    """Handle of an asynchronous operation: ``hvd.synchronize(handle)`` returns its result."""

    def __init__(self, future: Future[Any]) -> None:
        self.future = future


class CollectiveQueue:
    """Queue of this process's collectives, run one at a time.

    On a CPU, asynchronous collectives (``allreduce_async``, ...) run in one background thread, in the order of their
    calls. Synchronous ones run in the calling thread, after the asynchronous ones that were started before. On a GPU
    all run in the calling thread: a CUDA stream is asynchronous itself and orders later kernels behind the collective.

    Args:
        grid: the ranks.
        axis: an axis of all ranks, used by this queue alone.
    """

    def __init__(self, grid: Grid, axis: Axis) -> None:
        self._grid, self._axis = grid, axis
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock, self._unfinished = threading.Lock(), 0
        self._counts: dict[str, int] = {}

    def unique_name(self, kind: str, given: str | None) -> str:
        """Return the given name, or one made of the kind and a counter: ``allreduce.noname.0``."""
        if given is not None:
            return str(given)
        self._counts[kind] = self._counts.get(kind, -1) + 1
        return f"{kind}.noname.{self._counts[kind]}"

    def request(self, kind: str, name: str | None, what: str) -> CollectiveRequest:
        """Return the request of a collective, with a generated name if the script gave none."""
        return CollectiveRequest(kind, self.unique_name(kind, name), what)

    def run(self, request: CollectiveRequest, work: Callable[[Axis], Any]) -> Any:
        """Negotiate, run the collective and return its result. Collective.

        Args:
            request: description of the collective.
            work: runs it on the axis.

        Raises:
            MismatchError: on every rank, if the ranks' requests differ.
        """
        if self._unfinished:
            return self.submit(request, work).future.result()
        return self._run(request, work)

    def submit(self, request: CollectiveRequest, work: Callable[[Axis], Any]) -> Handle:
        """Start a collective in the background thread and return its handle. Arguments as ``run``."""
        future: Future[Any] = Future()
        if self._grid.device.type == "cuda" or self._grid.size == 1:
            self._complete(future, lambda: self._run(request, work))
            return Handle(future)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_queue, daemon=True, name="Horovod collectives")
            self._thread.start()
        with self._lock:
            self._unfinished += 1
        self._queue.put((future, lambda: self._run(request, work)))
        return Handle(future)

    def close(self) -> None:
        """End the thread after the collectives that were started; wait at most 5 s, because other ranks may be gone."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_CLOSE_TIMEOUT)
            self._thread = None

    def _run_queue(self) -> None:
        while (entry := self._queue.get()) is not None:
            self._complete(*entry)
            with self._lock:
                self._unfinished -= 1

    @staticmethod
    def _complete(future: Future[Any], work: Callable[[], Any]) -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    @torch.no_grad()
    def _run(self, request: CollectiveRequest, work: Callable[[Axis], Any]) -> Any:
        with all_or_none(self._grid, lambda: None, f"{request.kind} of {request.name}"):
            phase = request.kind.upper()  # its name in Horovod's timeline: ALLREDUCE
            with self._axis.labeled(request.name, f"NEGOTIATE_{phase}"):
                self._negotiate(request)
            with self._axis.labeled(request.name, phase):
                return work(self._axis)

    def _negotiate(self, request: CollectiveRequest) -> None:
        """Raise MismatchError on every rank unless all have the same request."""
        if self._axis.size == 1 or same(self._axis, tuple(request), self._grid.device):
            return
        requests = [CollectiveRequest(*fields) for fields in self._axis.all_gather_json(request)]
        other = next(rank for rank in range(len(requests)) if requests[rank] != requests[0])
        texts = [f"{call.kind} of {call.name!r}: {call.what}" for call in (requests[other], requests[0])]
        raise MismatchError(
            f"rank {other} calls {texts[0]}; rank 0 calls {texts[1]}. Every rank must make the same calls in the same "
            "order, with the same names, shapes and dtypes"
        )


def gather_counts(axis: Axis, counts: Sequence[int], device: torch.device) -> list[list[int]]:
    """Return the counts of every rank as (ranks, len(counts)). Collective.

    Args:
        axis: the ranks.
        counts: this rank's numbers, such as the size of dim 0 of its tensors, or the rows that it sends to each rank.
        device: device of the tensors that are sent.
    """
    table = torch.empty((axis.size, len(counts)), dtype=torch.int64, device=device)
    axis.all_gather(table.view(-1), torch.tensor(counts, dtype=torch.int64, device=device))
    rows: list[list[int]] = table.tolist()
    return rows
