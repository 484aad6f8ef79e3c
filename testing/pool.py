"""Pool of gloo ranks for all tests of a pytest process.

    def whole_sum(x):                                   # at the top level of a test file
        dist.all_reduce(x)
        return x

    def test_sum(ranks):
        assert ranks(4, whole_sum, torch.ones(2)) == [...]   # one result per rank

``ranks(n, fn, *args, **kwargs)`` runs ``fn`` on the ranks 0 to n - 1 of a new process group of gloo (for n = 1 in one
process with no group at all), each in a process of its own with torchrun's environment, and returns the list of their
results. The processes stay for the next job, so a job costs milliseconds. Nothing else stays: environment, folder,
groups and torch's switches are put back.

If a rank raises, ``RankFailure`` shows its traceback, and after it in a few lines what became of each other rank. A
rank that dies is named with its signal. After ``timeout`` seconds each rank is asked where it stands, and
``RankTimeout`` says it. Ranks that do not come back by themselves are killed and replaced, so the next test gets a
whole pool.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from .rank_process import Address

SIZE = 8
LONGEST = 240.0  # seconds of a job on a busy machine, less than pytest's limit of a test
# If the tests' process has imported one of these, its ranks will: the fork server does it once for all, in 3 s.
COSTLY = ("transformers.models.llama.modeling_llama", "transformers.trainer", "peft")
_OWN = "rank_process.py"  # the file of the ranks' own program, in a traceback
GRACE = 2.0  # seconds that the others get after the first failure, to fail on their own

T = TypeVar("T")
Ranks = Callable[..., list[Any]]
Kind = Literal["raised", "died", "stuck", "returned"]


@dataclass(frozen=True)
class RankReport:
    """Report of one rank of a failed job.

    Attributes:
        rank: the rank.
        kind: how the rank ended.
        summary: the error in one line, such as `ValueError: boom` or `killed by SIGKILL`.
        text: the traceback, or the line of code at which the rank was.
        when: seconds from the start of the job to the error.
    """

    rank: int
    kind: Kind
    summary: str
    text: str
    when: float


class RankFailure(Exception):
    """Error of a job in which a rank did not return. `reports` has each rank's report, the first failure first."""

    def __init__(self, job: str, reports: list[RankReport]) -> None:
        self.job = job
        self.reports = reports
        super().__init__(self._message())

    @property
    def first(self) -> RankReport:
        return self.reports[0]

    def __getitem__(self, rank: int) -> RankReport:
        return next(report for report in self.reports if report.rank == rank)

    def _headline(self) -> str:
        return (
            f"rank {self.first.rank} {self._verb(self.first)} after {self.first.when:.2f} s in {self.job}: "
            f"{self.first.summary}"
        )

    def _message(self) -> str:
        parts = [self._headline(), self.first.text.rstrip()]
        for report in self.reports[1:]:
            parts.append(f"--- rank {report.rank} {self._verb(report)} ({report.when:.2f} s): {report.summary}")
            if report.kind != "returned":
                parts.append(_last_lines(report.text, 6))
        return "\n".join(part for part in parts if part)

    @staticmethod
    def _verb(report: RankReport) -> str:
        return {"stuck": "did not come back", "returned": "returned"}.get(report.kind, report.kind)


class RankTimeout(RankFailure):
    """The time limit passed; each report's text says where its rank stood."""

    def _headline(self) -> str:
        stuck = [report.rank for report in self.reports if report.kind == "stuck"]
        return f"{self.job} did not end within its time limit; still running: ranks {stuck}"

    def _message(self) -> str:
        parts = [self._headline()]
        for report in self.reports:
            parts.append(f"--- rank {report.rank} {self._verb(report)} ({report.when:.2f} s): {report.summary}")
            if report.kind != "returned":
                parts.append(_last_lines(report.text, 30))
        return "\n".join(part for part in parts if part)


def _last_lines(text: str, count: int) -> str:
    lines = text.rstrip().splitlines()
    return "\n".join((["    ..."] if len(lines) > count else []) + lines[-count:])


