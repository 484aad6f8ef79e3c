"""Slurm's signal before the time limit: the job is saved, and put into the queue again.

    #SBATCH --signal=USR1@120        # SIGUSR1 to every rank, 120 s before the limit
    #SBATCH --requeue

After a SIGUSR1 on any rank, all ranks end the step, save a checkpoint and exit with code 138 (checkpoint/auto.py); then
rank 0 calls ``scontrol requeue`` if ``checkpoint.requeue`` is set. A SIGTERM saves too, and requeues nothing: it comes
from ``scancel``, or from a preemption, after which Slurm itself requeues the job.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
from collections.abc import Iterator

from ..grid.environment import slurm_job

_PATIENCE = 60  # seconds in which Slurm's controller must answer
_LOG = logging.getLogger("triax")


@contextlib.contextmanager
def requeued(enabled: bool, rank: int) -> Iterator[None]:
    """Requeue the Slurm job if a SIGUSR1 ends the training loop, which runs in this context.

    Args:
        enabled: requeue; False: only leave.
        rank: this rank; rank 0 requeues.
    """
    try:
        yield
    except SystemExit as end:
        job = slurm_job()
        if end.code == 128 + signal.SIGUSR1 and enabled and rank == 0 and job is not None:
            _requeue(job)
        raise


def _requeue(job: str) -> None:
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)
        problem = (done.stderr.strip() or f"exit code {done.returncode}") if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem:
        _LOG.warning(
            "the checkpoint is saved, but the job was not requeued: %s failed (%s). Submit the job again: it resumes",
            *(" ".join(command), problem),
        )
    else:
        _LOG.warning("job %s was requeued: it resumes from the checkpoint", job)
