"""CallOrder: the order of collective calls on an axis, which must be equal on all its ranks.

    rank 0    gathers unit 1 | gathers unit 2 | ends the step
    rank 1    gathers unit 1 | gathers unit 3            an error on both ranks, and no rank uses what it receives here

Every rank expects the call that followed the same calls the last time. All ranks have made the same calls so far, so
they expect the same one. A rank with that call does what the others do, and the check costs a look-up. A rank with
another call tells it to the store, sends its data under a tag of this call, and asks the others before it uses what it
receives. If all of them have the same new call, they find that out at once. Otherwise the thread of ``HangWatch``
answers for a rank that waits in the expected call. The same thread says where the others are if a rank waits long.
"""

from __future__ import annotations

import json
import sys
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch.distributed import Store

    from ..comm.axis import Axis

_KEPT = 256  # last calls of a rank, which its thread tells others; a rank is ahead of others by its prefetches alone
_PATHS = 2**16  # expected calls that are remembered
_FIRST, _LONGEST = 0.0005, 0.02  # seconds between two looks into the store
_PATIENCE = 0.3  # seconds after which a rank asks the threads of the others
_LONG = 10.0  # seconds of a wait after which a rank says for which ranks it waits
_ANSWER = 2.5  # seconds in which their threads have answered
_TAGS = 2**28  # first of the tags, and their number: an axis's own messages have smaller ones


class OrderedGrid(Protocol):
    """Protocol: the attributes and methods of a ``Grid`` that ``CallOrder`` uses."""

    rank: int
    timeout: float

    def describe(self, rank: int | None = None) -> str: ...
    def report_failure(self, message: str) -> None: ...
    def reported_failure(self) -> str | None: ...


class NewCall(NamedTuple):
    """A call that was not the expected one: its number on the axis, and the call."""

    number: int
    call: str

    @property
    def tag(self) -> int:
        """Tag of the call's messages, equal on all ranks that make the same call."""
        return _TAGS + zlib.crc32(repr(self).encode()) % _TAGS