class _Worker:
    """A rank's process and the pipe to it."""

    def __init__(self, pool: Pool, rank: int) -> None:
        from . import rank_process

        self.rank = rank
        self.pipe, theirs = pool.context.Pipe()
        pool.spawned += 1
        self.stand = pool.folder / f"rank{rank}-{pool.spawned}.txt"  # where it writes where it stands
        self.process = pool.context.Process(
            target=rank_process.serve,
            args=(rank, theirs, str(self.stand), pool.filterwarnings),
            daemon=True,
            name=f"rank {rank} of the test pool",
        )
        self.process.start()
        theirs.close()
        self.ready = False

    def wait_ready(self, seconds: float) -> bool:
        """True if the rank has finished and cleaned up its last job within `seconds`."""
        deadline = time.monotonic() + seconds
        while not self.ready:
            left = deadline - time.monotonic()
            try:
                if not self.pipe.poll(max(left, 0)):
                    return False
                self.ready = self.pipe.recv_bytes()[:1] not in (b"+", b"-")
            except (EOFError, OSError):
                return False
        return True

    def is_alive(self) -> bool:
        """True if the process can take a job. A pipe at its end says that it died before the fork server does."""
        return self.process.is_alive() and not (self.ready and self.pipe.poll())

    def where(self) -> str:
        """The Python stacks of all its threads."""
        before = self.stand.stat().st_size if self.stand.exists() else 0
        with contextlib.suppress(OSError):
            os.kill(self.process.pid or 0, signal.SIGUSR1)
        # A busy machine takes its time to answer; a stopped process never does.
        text, deadline = "", time.monotonic() + max(1.0, 2 * os.getloadavg()[0] / (os.cpu_count() or 1))
        while time.monotonic() < deadline:
            time.sleep(0.02)
            new = self.stand.read_text()[before:] if self.stand.exists() else ""
            if new == text and "in <module>" in new:  # the last line of the main thread, which comes last
                break
            text = new
        return _job_frames(text) or "(it did not say where: it may be stopped, or not yet started)"

    def end(self) -> None:
        self.process.kill()
        self.process.join(5)
        self.pipe.close()


def _job_frames(text: str) -> str:
    """A faulthandler dump without the pool's own frames and threads."""
    threads = []
    for thread in text.replace("Current thread", "\nCurrent thread").strip().split("\n\n"):
        lines = [line for line in thread.strip().splitlines() if line]
        if any("in watch" in line and _OWN in line for line in lines):
            continue
        cut = next((i for i, line in enumerate(lines) if _OWN in line), len(lines))
        if len(lines[:cut]) > 1 or len(lines) == cut:
            threads.append("\n".join(lines[:cut]))
        else:  # the rank was in the pool's own code: between jobs, or starting a group
            threads.append("\n".join(lines[:8]))
    return "\n".join(threads)


