"""Start the ranks of this host, stop them together, and print in the last line which rank failed first and how.

    launch(train, args, ranks=8)             # a function, with its arguments
    launch(Path("train.py"), "--lr", "1e-3", ranks=8)    # a script, with its command line

torchrun's own agent does the rendezvous, sets the environment and handles signals, so that a function finds the same
variables as under ``torchrun``. ``triax run`` uses this too, also for several hosts. Added to torchrun:

- Ranks are forks of a server that has torch loaded: on 2 cores, 8 of them reach their first collective after 2.5 s;
  new processes (torchrun) take 6 to 7 s, and ``spawn`` 10 s.
- After a failure only its cause is shown. Ranks that lose a connection print nothing, and wait for a moment before they
  end, so that the launcher always notices a killed process first.
- On Ctrl-C the ranks end at once, or save a checkpoint first (``engine.save_on_interrupt``). The second Ctrl-C kills
  them. Python's own handler would wait for a collective that never ends.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ...base.temporary_folders import lock_process_folder, temporary_folder
from ...options.launch import LaunchOptions
from ..environment import loopback_interface, loopback_variables, read_environment
from ..topology import Topology
from .log_tail import LogTail
from .signals import LauncherSignals, blocked_in_children
from .worker import Ends, Executable, Failure, LaunchJob, Module, read_ends, read_failures

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler

    from .agent import Agent, Exits
    from .hosts import Hosts

PRELOAD = ("torch", "torch.distributed.device_mesh", "torch.distributed.elastic.multiprocessing")
# What a function that trains imports before its first step. Torch's optimizers import its compiler, in 2 s.
TRAINING = ("torch._dynamo", "triax.engine.pipeline_engine")
MESSAGE_TIME = 30  # seconds in which rank 0 must print a user's error
STOP = 5  # seconds in which ranks must end when another has failed, before they are killed
# Seconds in which they must end when this process received a signal; they may write a checkpoint.
GRACE: float = LaunchOptions.default_of("grace")
CAUSE_TIME = 4.0  # seconds in which another host may report that it has the cause of a failure

_STOPPED = "; the other ranks were stopped"
_NO_DEEPSPEED = "ModuleNotFoundError: No module named 'deepspeed'"


@dataclass(frozen=True)
class Outcome:
    """Result of a launch.

    Attributes:
        code: the exit code for ``sys.exit``.
        line, trace: the last line to print, and the traceback to print before it. Both are empty without a failure.
        cause: False if this host's ranks failed because of a failure on another host.
    """

    code: int
    line: str = ""
    trace: str = ""
    cause: bool = True


def launch(
    target: Callable[..., object] | Path | Module | Executable,
    *args: Any,
    ranks: int,
    topology: Topology | None = None,
    logs: Path | None = None,
    preload: Sequence[str] | None = None,
    threads: int | None = None,
    **options: Any,
) -> int:
    """Run ``target`` on every rank of this host and wait; return the exit code for ``sys.exit``.

    | code | meaning |
    |---|---|
    | 0 | every rank ended without an error |
    | 128 + n | signal n ended the rank that failed first, or this process received it |
    | 2 | a rank called ``user_error``, which printed a message |
    | n | the rank that failed first called ``sys.exit(n)`` or ``os._exit(n)`` |
    | 1 | any other failure |

    >>> with open("work.py", "w") as file:
    ...     length = file.write("import os; open('rank-' + os.environ['RANK'], 'w')")
    >>> triax.launch(Path("work.py"), ranks=2), sorted(os.listdir())
    (0, ['rank-0', 'rank-1', 'work.py'])

    Args:
        target: a function at the top level of a module, called as ``target(*args)``; or a script, a module
            or a program, run with ``args`` as its command line.
        ranks: the number of processes.
        topology: topology of the ranks' grid. If given, messages name a rank as ``rank 5 (pipe 1, data 0, tensor 1)``.
        logs: folder for ``rank-1.log``, ``rank-2.log``, ..., the output of the ranks other than 0. None: all ranks
            print to this process's output.
        preload: modules that every rank imports, to be imported once by the fork server. None: ``TRAINING`` for a
            function, and none for a script, which may set variables that torch's compiler reads when it is imported.
        threads: torch's threads in each rank; by default the number of cores divided by ``ranks``.
        options: further arguments of ``outcome_of``.
    """
    outcome = outcome_of(
        target, *args, ranks=ranks, topology=topology, logs=logs, preload=preload, threads=threads, **options
    )
    print_outcome(outcome)
    return outcome.code


def outcome_of(
    target: Callable[..., object] | Path | Module | Executable,
    *args: Any,
    ranks: int,
    topology: Topology | None = None,
    logs: Path | None = None,
    preload: Sequence[str] | None = None,
    threads: int | None = None,
    tee: Collection[int] | None = None,
    restarts: int = 0,
    hosts: Hosts | None = None,
    rendezvous: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    grace: float = GRACE,
) -> Outcome:
    """Run ``target`` like ``launch``, but return the outcome and print nothing at the end.

    Args:
        tee: ranks whose log files are shown while they grow; -1 stands for all. Every rank, also rank 0, then prints
            to its file. None: rank 0 prints to this process's output, and has no file.
        restarts: how often the ranks are restarted after a failure.
        hosts: a fixed list of hosts, one of which is this host.
        rendezvous: arguments of torch's ``RendezvousParameters``, for hosts that may join and leave. Without ``hosts``
            and ``rendezvous`` the job runs on this host alone.
        environment: variables of the ranks.
        grace: seconds in which ranks must end, perhaps after a checkpoint, once this process received a signal.
    """
    threads = threads or max(1, cores() // ranks)
    defaults = {"OMP_NUM_THREADS": str(threads)}
    # Without an interface gloo would look up this host's address by its name, which may take seconds, or fail.
    if hosts is None and rendezvous is None:
        defaults |= loopback_variables()
    elif hosts is not None and (interface := interface_name(own_address(hosts.address))) is not None:
        defaults["GLOO_SOCKET_IFNAME"] = interface
    defaults = {name: value for name, value in defaults.items() if name not in os.environ}
    lock_process_folder()
    with (
        _environment({**defaults, **(environment or {})}),
        temporary_folder("launch") as temp,
        LauncherSignals() as signals,
    ):
        # The server imports its modules while this process imports its own, below. A running server is used unchanged.
        imported = preload if preload is not None else TRAINING if callable(target) else ()
        multiprocessing.forkserver.set_forkserver_preload([*PRELOAD, *imported])
        # It would warn of the semaphores of killed processes, after the launcher's last line.
        with blocked_in_children(), _environment({"PYTHONWARNINGS": "ignore:resource_tracker"}):
            multiprocessing.resource_tracker.ensure_running()  # unblocks them, after its start
        with blocked_in_children():
            multiprocessing.forkserver.ensure_running()
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
            # Hosts may share a file system: the first one moves old files before the others have started any rank.
            if rendezvous is None and (hosts is None or hosts.node == 0):
                put_aside(logs)
        told = {**defaults, **(environment or {})} if hosts is not None or environment else {}
        folder = str(logs) if logs else None
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""  # torch's handlers would raise while it starts ranks
        if rendezvous is not None:
            # In torch 2.13 a host that joins later waits forever for the address of the store that the agents share.
            os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        shown = None if tee is None else tuple(tee)
        job = LaunchJob(target, args, str(temp), folder, threads, shown, told)
        tail = LogTail(logs, tee, temp) if logs is not None and tee else contextlib.nullcontext()
        if hosts is not None:
            # Hides c10d's messages, with stacks, about each attempt to reach a lost host.
            os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
        with tail:
            return _run(job, ranks, topology, restarts, hosts, rendezvous, grace, signals)


def put_aside(logs: Path) -> None:
    """Move the logs of an earlier run's ranks into a folder that is named by the time of their last line."""
    earlier = sorted(logs.glob("rank-*.log"))
    last = datetime.fromtimestamp(max((path.stat().st_mtime for path in earlier), default=0.0))
    for path in earlier:
        if path.stat().st_size:
            folder = logs / f"{last:%Y-%m-%dT%H-%M-%S}"
            folder.mkdir(exist_ok=True)
            path.rename(folder / path.name)
        else:
            path.unlink()


