"""Command lines, processes and ports for tests that start programs."""

from __future__ import annotations

import contextlib
import io
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

TRIAX = [sys.executable, "-m", "triax.cli.main"]


def free_port() -> int:
    """Return a TCP port that no process uses.

    It lies below the ports that Linux gives to connections, so that no connection takes it before the test does.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def program(arguments: list[str], folder: str) -> str:
    """Run a Python program in this process, a rank of the pool, which has torch already; return what it prints."""
    os.chdir(folder)
    sys.argv = arguments
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(arguments[0], run_name="__main__")
    return printed.getvalue()


def last_line(text: str) -> str:
    """Return the last line that is not blank."""
    return text.strip().splitlines()[-1]


def is_alive(pid: int) -> bool:
    """Return True if a process of this number exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextlib.contextmanager
def started(*words: object, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a process in a session of its own; the session is killed at the end of the block."""
    process = subprocess.Popen(
        [str(word) for word in words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        **options,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGCONT)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def as_mpirun(rank: int, size: int) -> dict[str, str]:
    """Environment variables that Open MPI 5's mpirun sets."""
    names = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size, "NODE_RANK": rank}
    return {**{f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()}, "PMIX_NAMESPACE": "prterun-1@1"}


def as_mpich(rank: int, size: int) -> dict[str, str]:
    """Environment variables that MPICH's and Intel's mpirun (Hydra) set."""
    names = {"PMI_RANK": rank, "PMI_SIZE": size, "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": size}
    return {name: str(value) for name, value in names.items()}


def as_srun(rank: int, size: int) -> dict[str, str]:
    """Environment variables that Slurm's srun sets, those of its PMI2 included."""
    names = {"SLURM_PROCID": rank, "SLURM_NTASKS": size, "SLURM_STEP_NUM_TASKS": size, "SLURM_LOCALID": rank}
    return {
        **{name: str(value) for name, value in names.items()},
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_NODELIST": "localhost",
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(size),
    }
