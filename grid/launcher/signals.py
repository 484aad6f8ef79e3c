"""Signals to the launcher: they end its ranks once it knows these, and never between the two.

An exception in the middle of the start of a rank would leave a process that nothing ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

# On the first ones ranks may write a checkpoint. Slurm sends these to all processes of a job.
SAVING = (signal.SIGTERM, signal.SIGUSR1)
_SIGNALS = (*SAVING, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_RANKS = (*SAVING, signal.SIGINT)


class LauncherSignals:
    """Context in which a signal ends the program, or raises another exception from ``watch`` on, in the main thread.

    Within ``held`` a signal is only noted; a second one then ends this process at once.
    """

    def __init__(self) -> None:
        self._held, self._noted = False, 0
        self._error: Callable[[signal.Signals], BaseException] = _leave
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> LauncherSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def watch(self, error: Callable[[signal.Signals], BaseException]) -> None:
        """Raise this exception from now on."""
        self._error = error

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Context in which signals are noted; its end raises for one that was."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
            if self._noted:
                self._receive(self._noted, None)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self._held:
            self._noted = 0
            raise self._error(signal.Signals(number))
        if self._noted:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._noted = number


def _leave(number: signal.Signals) -> BaseException:
    print(f"stopped by {number.name}; no rank had started", file=sys.stderr, flush=True)
    return SystemExit(128 + number)


@contextlib.contextmanager
def blocked_in_children() -> Iterator[None]:
    """Start processes in which the signals that a rank may handle are blocked, until ``unblock_in_rank``.

    The fork server survives them: without it ranks would count as ended. A rank that is about to start gets them later.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _RANKS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock_in_rank() -> None:
    """Give a rank the usual signals."""
    for number in _RANKS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _RANKS)