def user_error(message: object) -> NoReturn:
    """End this program with exit code 2 and one line, which rank 0 alone prints."""
    environment = read_environment()
    if environment is None or environment.rank == 0:
        print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(MESSAGE_TIME)  # launchers stop all ranks when one ends, and rank 0 may have started late
    raise SystemExit(2)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def print_outcome(outcome: Outcome) -> None:
    """Print a launch's result to the standard error: the failed rank's traceback, then one line with the cause."""
    if outcome.trace:
        print(f"\n{outcome.trace.rstrip()}", file=sys.stderr)
    if outcome.line:
        # A progress display that was killed leaves the cursor hidden, in the middle of a line.
        print(("\x1b[?25h\n" if sys.stderr.isatty() else "") + outcome.line, file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------------


def _run(
    job: LaunchJob,
    ranks: int,
    topology: Topology | None,
    restarts: int,
    hosts: Hosts | None,
    rendezvous: Mapping[str, Any] | None,
    grace: float,
    signals: LauncherSignals,
) -> Outcome:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException

    from .agent import Agent, ChildFailedError
    from .elastic import elastic_rendezvous
    from .rendezvous import HostRendezvous, JobEnded, LocalRendezvous

    def again(why: Exits | str, attempt: int) -> None:
        failures = read_failures(Path(job.folder))
        ranks = agent.ranks if agent is not None else []
        line = why if isinstance(why, str) else _explain(why, failures, ranks, name, job).line
        print_outcome(Outcome(0, f"{line.removesuffix(_STOPPED)}; restarting all ranks ({attempt} of {restarts})"))
        for path in Path(job.folder).glob("rank-*.json"):
            path.unlink(missing_ok=True)

    agent: Agent | None = None
    name = partial(_name, job.folder, topology)
    why: str | None = None
    with _quiet("torch.distributed", "torch.multiprocessing"):
        try:
            signals.watch(lambda number: SignalException(f"got {number.name}", sigval=number))
            handler: RendezvousHandler = LocalRendezvous()
            if hosts is not None:
                handler = HostRendezvous(hosts, restarts)
            elif rendezvous is not None:
                handler = elastic_rendezvous(rendezvous)
            limits, here = (STOP, grace), _address(hosts, rendezvous)
            logs = DefaultLogsSpecs(str(Path(job.folder) / "torch"))  # empty: ranks redirect their own output
            agent = Agent(job, ranks, handler, restarts, again, logs, limits, here, signals)
            agent.launch()
            return Outcome(0)
        except SignalException as stop:
            line = f"stopped by {stop.sigval.name}; all {ranks} ranks have ended"
            if hosts is None:
                agent = None  # hosts may leave: the others continue
            else:
                why = f"{hosts.names[hosts.node]} was {line}"
            return Outcome(128 + stop.sigval, line, cause=hosts is None)
        except ChildFailedError as error:
            exits = {rank: failure.exitcode for rank, failure in error.failures.items()}
            ranks_here = agent.ranks if agent is not None else []
            outcome = _explain(exits, read_failures(Path(job.folder)), ranks_here, name, job)
            if hosts is not None and agent is not None:
                reason = agent.end_reason(0.0 if outcome.cause else CAUSE_TIME)
                if reason is not None and not outcome.cause:
                    return Outcome(1, reason, cause=False)
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


def _explain(
    exits: Exits, failures: list[Failure], ranks: list[int], name: Callable[[int], str], job: LaunchJob
) -> Outcome:
    """Return the outcome of the first failure: of a rank that was killed, or the earliest error."""
    for rank, code in exits.items():
        # A rank that raised an error has written it down; this one was killed.
        if not any(failure.rank == rank for failure in failures):
            return Outcome(128 - code if code < 0 else code, f"{name(rank)} died: {_exit(code)}{_STOPPED}")
    # A lost connection is a consequence of another rank's end: shown only if there is no other failure.
    first = min(failures, key=lambda failure: (failure.lost_peer, failure.when))
    if first.code == 2:
        return Outcome(2)
    consequence = _consequence(first, read_ends(job.folder, ranks, exits), name)
    if consequence is not None:
        return Outcome(1, consequence + _STOPPED, first.trace)
    # Some errors name their rank, after the exception's type.
    kind, _, message = first.line.partition(": ")
    named = message.startswith(f"rank {first.rank} (")
    line = f"{message} ({kind.rpartition('.')[2]})" if named else f"{name(first.rank)} failed: {first.line}"
    line += f" (all ranks' output: {job.logs})" if job.logs and first.lost_peer else ""
    if first.line == _NO_DEEPSPEED:
        script = job.target if isinstance(job.target, Path) else "train.py"
        line += (
            f". To run the script as it is, write triax run --module triax.compat.deepspeed {script}, or change its "
            "import to: import triax.compat.deepspeed as deepspeed"
        )
    return Outcome(first.code, line, first.trace, cause=not first.lost_peer)


def _consequence(failure: Failure, ends: Ends, name: Callable[[int], str]) -> str | None:
    """Return the cause of a failure that is another rank's end or slowness; None if the failure is the cause."""
    who = name(failure.rank)
    if ends.left and (failure.lost_peer or failure.timed_out):
        names = ", ".join(map(name, ends.left))
        return (
            f"{names} left with exit status 0, without an exception, before its script ended, and {who} lost it: leave "
            "out os._exit, or call it when all ranks are done"
        )
    if f"rank {failure.rank} (" in failure.line and "because" in failure.line:  # the rank has found the cause
        return None
    if ends.done and (failure.lost_peer or failure.timed_out):
        names = ", ".join(map(name, ends.done))
        return f"{names} ended without an error, while {who} waited for it: let all ranks take the same number of steps"
    if ends.at_work and failure.timed_out:
        names = ", ".join(map(name, ends.at_work))
        return (
            f"{who} waited until its time limit expired, while {names} was still at work: if that rank is only slow, "
            "give triax.Grid(timeout=...) more seconds"
        )
    return None


def _name(folder: str, topology: Topology | None, rank: int) -> str:
    """Return a rank's name for messages: ``rank 5 (pipe 1, data 0, tensor 1)``; without a grid, ``rank 3``.

    Args:
        folder: folder of this launch, in which a rank that has made a grid writes its name.
        topology: topology of the ranks' grid, if ``launch`` was given one.
        rank: the rank.
    """
    file = Path(folder, f"name-{rank}")
    if topology is None:
        return file.read_text() if file.exists() else f"rank {rank}"
    coordinates = ", ".join(f"{axis} {at}" for axis, at in topology.coordinate(rank)._asdict().items())
    return f"rank {rank} ({coordinates})"


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
    """Set environment variables in this context, and restore them afterwards."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _quiet(*prefixes: str) -> Iterator[None]:
    """Silence loggers in this context: torch logs each process that it stops, and a traceback of its own."""
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


def _address(hosts: Hosts | None, rendezvous: Mapping[str, Any] | None) -> str | None:
    if hosts is not None:
        return own_address(hosts.address)
    return None if rendezvous is not None else "127.0.0.1"


def own_address(address: str) -> str:
    """Return this host's address on the route to another address; no packet is sent."""
    try:
        family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):  # UnicodeError: a part of the name is too long
        return address


def interface_name(address: str) -> str | None:
    """Return the name of the network interface with an IPv4 address; None if it is unknown."""
    if address.startswith("127."):
        return loopback_interface()
    try:
        import fcntl
    except ImportError:  # not a Unix
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = name.encode()[:15].ljust(256, b"\0")
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR, Linux's number
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
