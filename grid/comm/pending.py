"""Handles of asynchronous operations: the protocol, and the classes that combine handles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class Pending(Protocol):
    """Handle of a running operation. ``wait`` returns when the operation is done, and must be called once."""

    def wait(self) -> object: ...


class Done:
    """Handle of an operation that is already done, because it was synchronous or because the axis has size 1."""

    def wait(self) -> None:
        return None


class All:
    """Handle of several operations. ``wait`` waits for all of them."""

    def __init__(self, works: Sequence[Pending]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class Then:
    """Handle of an operation with a callback. ``wait`` waits for the operation and then runs the callback."""

    def __init__(self, pending: Pending, callback: Callable[[], object]) -> None:
        self._pending, self._callback = pending, callback

    def wait(self) -> None:
        self._pending.wait()
        self._callback()


def started(pending: Pending, async_op: bool) -> Pending:
    """Return the handle of an asynchronous operation; wait for a synchronous one, as ``torch.distributed`` does."""
    if async_op:
        return pending
    pending.wait()
    return Done()
