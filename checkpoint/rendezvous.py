"""Rendezvous of all ranks at a call such as ``save_checkpoint``; its error names the ranks that are absent."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from ..base.errors import ArgumentError, CheckpointError
from ..grid import Grid
from ..grid.agreement.agreement import begin_call
from ..grid.agreement.hang_watch import Caller

_WRONG = "\n"  # what a rank sends before its error in place of its call


def rendezvous(
    grid: Grid, seconds: float, call: str, *arguments: str, check: Callable[[], object] = lambda: None
) -> list[str]:
    """Wait until every rank makes the same call. Returns the last argument of each rank.

    Args:
        grid: the grid whose ranks must make the call.
        seconds: the time limit of the wait.
        call: the name of the called function.
        arguments: the arguments of the call. All but the last must be equal on all ranks.
        check: checks the arguments as this rank's user gave them.

    Raises:
        ArgumentError: on every rank, if ``check`` raises it on any rank.
        RuntimeError: if a rank did not make a call in time, or on every rank if one makes another call.
    """
    own_call = "\n".join((call, *arguments))
    try:
        check()
    except ArgumentError as error:
        own_call = f"{_WRONG}{error}"
    caller = Caller()
    try:
        # A rank that makes another call fails here, while one that makes none is missing in the barrier.
        begun = caller.begin(partial(begin_call, grid, call))
        gathered = grid.store_barrier(
            grid.barrier_name(), own_call, seconds, lambda: begun.done() and begun.exception() is not None
        )
        if None not in gathered or begun.done():
            begun.result()
    finally:
        caller.end()
    absent = [rank for rank, text in enumerate(gathered) if text is None]
    if absent:
        raise RuntimeError(
            f"{call} waited {seconds:g} s for {', '.join(grid.describe(rank) for rank in absent)}, which did not call "
            f"it. Call it on every rank, not under `if rank == 0`, because each rank has its own part of the state. If "
            "these ranks only need more time, set checkpoint.patience to more seconds"
        )
    for rank, text in enumerate(gathered):
        if str(text).startswith(_WRONG):
            where = f"{grid.describe(rank)}: " if len(set(gathered)) > 1 else ""
            raise ArgumentError(where + str(text).removeprefix(_WRONG))
    calls = [str(message).split("\n") for message in gathered]
    for rank, other in enumerate(calls):
        if other[:-1] != own_call.split("\n")[:-1]:
            raise RuntimeError(
                f"rank {grid.rank} called {call}({', '.join(arguments)}), but rank {rank} called {other[0]}"
                f"({', '.join(other[1:])}). Make the same call on every rank"
            )
    return [other[-1] for other in calls]


def agreed_tag(grid: Grid, tags: Sequence[str], validation: str) -> str:
    """Return the tag to use: rank 0's.

    Args:
        grid: the run's grid.
        tags: the tag that each rank was given.
        validation: action if the tags differ: ``fail``, ``warn`` or ``ignore``.

    Raises:
        CheckpointError: if the tags differ and ``validation`` is ``fail``.
    """
    if len(set(tags)) > 1:
        text = f"the ranks gave different tags: {', '.join(map(repr, dict.fromkeys(tags)))}"
        if validation == "fail":
            raise CheckpointError(f"{text}. Give the same tag on every rank")
        if validation == "warn" and grid.rank == 0:
            logging.getLogger("triax").warning("%s. The tag of rank 0 is used", text)
    return tags[0]
