"""One rank under ``launch``: it runs the script or function, prints to its log file, and writes down its failure."""

from __future__ import annotations

import atexit
import ctypes
import json
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ..agreement.hang_watch import lost_peer, timed_out
from .signals import unblock_in_rank

EVERY = -1  # stands for all ranks
LOCAL_RANK = "{local-rank}"  # in an argument of a script: stands for each rank's number on its host
LINGER = 1.5  # seconds that a failing rank waits, so that the launcher notices a killed rank before it
TOGETHER = 2.0  # seconds in which ranks that are done end together; one that still waits for a rank fails after that

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


@dataclass(frozen=True)
class Module:
    """A module to run as with ``python -m``."""

    name: str


@dataclass(frozen=True)
class Executable:
    """A program that is not run by Python."""

    name: str


@dataclass(frozen=True)
class LaunchJob:
    """Function, script or module that the ranks of one host run, with its arguments and settings."""

    target: Callable[..., object] | Path | Module | Executable
    args: tuple[Any, ...]
    folder: str  # a failing rank writes its `Failure` there, and the agent the number of the attempt
    logs: str | None
    threads: int
    shown: tuple[int, ...] | None = None  # ranks whose log files the launcher shows; None: rank 0 has none, it prints
    environment: dict[str, str] = field(default_factory=dict)  # added to the launcher's


@dataclass(frozen=True)
class Failure:
    """Error or exit code with which a rank ended early."""

    rank: int
    when: float
    line: str
    trace: str
    lost_peer: bool
    code: int
    timed_out: bool = False


class Ends(NamedTuple):
    """Ranks of one host by how they ended, when one of them had failed.

    Attributes:
        done: ranks whose script ended without an error.
        left: ranks whose process ended with exit status 0 before their script did.
        at_work: ranks that had not ended.
    """

    done: list[int]
    left: list[int]
    at_work: list[int]


def read_ends(folder: str, ranks: Collection[int], failed: Collection[int]) -> Ends:
    """Read how this host's ranks ended in this attempt; ``failed``: ranks that failed."""
    done = [rank for rank in ranks if mark(folder, "done", rank).exists()]
    left = [rank for rank in ranks if mark(folder, "left", rank).exists()]
    return Ends(done, left, [rank for rank in ranks if rank not in {*done, *left, *failed}])


def mark(folder: str, kind: str, rank: int) -> Path:
    """Return the path of the empty file that says how a rank ended in this attempt: ``done`` or ``left``."""
    return Path(folder) / f"{kind}-{attempt_file(folder).read_text()}-{rank}"


def read_failures(folder: Path) -> list[Failure]:
    """Read the failures of this host's ranks in this attempt."""
    return [Failure(**json.loads(path.read_text())) for path in folder.glob("rank-*.json")]


def attempt_file(folder: str) -> Path:
    """Return the path of the file in which the agent writes how often the job was started before."""
    return Path(folder) / "attempt"


def log_file(folder: str | Path, rank: int) -> Path:
    """Return the path of a rank's log file."""
    return Path(folder) / f"rank-{rank}.log"


def run_rank(job: LaunchJob) -> None:
    """Run one rank: the entry point of its process, which has torchrun's environment variables."""
    os.setsid()  # the processes that a rank starts are a group, which ends with it
    unblock_in_rank()
    multiprocessing.set_start_method(None, force=True)  # a script starts processes as without a launcher
    _leave_with_launcher()
    os.environ.update(job.environment)
    os.environ["TRIAX_LAUNCH_FOLDER"] = job.folder  # a grid writes its rank's name there
    if attempt_file(job.folder).exists():
        # Each host's agent counts its own restarts. The ranks need one number: it is part of their keys in the store.
        os.environ["TORCHELASTIC_RESTART_COUNT"] = attempt_file(job.folder).read_text()
    rank = int(os.environ["RANK"])
    if job.logs is not None and (rank > 0 or job.shown is not None):
        _print_to(log_file(job.logs, rank))
        (Path(job.folder) / f"here-{rank}").touch()
    import torch

    # The fork server read OMP_NUM_THREADS when it started, perhaps for another launch.
    torch.set_num_threads(job.threads)
    kept: Any = None  # the script's variables live until its exit handlers have run, as in a program of its own
    try:
        kept = _run(job)
    except SystemExit as leave:
        if exit_code(leave) != 0:
            _fail(job, rank, leave)
        kept = leave
    except BaseException as error:
        _fail(job, rank, error)
    _wait_for_all_ranks(job.folder, rank)
    if isinstance(job.target, (Path, Module)):
        atexit._run_exitfuncs()  # a forked process runs no exit handlers, and a script may have registered some
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    del kept
    sys.stdout.flush()
    sys.stderr.flush()


