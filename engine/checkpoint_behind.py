"""Checkpoints that are written while training goes on: a step waits for a copy in the host's memory, not for a disk."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..grid import Grid
from .checkpoint_state import Part
from .checkpoint_write import Writer

_NICE = 10  # of 19: where every core is busy, a tenth of what the training gets


class Behind:
    """A thread that writes, and the copy that it writes from. There is one of each: a save waits for the one before.

    The copy's memory is kept for the next one, pinned where the model is on a GPU: one more of what this rank writes.

    Args:
        grid: of the run.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._thread: threading.Thread | None = None
        self._problem: str | None = None
        self._copies: dict[tuple[str, object], Tensor] = {}

    def copied(self, parts: Sequence[Part]) -> list[Part]:
        """The same, as they are now."""
        made: dict[tuple[str, object], Tensor] = {}
        for part in parts:
            room = self._copies.get((part.name, part.box))
            if room is None or room.shape != part.value.shape or room.dtype != part.dtype:
                room = torch.empty(part.value.shape, dtype=part.dtype, pin_memory=part.value.is_cuda)
            made[part.name, part.box] = room.copy_(part.value, non_blocking=True)
        self._copies = made
        self._grid.synchronise()
        return [part._replace(value=made[part.name, part.box]) for part in parts]

    def start(self, writer: Writer, done: Callable[[str | None], None]) -> None:
        """Write, and then call ``done`` with what kept it from being written, if anything did."""

        def run() -> None:
            _give_way()
            try:
                self._problem = writer.run()
            except Exception as error:  # the store is gone, say, and with it the run
                self._problem = f"{self._grid.describe()}: {type(error).__name__}: {error}"
            done(self._problem)

        # It is waited for when the interpreter ends: no daemon.
        self._thread = threading.Thread(target=run, name="triax checkpoint")
        self._thread.start()

    def wait(self) -> str | None:
        """Return when nothing is being written; why the last one did not come to be, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        problem, self._problem = self._problem, None
        return problem


def _give_way() -> None:
    """This thread works when a core has nothing else to do: on Linux each thread has a niceness of its own."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def report(folder: object, tag: str, problem: str | None) -> None:
    """Say on this rank why a checkpoint did not come to be."""
    if problem is not None:
        logging.getLogger("triax").error("%s", failure(folder, tag, problem))


def failure(folder: object, tag: str, problem: str) -> str:
    """That a checkpoint did not come to be, and why."""
    return f"{folder}: no checkpoint {tag!r} was written, because {problem}. What was there before is there still"