class Pool:
    """Up to ``SIZE`` ranks, started when a job first needs them, kept until the end.

    Attributes:
        filterwarnings: lines of pytest's option of this name, which apply on ranks that start later.
    """

    def __init__(self) -> None:
        from ..base.ports import LOOPBACK
        from ..grid.comm.tcp_store import serve_store
        from . import rank_process

        self.folder = Path(tempfile.mkdtemp(prefix="triax-pool-"))
        self.context = multiprocessing.get_context("forkserver")
        self.filterwarnings: tuple[str, ...] = ()
        self.workers: list[_Worker] = []
        self.spawned = 0
        self.jobs = 0
        self.owner = os.getpid()
        # Also torch's extra threads are switched off before they exist, and the server finds this folder.
        changes = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(self._path())}
        interface = rank_process.loopback()
        if interface is not None:
            changes["GLOO_SOCKET_IFNAME"] = interface
        with _environment(changes):
            imported = [name for name in COSTLY if name in sys.modules]
            self.context.set_forkserver_preload([*imported, "triax.testing.rank_process"])
            multiprocessing.forkserver.ensure_running()
        self.store = serve_store(LOOPBACK)

    @staticmethod
    def _path() -> list[str]:
        """Return the folders of sys.path, so that the fork server finds what this process finds."""
        return [folder for folder in sys.path if folder]

    def run(
        self,
        n: int,
        fn: Callable[..., T],
        *args: Any,
        timeout: float = 60,
        init_group: bool = True,
        new_processes: bool = False,
        **kwargs: Any,
    ) -> list[T]:
        """`fn(*args, **kwargs)` on ranks 0..n-1 of a fresh group; their results, in order of rank.

        `init_group=False`: the environment alone, as torchrun hands it over, with a free MASTER_PORT.
        `new_processes=True`: these processes had no job before and get none after. For what is measured of a process,
        whose heap depends on earlier jobs, and for what changes a process for good.
        """
        if not 1 <= n <= SIZE:
            raise ValueError(f"the pool has {SIZE} ranks, and {n} were asked for: give 1 to {SIZE}")
        while isinstance(fn, functools.partial):
            args, kwargs, fn = (*fn.args, *args), {**fn.keywords, **kwargs}, fn.func
        from . import rank_process

        timeout = max(timeout, min(timeout * slowdown(), LONGEST))
        module, qualname = self._address(fn)
        self.jobs += 1
        job = {
            # Where the ranks find one another: a prefix for each job, so that no job sees another, in one store, to
            # which a rank connects once. (Now and then a connection takes exactly 5 s in torch 2.13.)
            "store": f"job{self.jobs}",
            "store_port": self.store.port,
            "size": n,
            "module": module,
            "qualname": qualname,
            "arguments": rank_process.dump((args, kwargs), self._module_address),
            "timeout": timeout,
            "init_group": init_group,
            "port": _free_port(),
        }
        # The pool's own processes wait meanwhile: what they have imported and compiled is worth seconds.
        held = [] if new_processes else self.workers
        try:
            return self._collect(self._workers(n, held), job, f"{qualname} on {n} rank{'s' * (n > 1)}", timeout)
        except BaseException:
            # Whoever is not ready by now is in the middle of something: an interrupt, or a rank that hangs.
            for worker in held[:n]:
                if not worker.wait_ready(0):
                    worker.end()
            raise
        finally:
            for worker in held if new_processes else ():
                worker.end()

    def _address(self, fn: Any) -> tuple[Address, str]:
        """Return where a rank finds ``fn``: the address of its module, and its name there."""
        from . import rank_process

        name = getattr(fn, "__module__", None)
        qualname = getattr(fn, "__qualname__", repr(fn))
        module = sys.modules.get(name or "")
        resolved = None
        if module is not None and "<" not in qualname:
            with contextlib.suppress(AttributeError):
                resolved = rank_process.resolve(module, qualname)
        if module is None or resolved is not fn:
            where = ""
            with contextlib.suppress(TypeError):
                where = f" ({Path(inspect.getfile(fn)).name}:{inspect.unwrap(fn).__code__.co_firstlineno})"
            raise TypeError(
                f"a rank cannot find {qualname}{where} by its name: give a function from the top level of a "
                "file, and what it closes over as arguments"
            )
        return self._module_address(module), qualname

    def _module_address(self, module: types.ModuleType) -> Address:
        from . import rank_process

        path = getattr(module, "__file__", None)
        if path is None:
            return module.__name__, None, 0, ""
        path = str(Path(path).resolve())
        date = os.stat(path).st_mtime_ns
        return module.__name__, path, date, rank_process.compiled(path, date, str(self.folder))

    def _workers(self, n: int, held: list[_Worker]) -> list[_Worker]:
        """The first n workers of those held, whole: those that died or were killed are replaced."""
        for rank in range(n):
            if rank == len(held):
                held.append(_Worker(self, rank))
            elif not held[rank].is_alive():
                held[rank].end()
                held[rank] = _Worker(self, rank)
        for worker in held[:n]:
            if not worker.wait_ready(60):
                worker.end()
                raise RuntimeError(f"rank {worker.rank} of the test pool did not start:\n{worker.where()}")
        return held[:n]

    def _collect(self, workers: list[_Worker], job: dict[str, Any], name: str, timeout: float) -> list[Any]:
        start = time.monotonic()
        deadline = start + timeout
        results: dict[int, bytes] = {}
        returned: dict[int, float] = {}
        failures: dict[int, RankReport] = {}
        message = pickle.dumps(job)
        for worker in workers:
            worker.ready = False
            with contextlib.suppress(OSError):  # it died this instant: its sentinel says so below
                worker.pipe.send_bytes(message)
        while len(results) + len(failures) < len(workers):
            waiting = [w for w in workers if w.rank not in results and w.rank not in failures]
            handles: list[Any] = [w.pipe for w in waiting]
            handles += [w.process.sentinel for w in workers if w.rank not in failures]
            happened = connection.wait(handles, max(deadline - time.monotonic(), 0))
            if not happened:
                break
            for worker in workers:
                if worker in waiting and worker.pipe in happened:
                    with contextlib.suppress(EOFError, OSError):
                        outcome = worker.pipe.recv_bytes()
                        if outcome[:1] == b"+":
                            results[worker.rank] = outcome[1:]
                            returned[worker.rank] = time.monotonic() - start
                        else:
                            when, summary, text = pickle.loads(outcome[1:])
                            failures[worker.rank] = RankReport(worker.rank, "raised", summary, text, when - start)
                        continue
                if worker.process.sentinel in happened and worker.rank not in failures:
                    results.pop(worker.rank, None)
                    failures[worker.rank] = self._died(worker, time.monotonic() - start)
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE)
        stuck = [w for w in workers if w.rank not in results and w.rank not in failures]
        if not failures and not stuck:
            self._release(workers)
            return [pickle.loads(results[w.rank]) for w in workers]
        timed_out = not failures
        now = time.monotonic() - start
        reports = sorted(failures.values(), key=lambda report: report.when)
        for worker in stuck:
            summary = "still running at the time limit" if timed_out else "still running; killed"
            reports.append(RankReport(worker.rank, "stuck", summary, worker.where(), now))
        for worker in stuck:
            worker.end()
        for worker in workers:
            if worker.rank in results:
                summary = "it had nothing more to do"
                reports.append(RankReport(worker.rank, "returned", summary, "", returned[worker.rank]))
        self._release([w for w in workers if w.rank in results])
        for worker in workers:
            if worker.rank not in results and not worker.wait_ready(GRACE):
                worker.end()
        raise (RankTimeout if timed_out else RankFailure)(name, reports)

    def _release(self, workers: list[_Worker]) -> None:
        """Every rank has answered: those that wait with open sockets may close them."""
        for worker in workers:
            with contextlib.suppress(OSError):
                worker.pipe.send_bytes(b"done")
        for worker in workers:
            if not worker.wait_ready(10):
                worker.end()

    def _died(self, worker: _Worker, when: float) -> RankReport:
        worker.process.join(5)
        code = worker.process.exitcode or 0
        summary = f"killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit status {code}"
        text = worker.stand.read_text() if worker.stand.exists() else ""  # of a crash: faulthandler's words
        return RankReport(worker.rank, "died", summary, text, when)

    def close(self) -> None:
        if os.getpid() == self.owner:
            for worker in self.workers:
                worker.end()
            self.workers.clear()
            shutil.rmtree(self.folder, ignore_errors=True)


@functools.cache
def pool() -> Pool:
    """Return the one pool of this process."""
    made = Pool()
    atexit.register(made.close)
    return made


def run_ranks(n: int, fn: Callable[..., T], *args: Any, **options: Any) -> list[T]:
    """Run ``fn`` on n ranks of the one pool; see ``Pool.run``. The fixture ``ranks`` does the same in a test."""
    return pool().run(n, fn, *args, **options)


def slowdown() -> float:
    """Return how many times as long as on an idle machine a process takes now. Limits of tests are multiplied by it."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
