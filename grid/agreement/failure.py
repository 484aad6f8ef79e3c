"""The context of each step on several ranks, ``all_or_none``: it starts the hang watch, and ends all ranks with one.

A rank that fails reports the reason and leaves the process group, so that waiting ranks stop at once.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from ...base.errors import AgreedError

if TYPE_CHECKING:
    from ..comm.pending import Pending
    from ..grid import Grid


def all_or_none(grid: Grid, abandon: Callable[[], object], what: str) -> AbstractContextManager[None]:
    """Return a context in which an error on this rank alone stops the other ranks too.

    On such an error the rank reports the error in the store and leaves the process group, so that ranks that wait for
    it fail at once. Two errors pass through: ``AgreedError``, which every rank raises, so that none has to leave; and
    ``GeneratorExit``, which is no failure: the reader of a generator stopped early.

    Args:
        grid: the grid whose process group is left.
        abandon: function that drops all pending messages.
        what: the name of the call, for error messages.
    """
    return nullcontext() if grid.size == 1 else _guarded(grid, abandon, what)


def wait_for(pending: Pending, grid: Grid, what: str) -> None:
    """Wait for an operation. If it fails because another rank has failed, the error names that rank and its reason.

    Args:
        pending: handle of the operation.
        grid: the grid of the operation's ranks.
        what: what this rank does, as a phrase: "gathers unit 3".
    """
    try:
        pending.wait()
    except RuntimeError as error:
        if (cause := grid.failure_cause(error)) is None:
            raise
        raise RuntimeError(f"{grid.describe()} stopped where it {what}, because {cause}") from error


@contextmanager
def _guarded(grid: Grid, abandon: Callable[[], object], what: str) -> Iterator[None]:
    grid.start_hang_watch()
    calls, call = grid.activity.calls, what.partition(" ")[0]
    calls[call] = calls.get(call, 0) + 1
    grid.activity.start(what)
    try:
        yield
        grid.activity.start(None)
    except (AgreedError, GeneratorExit):
        grid.activity.start(None)
        raise
    except BaseException as error:
        raised = _left(error, grid, abandon)
        if raised is error:
            raise
        raise raised from error


def _left(error: BaseException, grid: Grid, abandon: Callable[[], object]) -> BaseException:
    """Report an error, leave the process group, and return the error to raise.

    The returned error names this rank and its call, or the rank that failed first and so caused the error here.
    """
    raised, me = error, grid.describe()
    if not str(error).startswith(me):  # otherwise the executor has named the op that failed
        reported = grid.failure_cause(error)
        message = f"{me} failed at {grid.activity.what}: {type(error).__name__}: {error}"
        if isinstance(error, Exception):  # a KeyboardInterrupt stays one
            stopped = f"{me} stopped at {grid.activity.what}, because {reported}"
            raised = RuntimeError(message if reported is None else stopped)
        grid.report_failure(message)
    # Pending operations keep their connections open, so no reference to one may be left, in the frames either.
    abandon()
    chain: BaseException | None = error
    while chain is not None:
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__
    grid.close()
    return raised
