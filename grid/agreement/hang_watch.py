"""Hang watch: a thread on each rank that finds the rank for which all others wait, and names its op and line.

A rank that hangs prints nothing, and the ranks that wait for it only know that they waited too long. When a rank's time
limit expires, it asks all ranks through the store. The thread of each rank answers with the line that its rank executes
and whether that line waits for another rank. The rank that does not wait, or does not answer, is reported. Without a
question the thread only looks into the store, once a second.

``Grid.start_hang_watch`` starts it: when an engine compares the ranks' options (engine/setup/rank_consistency.py), at
each step (grid/agreement/failure.py) and with the first check of the order of calls.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import linecache
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from torch.distributed import Store

    from ..comm.axis import Axis
    from .call_order import CallOrder

T = TypeVar("T")

_ASK, _STAND = "triax/ask", "triax/stand"
GONE = "does not answer: it has ended, was killed or was stopped, or its host is gone"
_HANG, _LOST = "hang", "lost"  # questions: which rank hangs, and which is gone
_ANSWER = 3.0  # seconds in which the other ranks must answer
_LEAVE = 8.0  # seconds after the report in which this rank's own code may still raise an error
_STORE = 3.0  # seconds in which the store must answer
_PACKAGE = Path(__file__).resolve().parents[2]
# All folders of triax but models/, whose layers a user writes or changes.
_OURS = tuple(f"{file.parent}{os.sep}" for file in _PACKAGE.glob("*/__init__.py") if file.parent.name != "models")
_LIBRARY = str(Path(os.__file__).parent)
_TIMED_OUT = re.compile(r"timed out|timeout|time limit", re.IGNORECASE)
# Messages of a rank whose peer has ended: of gloo, NCCL and the store, in torch 2.11 to 2.13, and of the engine when
# another rank's failure was reported to it.
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|remote peer|peer (closed|disconnected)|"
    r"gloo|nccl|socket|lost (the )?(peer|rank|connection)|stopped( at \S+)?, because rank",
    re.IGNORECASE,
)
_WAITS = re.compile(r"wait\(|recv\(|barrier\(|all_reduce|all_gather|reduce_scatter|broadcast|all_to_all|synchronize")


class Activity:
    """Record of the op or call that a rank executes now. The executor writes its op here, an engine its call.

    Attributes:
        what: object that prints as the op or call; None between two calls, while the training script's own code runs.
        since: time of ``time.perf_counter`` at which it began.
        calls: number of calls so far, by the first word of the call: ``train_batch``, ``step``.
    """

    __slots__ = ("calls", "since", "what")

    def __init__(self) -> None:
        self.what: object = None
        self.calls: dict[str, int] = {}
        self.since = time.perf_counter()

    def start(self, what: object) -> None:
        """Record that the rank begins another op or call now."""
        self.what, self.since = what, time.perf_counter()

    def counts(self) -> str:
        """Return the number of calls of each kind, in words."""
        return ", ".join(f"{count} x {call}" for call, count in self.calls.items()) or "no call of an engine"


class WatchedGrid(Protocol):
    """Protocol: the attributes and methods of a ``Grid`` that ``HangWatch`` uses."""

    rank: int
    size: int
    timeout: float
    activity: Activity
    call_orders: dict[Axis, CallOrder]

    def describe(self, rank: int | None = None) -> str: ...
    def report_failure(self, message: str) -> None: ...
    def reason_to_stop(self) -> str | None: ...


class _StoreThread(threading.Thread):
    """Daemon thread that calls the store, and ends before the interpreter does.

    Python ends a daemon thread where it next takes the interpreter's lock. In a call of the store that is C++ code that
    may not be unwound, and the process would be aborted after its work is done.

    Attributes:
        over: event that tells the thread to end.
    """

    def __init__(self, target: Callable[[], object], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self.over = threading.Event()

    def end(self) -> None:
        """Tell the thread to end."""
        self.over.set()


class Caller(_StoreThread):
    """Thread that makes one call after another, each of which may block forever."""

    def __init__(self) -> None:
        super().__init__(self._serve, "calls with a limit")
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self.start()

    def begin(self, call: Callable[[], T]) -> Future[T]:
        """Make a call after those before it, and return its future result."""
        answer: Future[T] = Future()
        self._calls.put((answer, call))
        return answer

    def end(self) -> None:
        super().end()
        self._calls.put(None)

    def _serve(self) -> None:
        while (job := self._calls.get()) is not None and not self.over.is_set():
            answer, call = job
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)
            del job, answer, call  # what it holds may be big, and the next call may be long in coming


class LimitedCalls:
    """Calls that may block forever, with time limits, on a thread that is there already.

    A process without memory for another thread would hang where it starts one. So a thread is started at once, and
    another one only if a call on the first has not returned.
    """

    def __init__(self) -> None:
        self._idle = [Caller()]
        self._ended = False

    def within(self, seconds: float, call: Callable[[], T]) -> T:
        """Return the result of a call. If it takes too long, its thread is abandoned.

        Raises:
            TimeoutError: the call did not return in time.
        """
        try:
            caller = self._idle.pop()
        except IndexError:
            caller = Caller()
        answer = caller.begin(call)
        late = not wait([answer], seconds).done
        if late or self._ended:
            caller.end()
        else:
            self._idle.append(caller)
        if late:
            raise TimeoutError(f"no answer within {seconds:g} s")
        return answer.result()

    def end(self) -> None:
        """End the threads."""
        self._ended = True
        while self._idle:
            self._idle.pop().end()


@atexit.register
def _end_store_threads() -> None:
    """End all threads that call the store, at the end of the program; wait no longer than the store may take."""
    threads = [thread for thread in threading.enumerate() if isinstance(thread, _StoreThread)]
    for thread in threads:
        thread.end()
    deadline = time.monotonic() + _STORE
    # A watch may start one more call, which has a limit of its own, before it ends.
    while threads and time.monotonic() < deadline:
        threads[0].join(deadline - time.monotonic())
        threads = [thread for thread in threading.enumerate() if isinstance(thread, _StoreThread)]


class HangWatch:
    """Watching thread of one rank. It runs until its grid is closed.

    Args:
        grid: the grid of the rank. The watch must be made on the thread that does the rank's work, whose line it
            reports.
        store: the grid's store, through which the ranks ask and answer.
    """

    def __init__(self, grid: WatchedGrid, store: Store) -> None:
        self._grid = weakref.ref(grid)
        self._store, self._limit, self._me = store, grid.timeout, grid.rank
        self._main = threading.get_ident()
        self._thread = _StoreThread(self._run, "watches for hung ranks")
        self._over = self._thread.over
        self._finding = threading.Lock()
        self._calls = LimitedCalls()
        self._said = False
        self._beat = min(1.0, grid.timeout / 10)
        self._reported: float | None = None
        self._thread.start()

    def end(self) -> None:
        """Stop the thread: the grid is closed."""
        self._over.set()

    def find_cause(self, lost: bool = False) -> str | None:
        """Ask all ranks after a wait of this rank has failed; return a message that names the rank that is to blame.

        None if all ranks answer and none hangs.

        Args:
            lost: True if a connection was lost: a rank is gone, and no rank hangs. Otherwise a time limit has expired.
        """
        grid = self._grid()
        if grid is None:
            return None
        with self._finding:
            return self._verdict(grid, waits=True, question=_LOST if lost else _HANG)

    def _run(self) -> None:
        try:
            while not self._over.wait(self._beat):
                grid = self._grid()
                if grid is None:
                    return
                for order in list(grid.call_orders.values()):
                    with contextlib.suppress(TimeoutError, RuntimeError):
                        self._calls.within(_STORE, partial(order.answer, self._doing))
                activity = grid.activity
                what, since = activity.what, activity.since
                # Work may take longer than the time limit, so a rank that works never asks: only one that waits does.
                expired = what is not None and time.perf_counter() - since > self._limit and self._where()[0]
                if expired or self._asked():
                    with self._finding:
                        self._verdict(grid, waits=None)
                del grid
                if self._said:
                    self._leave_if_stuck(activity, since)
                    return
        finally:
            self._calls.end()

    def _asked(self, question: str | None = None) -> bool:
        """Return True if a rank has asked; if ``question`` is given, that question."""
        with contextlib.suppress(TimeoutError, RuntimeError):
            if self._calls.within(_STORE, lambda: self._store.check([_ASK])):
                return question is None or self._store.get(_ASK).decode() == question
        return False

    def _verdict(self, grid: WatchedGrid, waits: bool | None, question: str = _HANG) -> str | None:
        """Publish the line that this rank executes, read the lines of the others, and report the rank to blame.

        Args:
            grid: the grid of the ranks.
            waits: True if this rank is known to wait for another; None: look at the line that it executes.
            question: asked if no rank has asked before.

        Returns:
            The message of the first rank that reported a failure, or None.
        """
        answers, self._said = not self._said, True
        activity = grid.activity
        verdict, where = self._where()
        waiting = verdict if waits is None else waits
        doing = "between two calls of the engine" if activity.what is None else f"at {activity.what}"
        seconds = time.perf_counter() - activity.since
        text = f"{doing} for {seconds:.0f} s, {'waiting, ' if waiting else ''}in {where}"
        if answers and question == _HANG and not self._asked(_LOST):
            print(f"{grid.describe()} stands {text}", file=sys.stderr, flush=True)
        with contextlib.suppress(TimeoutError, RuntimeError):
            if answers:
                answer = json.dumps([waiting, text])
                self._calls.within(_STORE, lambda: self._store.set(f"{_STAND}/{self._me}", answer))
            asked = self._calls.within(_STORE, lambda: self._store.compare_set(_ASK, "", question)).decode()
            stands = self._hear(grid.size)
            guilty = [(rank, text) for rank, (waiting, text) in stands.items() if not waiting]
            silent = [rank for rank in range(grid.size) if rank not in stands]
            names = ", ".join(map(grid.describe, silent[:4]))
            told = "; ".join(f"{grid.describe(rank)} is {text}" for rank, (_, text) in list(stands.items())[:8])
            if asked == _LOST:
                if not silent:
                    return grid.reason_to_stop()
                message = f"{names} {GONE}"
            elif guilty:
                message = "; ".join(f"{grid.describe(rank)} hangs: it is {text}" for rank, text in guilty[:4])
                message += (
                    f"; the time limit of {self._limit:g} s has expired: if it is only slow, give "
                    "triax.Grid(timeout=...) more seconds"
                )
            elif silent:
                message = f"{names} does not answer: it was stopped, or its host is gone; {told}"
            else:
                message = f"every rank waits for another: {told}"
            grid.report_failure(message)
        return grid.reason_to_stop()

    def _hear(self, size: int) -> dict[int, tuple[bool, str]]:
        """Return for each rank that answers in time: True if it waits, and a description of what it executes."""
        deadline = time.monotonic() + _ANSWER + self._beat
        stands: dict[int, tuple[bool, str]] = {}
        while len(stands) < size and time.monotonic() < deadline:
            for rank in set(range(size)) - set(stands):
                key = f"{_STAND}/{rank}"
                if self._calls.within(_STORE, partial(self._store.check, [key])):
                    waiting, text = json.loads(self._store.get(key))
                    stands[rank] = bool(waiting), str(text)
            time.sleep(0.05)
        return stands

    def _where(self) -> tuple[bool, str]:
        """Return True if the rank's own thread waits for a message, and the line of user code that it executes."""
        frame: FrameType | None = sys._current_frames().get(self._main)
        if frame is None:
            return False, "a thread that has ended"
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        waits = bool(_WAITS.search(line)) and is_ours(frame.f_code.co_filename)
        seen = frame
        while seen.f_back is not None and is_ours(seen.f_code.co_filename):
            seen = seen.f_back
        shown = frame if is_ours(seen.f_code.co_filename) else seen
        return waits, f"{Path(shown.f_code.co_filename).name}:{shown.f_lineno} ({shown.f_code.co_name})"

    def _doing(self) -> str:
        """Describe what this rank does now."""
        grid = self._grid()
        what = None if grid is None else grid.activity.what
        return f"{'between two calls of the engine' if what is None else f'at {what}'}, in {self._where()[1]}"

    def _leave_if_stuck(self, activity: Activity, since: float) -> None:
        """End this process if its work does not go on within a time limit after a rank was found to hang.

        The other ranks have stopped then, so nothing waits for this process.

        Args:
            activity: the rank's activity.
            since: ``activity.since`` of the op or call that may be stuck.
        """
        grid = self._grid()
        reason = None if grid is None else grid.reason_to_stop()
        del grid
        deadline = time.monotonic() + _LEAVE
        while time.monotonic() < deadline:
            # A grid that no longer exists has no work that could be stuck: the script caught the error and goes on.
            if self._over.wait(0.1) or activity.since != since or self._grid() is None:
                return
        why = reason or "another rank failed"
        print(f"rank {self._me} does not go on, and its process is ended, because {why}", file=sys.stderr, flush=True)
        os._exit(1)


def timed_out(error: BaseException | None) -> bool:
    """Return True if an error, or one of its causes, reports that a time limit expired."""
    while error is not None:
        if _TIMED_OUT.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def lost_peer(error: BaseException) -> bool:
    """Return True if an exception, or one of its causes, is about a lost connection to another rank."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ConnectionError | EOFError):
            return True
        if isinstance(seen, RuntimeError) and _LOST_PEER.search(str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def with_timeout(seconds: float, call: Callable[[], T]) -> T:
    """Return the result of a call that may block forever. If it takes too long, its thread is abandoned.

    Raises:
        TimeoutError: the call did not return in time.
    """
    calls = LimitedCalls()
    try:
        return calls.within(seconds, call)
    finally:
        calls.end()


def is_ours(file: str) -> bool:
    """Return True for a file of triax, torch or the standard library, where a user does not look for an error."""
    library = file.startswith(_LIBRARY) and "site-packages" not in file
    return file.startswith(_OURS) or library or f"{os.sep}torch{os.sep}" in file or file.startswith("<")