def _wait_for_all_ranks(folder: str, rank: int) -> None:
    """Wait until all ranks of this host are done or have left, but not for long.

    A rank that ends a moment before another one could make it fail. One that took fewer steps should: the other waits
    for it until its time limit otherwise.

    Args:
        folder: folder in which each rank leaves a mark when it is done.
        rank: this rank.
    """
    own_mark = mark(folder, "done", rank)
    own_mark.touch()
    attempt = own_mark.name.split("-")[1]
    size, deadline = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), time.monotonic() + TOGETHER
    while len(list(Path(folder).glob(f"[dl]*-{attempt}-*"))) < size and time.monotonic() < deadline:
        time.sleep(0.01)


def _run(job: LaunchJob) -> dict[str, Any] | None:
    """Run the target; return the variables of a script or module."""
    if not isinstance(job.target, (Path, Module, Executable)):
        job.target(*job.args)
        return None
    args = [str(argument).replace(LOCAL_RANK, os.environ["LOCAL_RANK"]) for argument in job.args]
    if isinstance(job.target, Executable):
        sys.stdout.flush()
        killed_with_parent()
        os.execvp(job.target.name, [job.target.name, *args])
    if isinstance(job.target, Path):
        sys.argv = [str(job.target), *args]
        sys.path.insert(0, str(job.target.resolve().parent))
        return runpy.run_path(str(job.target), run_name="__main__")
    sys.argv = [job.target.name, *args]  # runpy puts the file's path there
    sys.path.insert(0, os.getcwd())
    return runpy.run_module(job.target.name, run_name="__main__", alter_sys=True)


def _fail(job: LaunchJob, rank: int, error: BaseException) -> NoReturn:
    """Write down the failure for the launcher, and exit.

    Before it exits it waits a moment. If this error is the consequence of another rank that was killed, the launcher
    then notices the killed rank first.

    Args:
        job: the job, with the folder for failures.
        rank: this rank.
        error: the error with which the rank ended.
    """
    if isinstance(error, SystemExit):
        code = exit_code(error)
        line = error.code if isinstance(error.code, str) else f"sys.exit({error.code!r})"
        failure = Failure(rank, time.time(), line, "", False, code)
    else:
        story = traceback.TracebackException.from_exception(error)
        # Without the launcher's own frames.
        ours = (__file__, runpy.__file__, "<frozen runpy>")
        story.stack[:] = [frame for frame in story.stack if frame.filename not in ours] or story.stack
        line = "".join(story.format_exception_only()).strip().splitlines()[0]
        failure = Failure(rank, time.time(), line, "".join(story.format()), lost_peer(error), 1, timed_out(error))
    leave_failure(job.folder, failure)
    if job.logs is not None and (rank > 0 or job.shown is not None):
        # On a log that is shown, the trace of a consequence would be taken for the cause.
        consequence = failure.lost_peer and job.shown is not None and (rank in job.shown or EVERY in job.shown)
        sys.stderr.write(f"{failure.line}\n" if consequence or not failure.trace else failure.trace)
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(LINGER)
    os._exit(failure.code)  # without exit handlers, which might communicate with ranks that have ended


def exit_code(leave: SystemExit) -> int:
    """Return the exit code with which Python ends after ``sys.exit``."""
    if leave.code is None:
        return 0
    return leave.code & 0xFF if isinstance(leave.code, int) else 1


def leave_failure(folder: str | Path, failure: Failure) -> None:
    """Write a failure to the file that the launcher reads once this rank has ended."""
    path = Path(folder) / f"rank-{failure.rank}.json"
    path.with_suffix(".tmp").write_text(json.dumps(asdict(failure)))
    path.with_suffix(".tmp").replace(path)


def _leave_with_launcher() -> None:
    """Start a thread that ends this rank, and the processes that it started, when the launcher was killed (SIGKILL)."""
    launcher = multiprocessing.parent_process()
    if launcher is not None:

        def watch(sentinel: int = launcher.sentinel) -> None:
            connection.wait([sentinel])
            os.killpg(0, signal.SIGKILL)

        threading.Thread(target=watch, daemon=True, name="watches the launcher").start()


def killed_with_parent() -> None:
    """Let the kernel kill this process when its parent ends: a program in its place has no thread that watches."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _print_to(path: Path) -> None:
    """Redirect the output of this process to a file, including that of C++ code."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    # Line by line: the launcher shows the file while it grows, and a killed rank loses what is in its buffers.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)
