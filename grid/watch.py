"""Who everybody waits for: a thread of each rank that knows where its own rank stands, and asks the others.

A rank that hangs says nothing, and those that wait for it know no more than that they waited too long. So when a
rank's time is up, it asks through the store; every rank's thread answers with where it stands and whether it waits
for another one; and the one that does not wait, or does not answer, is the one to name. In between the thread looks
once a second whether anybody asks, and nothing else runs.
"""

from __future__ import annotations

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
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch.distributed import Store

    from .grid import Grid

T = TypeVar("T")

_ASK, _STAND = "triax/ask", "triax/stand"
_ANSWER = 3.0  # seconds that the others get to say where they stand
_LEAVE = 8.0  # seconds after the verdict, in which what this rank's own code raises comes first
_STORE = 3.0  # seconds that the store gets to answer
_PACKAGE = Path(__file__).resolve().parent.parent
_OURS = tuple(f"{_PACKAGE / folder}{os.sep}" for folder in ("grid", "pipe", "tensor_parallel", "zero", "engine"))
_LIBRARY = str(Path(os.__file__).parent)
_TIMED_OUT = re.compile(r"timed out|timeout|time limit", re.IGNORECASE)
_WAITS = re.compile(r"wait\(|recv\(|barrier\(|all_reduce|all_gather|reduce_scatter|broadcast|all_to_all|synchronize")


class Place:
    """What a rank is doing: the executor writes its op here, an engine its call.

    Attributes:
        what: printed for the user; None between two calls, in the program's own code.
        since: when that began, as of ``time.perf_counter``.
    """

    __slots__ = ("since", "what")

    def __init__(self) -> None:
        self.what: object = None
        self.since = time.perf_counter()

    def at(self, what: object) -> None:
        """It does something else from now on."""
        self.what, self.since = what, time.perf_counter()


