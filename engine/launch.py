"""Start the ranks of this host, stop them together, and say in the last line which one failed first and how.

    launch(train, args, ranks=8)             # a function, with its arguments
    launch(Path("train.py"), "--lr", "1e-3", ranks=8)    # a script, with its command line

torchrun's own agent does the work (rendezvous, environment, signals), so a function finds the same variables as under
``torchrun`` and needs no second way to start. ``triax run`` is this, for several hosts too. What is added here:

- Ranks are forks of a server that has torch loaded already: 8 of them on 2 cores are at their first collective
  after 2.5 s, where fresh processes (torchrun) take 6 to 7 s and ``spawn`` 10 s.
- Of everything that goes wrong after one rank fails, only the cause is shown. Peers that lose a connection stay
  quiet, and stay alive for a moment, so that a killed process is always the first that the launcher sees.
- On Ctrl-C the ranks end at once, wherever they are: Python's own handler would wait for a collective that
  never ends.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..grid.environment import read_environment
from ..grid.topology import Topology
from .tail import Tail
from .worker import Failure, Job, Module, read_failures

if TYPE_CHECKING:
    from .agent import Agent, Exits
    from .hosts import Hosts

PRELOAD = ("torch", "torch.distributed.device_mesh", "torch.distributed.elastic.multiprocessing")
SPEAKS = 30  # seconds that rank 0 has to say what the user did wrong
STOP = 5  # seconds that ranks get to end when another has failed, before they are killed
GRACE = 30.0  # and when this process is told to stop: a checkpoint takes its time
HEARSAY = 4.0  # seconds that another host has to say that the cause was there

_STOPPED = "; the other ranks were stopped"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class Outcome:
    """How a launch ended.

    Attributes:
        code: for ``sys.exit``.
        line, trace: what to print last, and before it; empty where there is nothing to say.
        cause: False where this host's ranks only felt what happened on another one.
    """

    code: int
    line: str = ""
    trace: str = ""
    cause: bool = True


def launch(
    target: Callable[..., object] | Path | Module,
    *args: Any,
    ranks: int,
    topology: Topology | None = None,
    logs: Path | None = None,
    preload: Sequence[str] = (),
    threads: int | None = None,
    **options: Any,
) -> int:
    """Run ``target`` on every rank of this host and wait; returns the exit code for ``sys.exit``.

    0: every rank came to its end. 2: a rank refused what the user asked for (and said so, see ``user_error``).
    128 + n: signal n ended a rank, or this process was told to stop by it. 1: any other failure.

    Args:
        target: a function at the top level of a module, called as ``target(*args)``; or a script or a module, run
            with ``args`` as its command line.
        ranks: the number of processes.
        topology: of the grid that the ranks form: messages then say ``rank 5 (pipe 1, data 0, tensor 1)``.
        logs: the folder of ``rank-1.log``, ``rank-2.log``, ...: what ranks other than 0 print. None: all print
            here.
        preload: modules that every rank imports anyway, to load once for all.
        threads: of torch in each rank; by default the cores, shared out.
        options: of ``outcome_of``.
    """
    outcome = outcome_of(
        target, *args, ranks=ranks, topology=topology, logs=logs, preload=preload, threads=threads, **options
    )
    say(outcome)
    return outcome.code


def outcome_of(
    target: Callable[..., object] | Path | Module,
    *args: Any,
    ranks: int,
    topology: Topology | None = None,
    logs: Path | None = None,
    preload: Sequence[str] = (),
    threads: int | None = None,
    tee: Collection[int] | None = None,
    restarts: int = 0,
    hosts: Hosts | None = None,
    rendezvous: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    grace: float = GRACE,
) -> Outcome:
    """As ``launch``, and nothing is printed at the end.

    Args:
        tee: ranks whose files are shown here while they grow; every rank, 0 too, then prints to its file. None: rank 0
            prints here and has no file. (-1 stands for all.)
        restarts: how often the ranks are started again after a failure.
        hosts: a fixed list of hosts, of which this is one.
        rendezvous: the arguments of torch's ``RendezvousParameters``, where hosts may come and go. Neither of the
            two: this host alone.
        environment: variables of the ranks.
        grace: seconds that they get to end, to save first perhaps, once this process was told to stop.
    """
    threads = threads or max(1, cores() // ranks)
    defaults = {"OMP_NUM_THREADS": str(threads)}
    if (interface := _interface(hosts)) is not None:
        # Otherwise gloo asks a name server for this host's address, which may take seconds, or fail.
        defaults["GLOO_SOCKET_IFNAME"] = interface
    defaults = {name: value for name, value in defaults.items() if name not in os.environ}
    with _environment({**defaults, **(environment or {})}), tempfile.TemporaryDirectory(prefix="triax-launch-") as temp:
        # The server imports its modules while this process imports its own, below. A server that runs already
        # is taken as it is.
        multiprocessing.forkserver.set_forkserver_preload([*PRELOAD, *preload])
        multiprocessing.forkserver.ensure_running()
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
            # Hosts may share a file system: the first one tidies up, before the others have started any rank.
            first = rendezvous is None and (hosts is None or hosts.node == 0)
            for old in logs.glob("rank-*.log") if first else ():
                old.unlink()
        told = {**defaults, **(environment or {})} if hosts is not None or environment else {}
        folder = str(logs) if logs else None
        if rendezvous is not None:
            # In torch 2.13 a host that joins later waits for ever for the address of the store that the agents share.
            os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        shown = None if tee is None else tuple(tee)
        job = Job(target, args, temp, folder, threads, shown, told)
        tail = Tail(logs, tee, Path(temp)) if logs is not None and tee else None
        if hosts is not None:
            # c10d's own words about each attempt to reach a lost host, stacks and all; the message says it in one line.
            os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
        with tail if tail is not None else contextlib.nullcontext():
            return _run(job, ranks, topology, restarts, hosts, rendezvous, grace)


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


def say(outcome: Outcome) -> None:
    """The traceback, and the last line."""
    if outcome.trace:
        print(f"\n{outcome.trace.rstrip()}", file=sys.stderr)
    if outcome.line:
        # A live display that was killed leaves the cursor hidden, in the middle of a line.
        print(("\x1b[?25h\n" if sys.stderr.isatty() else "") + outcome.line, file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------------


def _run(
    job: Job,
    ranks: int,
    topology: Topology | None,
    restarts: int,
    hosts: Hosts | None,
    rendezvous: Mapping[str, Any] | None,
    grace: float,
) -> Outcome:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException

    from .agent import Agent, ChildFailedError, JobEnded, c10d
    from .rendezvous import HostRendezvous

    alone = {
        "backend": "c10d",
        "endpoint": "127.0.0.1:0",
        "run_id": f"triax-{os.getpid()}-{time.monotonic_ns()}",
        "min_nodes": 1,
        "max_nodes": 1,
        "local_addr": "127.0.0.1",
    }

    def again(why: Exits | str, attempt: int) -> None:
        failures = read_failures(Path(job.folder))
        line = why if isinstance(why, str) else _explain(why, failures, name, job.logs).line
        say(Outcome(0, f"{line.removesuffix(_STOPPED)}; all ranks start again ({attempt} of {restarts})"))
        for path in Path(job.folder).glob("rank-*.json"):
            path.unlink(missing_ok=True)

    agent: Agent | None = None
    name = partial(_name, job.folder, topology)
    why: str | None = None
    with _quiet("torch.distributed", "torch.multiprocessing"), _signals_restored():
        try:
            handler = HostRendezvous(hosts, restarts) if hosts is not None else c10d(dict(rendezvous or alone))
            limits, here = (STOP, grace), _address(hosts, rendezvous)
            agent = Agent(job, ranks, handler, restarts, again, DefaultLogsSpecs(), limits, here)
            agent.launch()
            return Outcome(0)
        except SignalException as stop:
            line = f"stopped by {stop.sigval.name}; all {ranks} ranks have ended"
            if hosts is None:
                agent = None  # where hosts come and go, the others go on
            else:
                why = f"{hosts.names[hosts.node]} was {line}"
            return Outcome(128 + stop.sigval, line, cause=hosts is None)
        except ChildFailedError as error:
            exits = {rank: failure.exitcode for rank, failure in error.failures.items()}
            outcome = _explain(exits, read_failures(Path(job.folder)), name, job.logs)
            if hosts is not None and agent is not None:
                heard = agent.heard(0.0 if outcome.cause else HEARSAY)
                if heard is not None and not outcome.cause:
                    return Outcome(1, heard, cause=False)
                why = outcome.line
            return outcome
        except JobEnded as end:
            return Outcome(1, str(end), cause=False)
        except RuntimeError as error:
            if hosts is None:
                raise
            said = str(error).strip().partition("\n")[0]
            return Outcome(1, f"the launcher of {hosts.names[hosts.node]} lost the others: {said}", cause=False)
        finally:
            if agent is not None:
                agent.close(why)


def _explain(exits: Exits, failures: list[Failure], name: Callable[[int], str], logs: str | None) -> Outcome:
    """What came first, and its headline."""
    for rank, code in exits.items():
        # A rank that raised wrote so before it left; this one had no time to.
        if not any(failure.rank == rank for failure in failures):
            code_ = 128 - code if code < 0 else 1
            return Outcome(code_, f"{name(rank)} died: {_exit(code)}{_STOPPED}")
    # A lost connection is the shadow of another rank's end: shown only where nothing explains it.
    first = min(failures, key=lambda failure: (failure.lost_peer, failure.when))
    if first.code == 2:
        return Outcome(2)
    # Errors that name their rank themselves begin with it, behind the exception's type.
    kind, _, said = first.line.partition(": ")
    named = said.startswith(f"rank {first.rank} (")
    line = f"{said} ({kind.rpartition('.')[2]})" if named else f"{name(first.rank)} failed: {first.line}"
    line += f" (all ranks' output: {logs})" if logs and first.lost_peer else ""
    return Outcome(1, line, first.trace, cause=not first.lost_peer)


def _name(folder: str, topology: Topology | None, rank: int) -> str:
    """As its grid calls it, if it got that far."""
    told = Path(folder, f"name-{rank}")
    if topology is None:
        return told.read_text() if told.exists() else f"rank {rank}"
    place = ", ".join(f"{axis} {at}" for axis, at in topology.coordinate(rank)._asdict().items())
    return f"rank {rank} ({place})"


def _exit(code: int) -> str:
    if code >= 0:
        return f"exit status {code}, without an exception"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = {"SIGKILL": " (killed from outside, or by the kernel if memory ran out)"}
    return name + hint.get(name, "")


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables; put everything back afterwards."""
    before = dict(os.environ)
    os.environ.update(values)
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


def _interface(hosts: Hosts | None) -> str | None:
    """The interface over which ranks reach each other: the loopback's where there is one host."""
    names = [name for _, name in socket.if_nameindex()]
    if hosts is None:
        return next((name for name in ("lo", "lo0") if name in names), None)
    return interface_of(towards(hosts.address))


def _address(hosts: Hosts | None, rendezvous: Mapping[str, Any] | None) -> str | None:
    if hosts is not None:
        return towards(hosts.address)
    return None if rendezvous is not None else "127.0.0.1"


def towards(address: str) -> str:
    """This host's own address on the way to another one; no packet is sent."""
    try:
        family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return address


def interface_of(address: str) -> str | None:
    """The name of the interface that has an IPv4 address; None where the system does not tell."""
    if address.startswith("127."):
        return _interface(None)
    try:
        import fcntl
    except ImportError:  # not a Unix
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = name.encode()[:15].ljust(256, b"\0")
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR, Linux's number
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None
