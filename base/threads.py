"""Calls in threads of their own, whose errors are raised where their ends are awaited.

``threading.Thread.join`` returns without a word when the thread ended by an error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class BackgroundCall(Generic[T]):
    """Call in a thread, which begins at once.

    Args:
        call: what the thread calls.
        name: the thread's name.
        daemon: False: the interpreter waits for the call before it ends.
    """

    def __init__(self, call: Callable[[], T], name: str, daemon: bool = True) -> None:
        self._call, self._future = call, Future[T]()
        threading.Thread(target=self._run, name=name, daemon=daemon).start()

    def done(self) -> bool:
        """Return True if the call has ended."""
        return self._future.done()

    def result(self) -> T:
        """Wait for the end of the call; return its result, or raise its error."""
        return self._future.result()

    def _run(self) -> None:
        try:
            self._future.set_result(self._call())
        except BaseException as error:
            self._future.set_exception(error)