class Watch:
    """A rank's thread; it lives as long as its grid is open.

    Args:
        grid: whose rank this is; made on the thread that does the rank's work.
        store: the grid's.
    """

    def __init__(self, grid: Grid, store: Store) -> None:
        self._grid = weakref.ref(grid)
        self._store, self._limit, self._me = store, grid.timeout, grid.rank
        self._main = threading.get_ident()
        self._over = threading.Event()
        self._finding = threading.Lock()
        self._said = False
        self._beat = min(1.0, grid.timeout / 10)
        self._reported: float | None = None
        threading.Thread(target=self._run, daemon=True, name="watches for hung ranks").start()

    def end(self) -> None:
        """The grid is closed."""
        self._over.set()

    def find(self) -> str | None:
        """After this rank waited too long: ask everybody, and name the rank that they wait for."""
        grid = self._grid()
        if grid is None:
            return None
        with self._finding:
            return self._verdict(grid, waits=True)

    def _run(self) -> None:
        while not self._over.wait(self._beat):
            grid = self._grid()
            if grid is None:
                return
            place = grid.place
            what, since = place.what, place.since
            # Work may take longer than a wait may: who waits too long is the first to ask.
            expired = what is not None and time.perf_counter() - since > self._limit and self._where()[0]
            if expired or self._asked():
                with self._finding:
                    self._verdict(grid, waits=None)
            del grid
            if self._said:
                self._leave_if_stuck(place, since)
                return

    def _asked(self) -> bool:
        with contextlib.suppress(TimeoutError, RuntimeError):
            return bool(within(_STORE, lambda: self._store.check([_ASK])))
        return False

    def _verdict(self, grid: Grid, waits: bool | None) -> str | None:
        """Say where this rank stands, hear the others, and report whom they wait for."""
        if not self._said:
            self._said = True
            place = grid.place
            found, where = self._where()
            waiting = found if waits is None else waits
            doing = "between two calls of the engine" if place.what is None else f"at {place.what}"
            text = f"{doing} for {time.perf_counter() - place.since:.0f} s, {'waiting, ' if waiting else ''}in {where}"
            print(f"{grid.describe()} stands {text}", file=sys.stderr, flush=True)
            with contextlib.suppress(TimeoutError, RuntimeError):
                answer = json.dumps([waiting, text])
                within(_STORE, lambda: self._store.set(f"{_STAND}/{self._me}", answer))
                within(_STORE, lambda: self._store.set(_ASK, "1"))
        with contextlib.suppress(TimeoutError, RuntimeError):
            stands = self._hear(grid.size)
            guilty = [(rank, text) for rank, (waiting, text) in stands.items() if not waiting]
            silent = [rank for rank in range(grid.size) if rank not in stands]
            told = "; ".join(f"{grid.describe(rank)} is {text}" for rank, (_, text) in list(stands.items())[:8])
            if guilty:
                message = "; ".join(f"{grid.describe(rank)} hangs: it is {text}" for rank, text in guilty[:4])
            elif silent:
                names = ", ".join(map(grid.describe, silent[:4]))
                message = f"{names} does not answer: it was stopped, or its host is gone; {told}"
            else:
                message = f"every rank waits for another: {told}"
            grid.report_failure(message)
        return grid.reported_failure()

    def _hear(self, size: int) -> dict[int, tuple[bool, str]]:
        """Where each rank stands, of those that answer in time."""
        deadline = time.monotonic() + _ANSWER + self._beat
        stands: dict[int, tuple[bool, str]] = {}
        while len(stands) < size and time.monotonic() < deadline:
            for rank in set(range(size)) - set(stands):
                key = f"{_STAND}/{rank}"
                if within(_STORE, partial(self._store.check, [key])):
                    waiting, text = json.loads(self._store.get(key))
                    stands[rank] = bool(waiting), str(text)
            time.sleep(0.05)
        return stands

    def _where(self) -> tuple[bool, str]:
        """Whether the rank's own thread waits for a message; and the line of the user's that it is in."""
        frame: FrameType | None = sys._current_frames().get(self._main)
        if frame is None:
            return False, "a thread that has ended"
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        waits = bool(_WAITS.search(line)) and _ours(frame.f_code.co_filename)
        seen = frame
        while seen.f_back is not None and _ours(seen.f_code.co_filename):
            seen = seen.f_back
        shown = frame if _ours(seen.f_code.co_filename) else seen
        return waits, f"{Path(shown.f_code.co_filename).name}:{shown.f_lineno} ({shown.f_code.co_name})"

    def _leave_if_stuck(self, place: Place, since: float) -> None:
        """What cannot be woken must be ended: the others have, and nobody waits for this process any more."""
        deadline = time.monotonic() + _LEAVE
        while time.monotonic() < deadline:
            if self._over.wait(0.1) or place.since != since:
                return
        print(f"rank {self._me} is still there: ended", file=sys.stderr, flush=True)
        os._exit(1)


def timed_out(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, is a time limit's."""
    while error is not None:
        if _TIMED_OUT.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def within(seconds: float, call: Callable[[], T]) -> T:
    """The result of a call that may block for ever, if it comes in time; its thread is left behind otherwise.

    Raises:
        TimeoutError: it did not come.
    """
    found: list[Any] = []

    def run() -> None:
        try:
            found.append((True, call()))
        except BaseException as error:
            found.append((False, error))

    thread = threading.Thread(target=run, daemon=True, name="a call with a limit")
    thread.start()
    thread.join(seconds)
    if not found:
        raise TimeoutError(f"no answer within {seconds:g} s")
    good, value = found[0]
    if not good:
        raise value
    result: T = value
    return result


def _ours(file: str) -> bool:
    """A file of triax or of torch: the user looks for neither."""
    library = file.startswith(_LIBRARY) and "site-packages" not in file
    return file.startswith(_OURS) or library or f"{os.sep}torch{os.sep}" in file or file.startswith("<")
