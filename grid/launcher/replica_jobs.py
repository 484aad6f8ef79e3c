"""Replicas of a run as jobs of their own on this host: each is started again when it dies, while the others train on.

A coordinator and N launchers are started, one for each replica, whose ranks find TRIAX_REPLICA, TRIAX_COORDINATOR and
TRIAX_SECRET in their environment. A coordinator that dies is started again at its address, and the replicas wait for
it. When this process is killed, all end (on Linux).

A file with the launcher's process number, ``replica-NAME.pid`` in the log folder, lets another process ask a replica to
go. This process has it locked: a file without a lock was left by a process that was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from ...base.errors import ConfigError
from ...options.launch import CoordinatorServer
from ...options.words import words_of
from .worker import killed_with_parent

_POLL = 0.05  # seconds
_AGAIN = 1.0  # seconds before a replica that died is started again


@dataclass
class _Replica:
    """A replica's launcher.

    Attributes:
        name: the replica's name.
        process: its launcher; None if it is not started.
        restarts: number of times that it was started again.
        due: time of ``time.monotonic`` at which it starts again.
        ended: its exit code, when it is not started again.
    """

    name: str
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    due: float = field(default=0.0)
    ended: int | None = None


def run_replicas(
    command: Callable[[str], Sequence[str]],
    names: Sequence[str],
    coordinator: str,
    restarts: int,
    logs: Path,
    grace: float,
    say: Callable[[str], None],
    serve: Callable[[], subprocess.Popen[bytes]] | None = None,
    secret: str = "",
) -> int:
    """Run replicas until all have ended; return the exit code.

    A replica that ends with an error is started again. When one has ended without an error, the run is over, and the
    others have ``grace`` seconds to end. On SIGTERM or SIGINT all replicas are asked to go.

    Args:
        command: returns the command of the launcher of the replica of a name.
        names: the replicas' names.
        coordinator: address of the coordinator.
        restarts: number of times that each replica, and the coordinator, is started again.
        logs: folder of the files with process numbers.
        grace: seconds.
        say: prints a line.
        serve: starts the coordinator, also again if it dies; None: it is not this process's.
        secret: what the coordinator asks the replicas for.

    Returns:
        0 if a replica reached the end of the run; else the exit code of the replica that ended last.

    Raises:
        ConfigError: another run in this log folder has a replica of one of the names.
    """
    logs.mkdir(parents=True, exist_ok=True)
    variables = {"TRIAX_COORDINATOR": coordinator, "TRIAX_SECRET": secret}
    locks = [_lock(logs, name) for name in names]
    replicas = [_Replica(name) for name in names]
    asked: list[int] = []
    handlers = {signum: signal.signal(signum, _Asked(asked)) for signum in (signal.SIGTERM, signal.SIGINT)}
    last, finished, over, served = 0, False, None, 0
    server = None if serve is None else serve()
    try:
        while any(replica.ended is None for replica in replicas):
            if serve is not None and server is not None and server.poll() is not None:
                died = f"the coordinator died with code {server.returncode}: it is"
                if served < restarts:
                    served += 1
                    say(f"{died} started again ({served} of {restarts})")
                    server = serve()
                else:
                    say(f"{died} not started again (--max-restarts {restarts}); the replicas wait for it, then end")
                    server = None
            for replica in (job for job in replicas if job.ended is None):
                if replica.process is None:
                    if over is not None:
                        replica.ended = 0
                    elif time.monotonic() >= replica.due:
                        _start(replica, command(replica.name), variables, logs)
                    continue
                code = replica.process.poll()
                if code is None:
                    continue
                replica.process = None
                _pid_file(logs, replica.name).write_text("")
                drained = _drain_file(logs, replica.name).exists()
                if over is not None or code == 0 or drained or replica.restarts == restarts:
                    replica.ended = last = code
                    if code == 0 and not drained:
                        finished, over = True, over or time.monotonic()
                    what = "was asked to go and has left" if drained else f"has ended with code {code}"
                    say(f"replica {replica.name} {what}")
                else:
                    replica.restarts, replica.due = replica.restarts + 1, time.monotonic() + _AGAIN
                    number = f"{replica.restarts} of {restarts}"
                    say(f"replica {replica.name} died with code {code}: it is started again ({number})")
            if asked and over is None:
                over = time.monotonic()
                _signal(replicas, signal.SIGTERM)
            if over is not None and time.monotonic() > over + grace:
                _signal(replicas, signal.SIGKILL)
            time.sleep(_POLL)
    finally:
        _signal(replicas, signal.SIGKILL)
        if server is not None:
            server.kill()
            server.wait()
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        for replica in replicas:
            for file in (_pid_file(logs, replica.name), _drain_file(logs, replica.name)):
                file.unlink(missing_ok=True)
        for lock in locks:
            os.close(lock)
    return 128 + asked[0] if asked and not finished else 0 if finished else last


def drain(name: str, logs: Path, seconds: float) -> None:
    """Ask a replica of a run on this host to go, and wait until it has left.

    Args:
        name: the replica's name.
        logs: the log folder of the run.
        seconds: time limit.

    Raises:
        ConfigError: there is no such replica, or it has not left in time.
    """
    file = _pid_file(logs, name)
    here = sorted(pid.stem.removeprefix("replica-") for pid in logs.glob("replica-*.pid") if _is_locked(pid))
    try:
        if name not in here:
            raise ProcessLookupError
        number = int(file.read_text())
        os.kill(number, 0)
    except (OSError, ValueError):
        raise ConfigError(
            f"no replica {name} runs with its log in {logs}: give --log-dir of the run, and one of the replicas "
            f"{', '.join(here) or '(none)'}"
        ) from None
    _drain_file(logs, name).touch()
    os.kill(number, signal.SIGTERM)
    deadline = time.monotonic() + seconds
    while file.exists() and _drain_file(logs, name).exists():
        try:
            os.kill(number, 0)
        except OSError:
            return
        if time.monotonic() > deadline:
            raise ConfigError(f"replica {name} has not left within {seconds:g} s: its step is longer, or it hangs")
        time.sleep(_POLL)


def start_coordinator(options: CoordinatorServer, secret: str, log: Path) -> subprocess.Popen[bytes]:
    """Start a coordinator of this host as a process of its own, whose messages go to a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "triax.cli.main", "replicas", "coordinator", *words_of(options)],
            stdout=file,
            stderr=file,
            env={**os.environ, "TRIAX_SECRET": secret},
            start_new_session=True,
            preexec_fn=killed_with_parent,
        )


