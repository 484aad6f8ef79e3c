"""Signal after which a replica leaves the run: SIGTERM, as a cluster sends it before it takes a machine back."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class LeaveSignal:
    """Handler of SIGTERM, which asks to leave and then calls the handler before it.

    Args:
        ask: asks to leave after the present step.

    Attributes:
        following: the handler before this one, such as one that saves a checkpoint and ends the process; None: none.
    """

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask = ask
        self.following: Any = None

    def install(self) -> None:
        """Handle SIGTERM from now on; outside of the main thread Python has no handlers."""
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGTERM)
            self.following = before if callable(before) else None
            signal.signal(signal.SIGTERM, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Ask to leave."""
        self._ask()
        if self.following is not None:
            self.following(number, frame)
