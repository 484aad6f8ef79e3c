"""Start the ranks of this host, stop them together, and say in the last line which one failed first and how.

    launch(train, args, ranks=8)             # a function, with its arguments
    launch(Path("train.py"), "--lr", "1e-3", ranks=8)    # a script, with its command line

torchrun's own engine does the work (``elastic_launch``: rendezvous, environment, signals), so a function finds
the same variables as under ``torchrun`` and needs no second way to start. What is added here:

- Ranks are forks of a server that has torch loaded already: 8 of them on 2 cores are at their first collective
  after 2.5 s, where fresh processes (torchrun) take 6 to 7 s and ``spawn`` 10 s.
- Of everything that goes wrong after one rank fails, only the cause is shown. Peers that lose a connection stay
  quiet, and stay alive for a moment, so that a killed process is always the first that the launcher sees.
- On Ctrl-C the ranks end at once, wherever they are: Python's own handler would wait for a collective that
  never ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import re
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any, NoReturn

from ..grid.environment import read_environment
from ..grid.topology import Topology

PRELOAD = ("torch", "torch.distributed.device_mesh", "torch.distributed.elastic.multiprocessing")
LINGER = 1.5  # seconds a failing rank stays, so that a rank that died without a word is noticed before it
SPEAKS = 30  # seconds that rank 0 has to say what the user did wrong
STOP = 5  # seconds that ranks get to end after a signal, before they are killed

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# What a rank says when it is another one that is gone: gloo, NCCL and the store, in torch 2.11 to 2.13.
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|remote peer|peer (closed|disconnected)|"
    r"gloo|nccl|socket|lost (the )?(peer|rank|connection)",
    re.IGNORECASE,
)


def launch(
    target: Callable[..., object] | Path,
    *args: Any,
    ranks: int,
    topology: Topology | None = None,
    logs: Path | None = None,
    preload: Sequence[str] = (),
    threads: int | None = None,
) -> int:
    """Run ``target`` on every rank of this host and wait; returns the exit code for ``sys.exit``.

    0: every rank came to its end. 2: a rank refused what the user asked for (and said so, see ``user_error``).
    128 + n: signal n ended a rank, or this process was told to stop by it. 1: any other failure.

    Args:
        target: a function at the top level of a module, called as ``target(*args)``; or a script, run with
            ``args`` as its command line.
        ranks: the number of processes.
        topology: of the grid that the ranks form: messages then say ``rank 5 (pipe 1, data 0, tensor 1)``.
        logs: the folder of ``rank-1.log``, ``rank-2.log``, ...: what ranks other than 0 print. None: all print
            here.
        preload: modules that every rank imports anyway, to load once for all.
        threads: of torch in each rank; by default the cores, shared out.
    """
    threads = threads or max(1, cores() // ranks)
    defaults = {"OMP_NUM_THREADS": str(threads)}
    if (loopback := _loopback()) is not None:
        # Otherwise gloo asks a name server for this host's address, which may take seconds, or fail.
        defaults["GLOO_SOCKET_IFNAME"] = loopback
    with _environment(defaults), tempfile.TemporaryDirectory(prefix="triax-launch-") as folder:
        # The server imports its modules while this process imports its own, below. A server that runs already
        # is taken as it is.
        multiprocessing.forkserver.set_forkserver_preload([*PRELOAD, *preload])
        multiprocessing.forkserver.ensure_running()
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
            for old in logs.glob("rank-*.log"):
                old.unlink()
        job = _Job(target, args, folder, str(logs) if logs else None, threads)
        return _run(job, ranks, topology)


def user_error(message: object) -> NoReturn:
    """End this program with one line, said by rank 0 alone, and exit code 2."""
    environment = read_environment()
    if environment is None or environment.rank == 0:
        print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(SPEAKS)  # launchers stop every rank when one leaves: rank 0, which may have started late, goes first
    raise SystemExit(2)


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ------------------------------------------------------------------------------------- in this process


def _run(job: _Job, ranks: int, topology: Topology | None) -> int:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=f"triax-{os.getpid()}-{time.monotonic_ns()}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        start_method="forkserver",
        shutdown_timeout=STOP,
        logs_specs=DefaultLogsSpecs(),
    )
    with _quiet("torch.distributed", "torch.multiprocessing"), _signals_restored():
        try:
            elastic_launch(config, _rank)(job)
        except SignalException as stop:
            _last_words(f"stopped by {stop.sigval.name}; all {ranks} ranks have ended")
            return 128 + stop.sigval
        except ChildFailedError as error:
            exits = {rank: failure.exitcode for rank, failure in error.failures.items()}
            return _explain(exits, _read_failures(Path(job.folder)), topology, job.logs)
    return 0


def _explain(exits: dict[int, int], failures: list[_Failure], topology: Topology | None, logs: str | None) -> int:
    """Print what came first, its headline last; returns the exit code."""
    for rank, code in exits.items():
        # A rank that raised wrote so before it left; this one had no time to.
        if not any(failure.rank == rank for failure in failures):
            _last_words(f"{_name(rank, topology)} died: {_exit(code)}; the other ranks were stopped")
            return 128 - code if code < 0 else 1
    # A lost connection is the shadow of another rank's end: shown only where nothing explains it.
    first = min(failures, key=lambda failure: (failure.lost_peer, failure.when))
    if first.code == 2:
        return 2
    if first.trace:
        print(f"\n{first.trace.rstrip()}", file=sys.stderr)
    # Errors that name their rank themselves begin with it, behind the exception's type.
    kind, _, said = first.line.partition(": ")
    named = said.startswith(f"rank {first.rank} (")
    line = f"{said} ({kind})" if named else f"{_name(first.rank, topology)} failed: {first.line}"
    _last_words(line + (f" (all ranks' output: {logs})" if logs and first.lost_peer else ""))
    return 1


def _name(rank: int, topology: Topology | None) -> str:
    if topology is None:
        return f"rank {rank}"
    place = ", ".join(f"{axis} {at}" for axis, at in topology.coordinate(rank)._asdict().items())
    return f"rank {rank} ({place})"


def _last_words(line: str) -> None:
    # A live display that was killed leaves the cursor hidden, in the middle of a line.
    print(("\x1b[?25h\n" if sys.stderr.isatty() else "") + line, file=sys.stderr, flush=True)


def _exit(code: int) -> str:
    if code >= 0:
        return f"exit status {code}, without an exception"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = {"SIGKILL": " (killed from outside, or by the kernel if memory ran out)"}
    return name + hint.get(name, "")


def _read_failures(folder: Path) -> list[_Failure]:
    return [_Failure(**json.loads(path.read_text())) for path in folder.glob("rank-*.json")]


@contextlib.contextmanager
def _environment(defaults: dict[str, str]) -> Iterator[None]:
    """Give variables a value where the user gave none; put everything back afterwards."""
    before = dict(os.environ)
    os.environ.update({name: value for name, value in defaults.items() if name not in before})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _quiet(*prefixes: str) -> Iterator[None]:
    """torch reports each process it stops, and the failure as a traceback of its own."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith(prefixes)]
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _signals_restored() -> Iterator[None]:
    """torch installs handlers for the signals that end a program and leaves them behind."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # not the main thread: torch has installed none either
            for number, handler in before.items():
                signal.signal(number, handler)


def _loopback() -> str | None:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)


# ---------------------------------------------------------------------------------------- in each rank


@dataclass(frozen=True)
class _Job:
    """What every rank is told to do."""

    target: Callable[..., object] | Path
    args: tuple[Any, ...]
    folder: str  # where a failing rank leaves its `_Failure`
    logs: str | None
    threads: int


@dataclass(frozen=True)
class _Failure:
    """Why a rank ended before its end."""

    rank: int
    when: float
    line: str
    trace: str
    lost_peer: bool
    code: int


def _rank(job: _Job) -> None:
    """The whole life of a rank."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _leave_with_launcher()
    rank = int(os.environ["RANK"])
    if job.logs is not None and rank > 0:
        _print_to(Path(job.logs) / f"rank-{rank}.log")
    import torch

    # The fork server read OMP_NUM_THREADS when it started, perhaps for another launch.
    torch.set_num_threads(job.threads)
    try:
        if isinstance(job.target, Path):
            sys.argv = [str(job.target), *map(str, job.args)]
            sys.path.insert(0, str(job.target.resolve().parent))
            runpy.run_path(str(job.target), run_name="__main__")
        else:
            job.target(*job.args)
    except SystemExit as leave:
        if leave.code is not None and leave.code != 0:
            _fail(job, rank, leave)
    except BaseException as error:
        _fail(job, rank, error)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # a fork runs no exit handlers