class CallOrder:
    """Order of one rank's calls on an axis.

    Args:
        grid: the grid of the axis, which is not kept alive.
        axis: the axis on whose ranks the calls must be equal.
        store: the grid's store.
        key: prefix of the keys in the store, equal on all ranks of the axis and different from other prefixes.
        advice: end of the error message: the rule, and what to do.

    Attributes:
        waits: the number of the call for which this rank waits, and the call; None if it does not wait.
    """

    def __init__(self, grid: OrderedGrid, axis: Axis, store: Store, key: str, advice: str) -> None:
        self._grid, self._axis, self._store, self._advice = weakref.proxy(grid), axis, store, advice
        self._key, self._ask = f"{key}/{axis.ranks[0]}", f"{key}/{axis.ranks[0]}/ask"
        self._users = self._count = 0
        self.waits: tuple[int, str] | None = None
        self._waited: tuple[tuple[int, str] | None, float, bool] = (None, 0.0, False)  # ``waits``, since when, said
        self._recent: deque[tuple[int, str]] = deque(maxlen=_KEPT)  # number of a call, and the call
        # What came after the same calls since the last ``ends``, and where these are new, after the same two calls.
        self._path = 0
        self._next: dict[int, str] = {}
        self._last = ("", "")
        self._after: dict[tuple[str, str], str] = {}
        # Keys of the calls that were not the expected ones, in this step and in the one before.
        self._told: list[str] = []
        self._told_before: list[str] = []

    @property
    def last(self) -> int:
        """Number of the call that began last."""
        return self._count - 1

    def new_user(self) -> int:
        """Return the number of a new user of the axis, such as an engine: 0, 1, ..."""
        self._users += 1
        return self._users - 1

    def enter(self, call: str, ends: bool = False) -> None:
        """Begin a call, and agree on it with the other ranks if it is not the expected one."""
        if (new := self.begin(call, ends)) is not None:
            self.agree(new)

    def begin(self, call: str, ends: bool = False) -> NewCall | None:
        """Record that a call begins, which all ranks of the axis must make.

        Args:
            call: the call as a phrase that follows the name of a rank, for example "gathers unit 3".
            ends: True for a call that ends a sequence which repeats, such as a step.

        Returns:
            None if it is the expected call; otherwise the argument of ``agree``.
        """
        number, path, last = self._count, self._path, self._last
        self._recent.append((number, call))
        new = None
        if (self._next.get(path) or self._after.get(last)) != call:
            new = NewCall(number, call)
            self._store.add(self._key_of(new), 1)
            self._told.append(self._key_of(new))
        if len(self._next) >= _PATHS:
            self._next.clear()
        self._next[path] = self._after[last] = call
        self._path = 0 if ends else hash((path, call))
        self._last = last[1], call
        self._count += 1
        if ends:
            for key in self._told_before if self._axis.is_first else ():  # all ranks have agreed on these
                self._store.delete_key(key)
            self._told_before, self._told = self._told, []
        return new

    def agree(self, new: NewCall, limit: float | None = None) -> None:
        """Wait until all ranks of the axis have begun a call that was not the expected one.

        Args:
            new: the call, as ``begin`` returned it.
            limit: seconds after which this rank goes on, because another rank may wait for what comes after the call;
                None: all ranks come to the call whatever this rank does.

        Raises:
            RuntimeError: another rank makes another call in its place, has failed, or makes no call within the grid's
                time limit.
        """
        store, key, begun = self._store, self._key_of(new), time.monotonic()
        pause, asks, asked = _FIRST, begun + _PATIENCE, False
        self.waits = new.number, new.call
        while store.add(key, 0) < self._axis.size:
            now = time.monotonic()
            if now > asks:
                store.set(self._ask, "")
                asks, asked = now + _PATIENCE, True
                self._require_same(new)
                if limit is not None and now - begun > limit:
                    break
                if now - begun > self._grid.timeout:
                    raise RuntimeError(
                        f"{self._grid.describe()} {new.call} and has waited for the time limit of "
                        f"{self._grid.timeout:g} s for {self._missing(new.number)}: if it is only slow, give "
                        "triax.Grid(timeout=...) more seconds"
                    )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        self.waits = None
        if asked:
            store.delete_key(self._ask)

    def answer(self, where: Callable[[], str]) -> None:
        """Tell the others the last calls of this rank, if one of them asks. ``HangWatch`` calls it in its thread.

        Args:
            where: returns what this rank does now.
        """
        if self._store.check([self._ask]):
            self._store.set(f"{self._key}/of/{self._axis.rank}", json.dumps([list(self._recent), where()]))
        waits, since, said = self._waited
        if self.waits != waits or waits is None:
            self._waited = self.waits, time.monotonic(), False
        elif not said and (waited := time.monotonic() - since) > _LONG:
            self._store.set(self._ask, "")
            if waited > _LONG + _ANSWER:
                self._waited = waits, since, True
                self._store.delete_key(self._ask)
                self._say_who_is_missing(*waits, waited)

    def _say_who_is_missing(self, number: int, call: str, seconds: float) -> None:
        """Print for which ranks this one waits, and what they do: perhaps another collective, as ``dist.barrier()``."""
        if missing := self._missing(number):
            text = f"{self._grid.describe()} {call} and has waited {seconds:.0f} s for {missing}: {self._advice}"
            print(text, file=sys.stderr, flush=True)

    def _missing(self, number: int) -> str:
        """Return the names of at most four ranks that have not begun a call, and what they do; "" if there are none."""
        answers, missing = dict(self._answers()), list[str]()
        for rank in self._axis.ranks:
            calls, where = json.loads(answers[rank]) if rank in answers else ([], "")
            if rank != self._grid.rank and (not calls or calls[-1][0] < number):
                does = f"which is {where}" if where else "which does not answer"
                missing.append(f"{self._grid.describe(rank)}, {does}")
        return "; ".join(missing[:4])

    def _answers(self) -> Iterator[tuple[int, bytes]]:
        for place, rank in enumerate(self._axis.ranks):
            key = f"{self._key}/of/{place}"
            if rank != self._grid.rank and self._store.check([key]):
                yield rank, self._store.get(key)

    def _require_same(self, new: NewCall) -> None:
        """Compare this rank's call with the calls that the threads of the other ranks have told."""
        for rank, answer in self._answers():
            theirs = dict(json.loads(answer)[0]).get(new.number, new.call)
            if theirs != new.call:
                me, other = self._grid.describe(), self._grid.describe(rank)
                message = f"{me} {new.call}, and {other} {theirs}: {self._advice}"
                self._grid.report_failure(message)
                raise RuntimeError(message)
        if (reported := self._grid.reported_failure()) is not None:
            raise RuntimeError(f"{self._grid.describe()} stopped where it {new.call}, because {reported}")

    def _key_of(self, new: NewCall) -> str:
        return f"{self._key}/{new.number}/{new.call}"
