"""Lanes: two functions that take turns on a rank, so that one computes while the other waits for its collective.

One lane at a time runs. At each collective of the axes that have the lanes, it starts the collective, passes the turn,
and waits for the collective when it has the turn again:

    lane 0    products, start all-reduce    -          wait, products, start
    lane 1    -                             products, start    -             wait, products

The turn goes by the count of collectives alone, not by time. So ranks whose lanes have the same collectives start them
in one order, and none waits for a collective that another rank has not come to. A lane that has ended leaves the other
one alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ...base.accelerators import is_accelerator
from .pending import Done, Pending


class LaneStopped(RuntimeError):
    """Raised in a lane at its next turn, because the other one has failed."""


class Lanes:
    """Two lanes of a rank. Lane 0 runs in the thread that calls ``run``, lane 1 in a thread of its own.

    Args:
        device: device on which the lanes compute.
        state: function that returns what a lane has set for itself, and ``restore`` sets it again for its next turn.
        restore: function that takes what ``state`` returned.

    Attributes:
        active: True while both lanes run.
    """

    def __init__(self, device: torch.device, state: Callable[[], Any], restore: Callable[[Any], None]) -> None:
        self._state, self._restore = state, restore
        self._stream = partial(torch.accelerator.current_stream, device) if is_accelerator(device) else None
        self._thread: ThreadPoolExecutor | None = None
        self._changed = threading.Condition()
        self._turn, self._alone = 0, 0
        self._failed = False
        self.active = False

    def run(self, first: Callable[[], object], second: Callable[[], object]) -> None:
        """Run two functions to their ends, in turns.

        Raises:
            Exception: what one of the functions raised; the other one is stopped at its next turn.
        """
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="triax-lane")
        self._turn, self._alone, self._failed, self.active = 0, 0, False, True
        stream = None if self._stream is None else self._stream()
        other = self._thread.submit(self._second, second, self._state(), stream)
        try:
            self._guarded(first)
        finally:
            self._end(1)
            wait([other])
            self._failed = False
        other.result()

    def wait(self, pending: Pending) -> None:
        """Pass the turn to the other lane; when it comes back, wait for an operation of this lane."""
        self._pass()
        pending.wait()

    def ended(self, pending: Pending, async_op: bool) -> Pending:
        """Return the handle of an asynchronous operation; wait for a synchronous one, both with a change of turns."""
        if async_op:
            return _InLane(self, pending)
        self.wait(pending)
        return Done()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Context in which this lane keeps the turn: it has changed what both lanes read."""
        self._alone += 1
        try:
            yield
        finally:
            self._alone -= 1

    def _second(self, function: Callable[[], object], state: Any, stream: torch.Stream | None) -> None:
        """Run lane 1, from its first turn on."""
        with self._changed:
            self._changed.wait_for(lambda: self._turn == 1)
        try:
            self._restore(state)
            if stream is not None:
                torch.accelerator.set_device_index(stream.device_index)
                torch.accelerator.set_stream(stream)
            self._guarded(function)
        finally:
            self._end(0)

    def _guarded(self, function: Callable[[], object]) -> None:
        """Run a lane's function. After an error of the other lane, drop what this lane raises because of it."""
        try:
            self._stop_if_failed()
            function()
        except BaseException:
            if not self._failed:
                self._failed = True
                raise

    def _stop_if_failed(self) -> None:
        if self._failed:
            raise LaneStopped("the other pass of the pair failed")

    def _pass(self) -> None:
        """Give the turn to the other lane, if it runs, and wait for the next turn."""
        self._stop_if_failed()
        if not self.active or self._alone:
            return
        own, kept = self._turn, self._state()
        with self._changed:
            self._turn = 1 - own
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._turn == own)
        self._restore(kept)
        self._stop_if_failed()

    def _end(self, other: int) -> None:
        """End a lane: the other one has the turn until its end."""
        with self._changed:
            self.active, self._turn = False, other
            self._changed.notify_all()


class _InLane:
    """Handle of an operation that was started in a lane."""

    def __init__(self, lanes: Lanes, pending: Pending) -> None:
        self._lanes, self._pending = lanes, pending

    def wait(self) -> None:
        self._lanes.wait(self._pending)


@contextmanager
def keeping_turn(lanes: Lanes | None) -> Iterator[None]:
    """Return the context ``Lanes.alone`` of an axis's lanes, if it has any."""
    if lanes is None:
        yield
        return
    with lanes.alone():
        yield