def _start(replica: _Replica, command: Sequence[str], given: Mapping[str, str], logs: Path) -> None:
    variables = {**os.environ, **given, "TRIAX_REPLICA": replica.name}
    replica.process = subprocess.Popen(command, env=variables, start_new_session=True, preexec_fn=killed_with_parent)
    _pid_file(logs, replica.name).write_text(str(replica.process.pid))


def _signal(replicas: Sequence[_Replica], number: int) -> None:
    """Send a signal to the launchers; SIGKILL to all processes that they have started."""
    for replica in replicas:
        if replica.process is not None and replica.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                send = os.killpg if number == signal.SIGKILL else os.kill
                send(replica.process.pid, number)


def _pid_file(logs: Path, name: str) -> Path:
    return logs / f"replica-{name}.pid"


def _lock(logs: Path, name: str) -> int:
    """Take the files of a replica for this process, until it ends; return the lock.

    Raises:
        ConfigError: a living process has them.
    """
    lock = os.open(_pid_file(logs, name), os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"a replica {name} runs already with its log in {logs}: give another --log-dir, or other names"
        ) from None
    except OSError:  # a file system without locks
        pass
    _drain_file(logs, name).unlink(missing_ok=True)  # of a run that was killed
    return lock


def _is_locked(file: Path) -> bool:
    """Return False if the process that wrote a file of ``_lock`` has ended."""
    with contextlib.suppress(FileNotFoundError), file.open() as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _drain_file(logs: Path, name: str) -> Path:
    return logs / f"replica-{name}.drain"


class _Asked:
    """Handler that notes a signal."""

    def __init__(self, asked: list[int]) -> None:
        self._asked = asked

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._asked.append(number)
