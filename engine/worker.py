"""The whole life of a rank under ``launch``: what it runs, where it prints, and what it leaves behind when it fails."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import re
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any, NoReturn

EVERY = -1  # stands for all ranks
LINGER = 1.5  # seconds a failing rank stays, so that a rank that died without a word is noticed before it

# What a rank says when it is another one that is gone: gloo, NCCL and the store, in torch 2.11 to 2.13; and the engine,
# when another rank's failure was reported to it, and where a time limit was the first that anybody knew.
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|remote peer|peer (closed|disconnected)|"
    r"gloo|nccl|socket|lost (the )?(peer|rank|connection)|stopped( at \S+)?, because rank",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Module:
    """A module to run as ``python -m`` does."""

    name: str


@dataclass(frozen=True)
class Job:
    """What every rank of a host is told to do."""

    target: Callable[..., object] | Path | Module
    args: tuple[Any, ...]
    folder: str  # where a failing rank leaves its `Failure`, and the agent the number of the attempt
    logs: str | None
    threads: int
    shown: tuple[int, ...] | None = None  # ranks whose files the launcher shows; None: rank 0 has none and prints there
    environment: dict[str, str] = field(default_factory=dict)  # on top of the launcher's


@dataclass(frozen=True)
class Failure:
    """Why a rank ended before its end."""

    rank: int
    when: float
    line: str
    trace: str
    lost_peer: bool
    code: int


def read_failures(folder: Path) -> list[Failure]:
    """Of the ranks of this host, in this attempt."""
    return [Failure(**json.loads(path.read_text())) for path in folder.glob("rank-*.json")]


def attempt_file(folder: str) -> Path:
    """Where the agent writes how often the job was started before."""
    return Path(folder) / "attempt"


def log_file(folder: str | Path, rank: int) -> Path:
    """What a rank prints."""
    return Path(folder) / f"rank-{rank}.log"


def run_rank(job: Job) -> None:
    """What the launcher starts, with torchrun's environment."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _leave_with_launcher()
    os.environ.update(job.environment)
    os.environ["TRIAX_LAUNCH_FOLDER"] = job.folder  # a grid tells its coordinate there, which a dead rank cannot
    if attempt_file(job.folder).exists():
        # Each host's agent counts its own restarts; the ranks must agree, for it names the keys by which they meet.
        os.environ["TORCHELASTIC_RESTART_COUNT"] = attempt_file(job.folder).read_text()
    rank = int(os.environ["RANK"])
    if job.logs is not None and (rank > 0 or job.shown is not None):
        _print_to(log_file(job.logs, rank))
        (Path(job.folder) / f"here-{rank}").touch()
    import torch

    # The fork server read OMP_NUM_THREADS when it started, perhaps for another launch.
    torch.set_num_threads(job.threads)
    try:
        _run(job)
    except SystemExit as leave:
        if leave.code is not None and leave.code != 0:
            _fail(job, rank, leave)
    except BaseException as error:
        _fail(job, rank, error)
    _wait_for_the_others(Path(job.folder), rank)
    if isinstance(job.target, (Path, Module)):
        atexit._run_exitfuncs()  # a fork runs no exit handlers, and a script may count on its own
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()


def _wait_for_the_others(folder: Path, rank: int) -> None:
    """A rank that closes its connections while another still makes its own would make that one fail."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    (folder / f"done-{attempt}-{rank}").touch()
    while len(list(folder.glob(f"done-{attempt}-*"))) < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        time.sleep(0.01)


def _run(job: Job) -> None:
    if isinstance(job.target, Path):
        sys.argv = [str(job.target), *map(str, job.args)]
        sys.path.insert(0, str(job.target.resolve().parent))
        runpy.run_path(str(job.target), run_name="__main__")
    elif isinstance(job.target, Module):
        sys.argv = [job.target.name, *map(str, job.args)]  # runpy puts the file's path there
        sys.path.insert(0, os.getcwd())
        runpy.run_module(job.target.name, run_name="__main__", alter_sys=True)
    else:
        job.target(*job.args)


def _fail(job: Job, rank: int, error: BaseException) -> NoReturn:
    """Write down what happened, wait until the launcher has seen any worse, and leave."""
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
        line = error.code if isinstance(error.code, str) else f"sys.exit({error.code!r})"
        failure = Failure(rank, time.time(), line, "", False, code)
    else:
        story = traceback.TracebackException.from_exception(error)
        # Without the launcher's own frames.
        ours = (__file__, runpy.__file__, "<frozen runpy>")
        story.stack[:] = [frame for frame in story.stack if frame.filename not in ours] or story.stack
        line = "".join(story.format_exception_only()).strip().splitlines()[0]
        failure = Failure(rank, time.time(), line, "".join(story.format()), lost_peer(error), 1)
    leave_failure(job.folder, failure)
    if job.logs is not None and (rank > 0 or job.shown is not None):
        # What a shadow says would be taken for the cause, where somebody reads along.
        shadow = failure.lost_peer and job.shown is not None and (rank in job.shown or EVERY in job.shown)
        sys.stderr.write(f"{failure.line}\n" if shadow or not failure.trace else failure.trace)
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(LINGER)
    os._exit(failure.code or 1)  # no exit handlers: they would talk to peers that may be gone


def leave_failure(folder: str | Path, failure: Failure) -> None:
    """For the launcher to read, once this rank has ended."""
    path = Path(folder) / f"rank-{failure.rank}.json"
    path.with_suffix(".tmp").write_text(json.dumps(asdict(failure)))
    path.with_suffix(".tmp").replace(path)


def _leave_with_launcher() -> None:
    """End this rank when the launcher is gone without having had the time to say so (SIGKILL)."""
    launcher = multiprocessing.parent_process()
    if launcher is not None:

        def watch(sentinel: int = launcher.sentinel) -> None:
            connection.wait([sentinel])
            os._exit(1)

        threading.Thread(target=watch, daemon=True, name="watches the launcher").start()


def lost_peer(error: BaseException) -> bool:
    """Whether an exception, or one that it came from, is about a connection to another rank."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ConnectionError | EOFError):
            return True
        if isinstance(seen, RuntimeError) and _LOST_PEER.search(str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _print_to(path: Path) -> None:
    """Send everything this process prints to a file, C++'s words too."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    # Somebody reads along, and a rank that is killed loses what it holds back.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)
