"""Automatic checkpoints: saved every N steps and on a signal, and the newest complete one found again.

The signals are SIGTERM, SIGUSR1 and, where a program asks for it, the first Ctrl-C (SIGINT).

{"checkpoint": {"dir": "runs/a", "every": 100, "keep": 3, "resume": "auto"}}
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..base.errors import CheckpointError, DamagedError
from ..grid import Grid
from ..grid.agreement.agreement import agreed
from .async_writer import report_failure
from .format import folder as folders
from .format.remote import Folder
from .lineage import Lineage
from .reader import LoadOptions, open_checkpoint
from .snapshot import Snapshot

# Slurm sends the second before the time limit (--signal=USR1@120). If ranks receive several, the last of these counts.
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_INTERRUPTED = b"\nCtrl-C: the run saves a checkpoint after this step and ends; Ctrl-C again ends it at once\n"
_LOG = logging.getLogger("triax")


def load_newest(
    grid: Grid, folder: Folder, options: LoadOptions, lineage: Lineage, load: Callable[[Snapshot], None]
) -> bool:
    """Load the newest checkpoint of a folder that is complete and undamaged. Collective.

    Args:
        grid: the run's grid.
        folder: the folder of checkpoints.
        options: which parts of the checkpoint are compared with their checksums.
        lineage: the run's identity and locks.
        load: function that loads a snapshot, or raises ``DamagedError`` with nothing changed.

    Returns:
        True if a checkpoint was loaded; False if there is none.
    """
    usable, level = None, logging.INFO
    with agreed(grid):
        if grid.rank == 0:
            unusable = dict(folders.unreadable(folder))
            level = logging.WARNING if unusable else logging.INFO
            for tag, reason in unusable.items():
                _LOG.warning("%s is not used: %s", folder / tag, reason)
            lineage.tidy_up(folder)
            usable = [tag for tag in folders.tags(folder)[::-1] if tag not in unusable]
    for tag in grid.world.all_gather_json(usable)[0]:
        try:
            load(open_checkpoint(grid, folder / tag, options))
            return True
        except DamagedError as error:
            level = logging.WARNING
            if grid.rank == 0:
                _LOG.warning("%s is not used: %s", folder / tag, error)
    if grid.rank == 0:
        _LOG.log(level, "%s has no checkpoint to resume from: nothing is loaded", folder)
    return False


class AutoSaver:
    """Saves a checkpoint after every so many steps; after a signal it saves one and ends the process.

    Args:
        grid: the run's grid.
        folder: the folder of checkpoints.
        every: number of steps between two checkpoints.
        keep: number of automatic checkpoints to keep; older ones are removed. None keeps all.
        stop: raise an error if a checkpoint could not be written. If False, the failure is logged.
        step: number of steps so far.
        save: function that writes a checkpoint with the given tag, and calls the given function when the checkpoint is
            complete. It returns None or the reason of a failure.
        wait: waits for a checkpoint that is being written; returns None or the reason of a failure.

    Attributes:
        last: number of steps at the last look; a load sets it, so that a step that comes again is a new one.
        signalled: 1 if this rank has received a SIGTERM, 2 after a SIGUSR1, 3 after a SIGINT, else 0.
    """

    def __init__(
        self,
        grid: Grid,
        folder: Folder,
        every: int,
        keep: int | None,
        stop: bool,
        step: int,
        save: Callable[[str, Callable[[], None]], str | None],
        wait: Callable[[], str | None],
    ) -> None:
        self._grid, self._folder, self._stop = grid, folder, stop
        self.every, self._keep, self.last = every, keep, step
        self._save, self._wait = save, wait
        self.signalled = 0
        self._flag = torch.zeros(1, dtype=torch.int64, device=grid.device)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _SignalHandler(self, signal.SIGTERM))
            handler = signal.getsignal(signal.SIGUSR1)
            if handler == signal.SIG_DFL or isinstance(handler, _SignalHandler):  # else it is the user's
                signal.signal(signal.SIGUSR1, _SignalHandler(self, signal.SIGUSR1))

    def save_on_interrupt(self) -> None:
        """Save a checkpoint and end the process on the first SIGINT too. The second has the effect that it had."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, _SignalHandler(self, signal.SIGINT))

    @property
    def speaks(self) -> bool:
        """True on the rank that prints."""
        return self._grid.rank == 0

    def after_call(self, step: int, may_save: Callable[[], bool] = lambda: True) -> None:
        """Save a checkpoint if a step was taken since the last call and a checkpoint is due.

        Collective if a step was taken.

        Args:
            step: number of steps so far.
            may_save: called after a new step. If it returns False, nothing is saved and signals are not checked.

        Raises:
            SystemExit: with code 143 after any rank received a SIGTERM, 138 after a SIGUSR1, 130 after a SIGINT.
            CheckpointError: if the checkpoint could not be written and ``stop`` is set.
        """
        if step == self.last:
            return
        self.last = step
        if not may_save():
            return
        self._flag.fill_(self.signalled)
        self._grid.world.all_reduce(self._flag, op="max")  # the signal may have come to one rank alone
        signal_index = int(self._flag)
        if signal_index or step % self.every == 0:
            self._save_now(step, _SIGNALS[signal_index - 1] if signal_index else None)

    def _save_now(self, step: int, leave: signal.Signals | None) -> None:
        """Save a checkpoint. ``leave``: a signal after which the process ends; None: none was received."""
        tag = f"global_step{step}"
        problem = self._save(tag, self._remove_old)
        if leave:
            self._wait()  # the thread that writes in the background has logged its failure
        report_failure(self._folder, tag, problem, self._stop and not leave)
        if leave:
            if self._grid.rank == 0:
                _LOG.warning("%s was received: the run ends after step %d, %s", leave.name, step, self._folder / tag)
            self._grid.world.barrier()
            raise SystemExit(128 + leave)

    def _remove_old(self) -> None:
        if self._keep is not None and self._grid.rank == 0:
            for tag in folders.prunable(self._folder, self._keep, automatic=True):
                with contextlib.suppress(OSError, CheckpointError):
                    folders.remove(self._folder, tag)


class _SignalHandler:
    """Handler that sets ``saver.signalled`` on the first SIGTERM or SIGINT, and on each SIGUSR1.

    Slurm may send SIGUSR1 twice. Where nothing would be saved, a signal has the effect that it had before: on the
    second SIGTERM or SIGINT, when ``saver`` is gone, and in child processes that were forked from this one.
    """

    def __init__(self, saver: AutoSaver, number: signal.Signals) -> None:
        before = signal.getsignal(number)
        self._before: Any = before._before if isinstance(before, _SignalHandler) else before
        self._saver, self._process = weakref.ref(saver), os.getpid()
        self._value, self._again = 1 + _SIGNALS.index(number), number == signal.SIGUSR1
        self._received = False

    def __call__(self, number: int, frame: Any) -> None:
        saver = self._saver()
        if saver is not None and (self._again or not self._received) and os.getpid() == self._process:
            self._received, saver.signalled = True, max(saver.signalled, self._value)
            if number == signal.SIGINT and saver.speaks:
                os.write(2, _INTERRUPTED)
        elif callable(self._before):
            self._before(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL if self._before is None else self._before)
            os.kill(os.getpid(), number)
