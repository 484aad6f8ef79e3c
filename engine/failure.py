"""What a rank does that fails on its own: it says why and leaves, so that the ranks that wait for it stop at once."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from ..grid import Grid
from .batch import AgreedError


def all_or_none(grid: Grid, abandon: Callable[[], object], what: str) -> AbstractContextManager[None]:
    """Within it, what fails on this rank alone makes it leave the process group, and say why.

    An ``AgreedError`` passes through: every rank raises it, and none need leave. So does ``GeneratorExit``: whoever
    read a generator has had enough, and nothing failed.

    Args:
        grid: whose process group is left.
        abandon: lets go of every message under way.
        what: the call that this is, for messages.
    """
    return nullcontext() if grid.size == 1 else _guarded(grid, abandon, what)


@contextmanager
def _guarded(grid: Grid, abandon: Callable[[], object], what: str) -> Iterator[None]:
    grid.watch()
    grid.place.at(what)
    try:
        yield
        grid.place.at(None)
    except (AgreedError, GeneratorExit):
        grid.place.at(None)
        raise
    except BaseException as error:
        raise _left(error, grid, abandon) from error


def _left(error: BaseException, grid: Grid, abandon: Callable[[], object]) -> BaseException:
    """Leave the process group; returns what to raise."""
    raised, me = error, grid.describe()
    if not str(error).startswith(me):  # else the executor said which op failed
        reported = grid.cause(error)
        message = f"{me} failed at {grid.place.what}: {type(error).__name__}: {error}"
        if isinstance(error, Exception):  # an interrupt stays one
            stopped = f"{me} stopped at {grid.place.what}, because {reported}"
            raised = RuntimeError(message if reported is None else stopped)
        grid.report_failure(message)
    # Works that are under way keep their connections open, so none may be left: not in the frames either.
    abandon()
    chain: BaseException | None = error
    while chain is not None:
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__
    grid.close()
    return raised
