"""The calls of a script of Horovod's: agreed on by all ranks, and made one after the other.

Before a call the ranks compare what they are about to do, 16 bytes each, as Horovod negotiates: shapes that differ are
an error on every rank, and no half-filled tensor or end of the process. Unlike Horovod's, calls must come in the same
order on all ranks; where names or shapes tell that they do not, every rank says so.
"""

from __future__ import annotations

import queue
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch

from ..grid import Axis, Grid
from ..grid.timeline import labelled
from .batch import AgreedError
from .failure import all_or_none

_LAST = 5.0  # seconds that what is under way at the end gets to end


class Mismatch(AgreedError, ValueError):
    """Ranks are about to do different things; every rank raises it alike, and the next call may follow."""


class Request(NamedTuple):
    """What a rank is about to do, as far as it must be the same on all.

    Attributes:
        kind: ``allreduce``, ...
        name: the script's, or one with a number.
        what: operation, shapes, dtype: printed where ranks differ.
    """

    kind: str
    name: str
    what: str

    @property
    def phase(self) -> str:
        """As Horovod's timeline has it."""
        return self.kind.upper()


class Handle:
    """An operation that was started: ``triax.synchronize(handle)`` returns its result."""

    def __init__(self, future: Future[Any]) -> None:
        self.future = future


class Calls:
    """Makes the calls of this process, one after the other.

    Those that are to run beside the script (``allreduce_async``, ...) run in a thread of their own, in their order; the
    others in the thread that calls, behind those. On a GPU all are made where they are called: the device runs them
    beside the script anyway, and what the script computes with their results waits for them there.

    Args:
        grid: of the ranks.
        axis: all of them, for these calls alone.
    """

    def __init__(self, grid: Grid, axis: Axis) -> None:
        self._grid, self._axis = grid, axis
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._turn, self._behind = threading.Lock(), 0
        self._named: dict[str, int] = {}

    def name(self, kind: str, given: str | None) -> str:
        """A name for a call that has none: its number among its like."""
        if given is not None:
            return str(given)
        self._named[kind] = self._named.get(kind, -1) + 1
        return f"{kind}.noname.{self._named[kind]}"

    def now(self, request: Request, work: Callable[[Axis], Any]) -> Any:
        """Agree, run it, and return its result. Collective.

        Args:
            request: what it is.
            work: does it, on the axis.

        Raises:
            Mismatch: on every rank.
        """
        if self._behind:
            return self.later(request, work).future.result()
        return self._run(request, work)

    def later(self, request: Request, work: Callable[[Axis], Any]) -> Handle:
        """The same, beside the script."""
        future: Future[Any] = Future()
        if self._grid.device.type == "cuda" or self._grid.size == 1:
            self._settle(future, lambda: self._run(request, work))
            return Handle(future)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, daemon=True, name="Horovod's calls")
            self._thread.start()
        with self._turn:
            self._behind += 1
        self._queue.put((future, lambda: self._run(request, work)))
        return Handle(future)

    def close(self) -> None:
        """When all that was started has ended, or cannot: its peers may be gone."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_LAST)
            self._thread = None

    def _serve(self) -> None:
        while (entry := self._queue.get()) is not None:
            self._settle(*entry)
            with self._turn:
                self._behind -= 1

    @staticmethod
    def _settle(future: Future[Any], work: Callable[[], Any]) -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    @torch.no_grad()
    def _run(self, request: Request, work: Callable[[Axis], Any]) -> Any:
        with all_or_none(self._grid, lambda: None, f"{request.kind} of {request.name}"):
            with labelled(self._axis, request.name, f"NEGOTIATE_{request.phase}"):
                self._agree(request)
            with labelled(self._axis, request.name, request.phase):
                return work(self._axis)

    def _agree(self, request: Request) -> None:
        if self._axis.size == 1:
            return
        mine = zlib.crc32(repr(tuple(request)).encode())
        both = torch.tensor([mine, -mine], device=self._grid.device)
        self._axis.all_reduce(both, op="max")
        if int(both[0]) == -int(both[1]):
            return
        asked: list[Request] = self._axis.all_gather_object(request)
        other = next(rank for rank in range(len(asked)) if asked[rank] != asked[0])
        said = [f"{each.kind} of {each.name!r}: {each.what}" for each in (asked[other], asked[0])]
        raise Mismatch(
            f"rank {other} calls {said[0]}; rank 0 calls {said[1]}. Every rank makes the same calls in the same order, "
            "with the same names, shapes and dtypes"
        )


def rows_of(axis: Axis, mine: Sequence[int], device: torch.device) -> list[list[int]]:
    """What each rank says of its rows, as many numbers on each: the first dim of a tensor, or where they go."""
    table = torch.empty((axis.size, len(mine)), dtype=torch.int64, device=device)
    axis.all_gather(table.view(-1), torch.tensor(mine, dtype=torch.int64, device=device))
    found: list[list[int]] = table.tolist()
    return found