def _fail(job: _Job, rank: int, error: BaseException) -> NoReturn:
    """Write down what happened, wait until the launcher has seen any worse, and leave."""
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
        line = error.code if isinstance(error.code, str) else f"sys.exit({error.code!r})"
        failure = _Failure(rank, time.time(), line, "", False, code)
    else:
        story = traceback.TracebackException.from_exception(error)
        # Without the launcher's own frames.
        ours = (__file__, runpy.__file__, "<frozen runpy>")
        story.stack[:] = [frame for frame in story.stack if frame.filename not in ours] or story.stack
        line = "".join(story.format_exception_only()).strip().splitlines()[0]
        failure = _Failure(rank, time.time(), line, "".join(story.format()), _lost_peer(error), 1)
    path = Path(job.folder) / f"rank-{rank}.json"
    path.with_suffix(".tmp").write_text(json.dumps(asdict(failure)))
    path.with_suffix(".tmp").replace(path)
    if job.logs is not None and rank > 0:
        sys.stderr.write(failure.trace)
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(LINGER)
    os._exit(failure.code or 1)  # no exit handlers: they would talk to peers that may be gone


def _leave_with_launcher() -> None:
    """End this rank when the launcher is gone without having had the time to say so (SIGKILL)."""
    launcher = multiprocessing.parent_process()
    if launcher is not None:

        def watch(sentinel: int = launcher.sentinel) -> None:
            connection.wait([sentinel])
            os._exit(1)

        threading.Thread(target=watch, daemon=True, name="watches the launcher").start()


def _lost_peer(error: BaseException) -> bool:
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
