"""Slurm's signal before the time limit: save, leave, and put the job into the queue again.

    #SBATCH --signal=USR1@120        # SIGUSR1 to every rank, 120 s before the limit
    #SBATCH --requeue

SIGUSR1 on any rank does what SIGTERM does (checkpoint/auto.py): all ranks end the step, save a checkpoint and exit with
code 143. Then rank 0 calls ``scontrol requeue`` if ``checkpoint.requeue`` is set. A SIGTERM alone never requeues: it
comes from ``scancel``, or from a preemption, after which Slurm itself requeues the job.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

from ..grid.environment import slurm_job
from ..grid.grid import Grid

_LEFT = 128 + signal.SIGTERM  # exit code of a rank that a signal ended after a checkpoint
_PATIENCE = 60  # seconds in which Slurm's controller must answer
_LOG = logging.getLogger("triax")


class Requeue:
    """Saves and leaves on SIGUSR1, and requeues the Slurm job. Every rank makes one, in its main thread.

    Args:
        grid: the run's grid.
        requeue: call ``scontrol requeue`` after a SIGUSR1 if this is a job of Slurm.
    """

    def __init__(self, grid: Grid, requeue: bool) -> None:
        self._grid, self._requeue = grid, requeue
        self._signalled = False
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, self._on_signal)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Return a context for the training loop. When a signal ends the run in it, the job is requeued."""
        try:
            yield
        except SystemExit as end:
            if end.code == _LEFT and any(self._grid.world.all_gather_json(self._signalled)) and self._grid.rank == 0:
                self._requeue_job()
            raise
        finally:
            if signal.getsignal(signal.SIGUSR1) == self._on_signal:
                signal.signal(signal.SIGUSR1, signal.SIG_DFL)

    def _on_signal(self, number: int, frame: Any) -> None:
        if (
            not self._signalled
        ):  # the launcher and Slurm may both send it, and a second SIGTERM ends the process at once
            self._signalled = True
            signal.raise_signal(signal.SIGTERM)

    def _requeue_job(self) -> None:
        job = slurm_job()
        if job is None or not self._requeue:
            return
        command = ["scontrol", "requeue", job]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)
            problem = (done.stderr.strip() or f"exit code {done.returncode}") if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = str(error)
        if problem:
            _LOG.warning(
                "the checkpoint is saved, but the job was not requeued: %s failed (%s). Submit the job again, and it "
                "resumes",
                *(" ".join(command), problem),
            )
        else:
            _LOG.warning("job %s was requeued: it resumes from the checkpoint", job)
