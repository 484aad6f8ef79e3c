"""How far the ranks' clocks are apart.

Ranks of one host (one boot of one kernel, one time namespace) share the clock that ``time.perf_counter`` reads. For any
other clock, rank 0 exchanges messages with the first rank that reads it: from a message sent at a, answered at b by the
other's clock, and back at c, that clock is b - (a + c) / 2 ahead, give or take (c - a) / 2 (Cristian 1989). The
exchange that took least time counts.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from ..grid import Grid

_EXCHANGES = 16
_TAG = 1  # no message of any other kind is under way meanwhile


class Offset(NamedTuple):
    """A clock beside that of rank 0."""

    ahead: float  # seconds
    error: float  # at most so many


def clock_name() -> str:
    """The clock that this process reads: the same text for processes of one host."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    with contextlib.suppress(OSError):
        return f"{boot.read_text().strip()} {os.readlink('/proc/self/ns/time')}"
    return f"process {os.getpid()}"


def clock_offsets(
    grid: Grid, name: str | None = None, now: Callable[[], float] = time.perf_counter, exchanges: int = _EXCHANGES
) -> list[Offset]:
    """Each rank's clock beside rank 0's, on every rank. Collective.

    Args:
        grid: whose ranks exchange messages, one host after the other.
        name: of this rank's clock; None: ``clock_name()``.
        now: reads it.
        exchanges: with each other clock.
    """
    names: list[str] = grid.world.all_gather_object(clock_name() if name is None else name)
    found = {names[0]: Offset(0.0, 0.0)}
    for rank, each in enumerate(names):
        if each in found:
            continue
        mine = Offset(0.0, float("inf"))
        word = torch.zeros(1, dtype=torch.float64, device=grid.device)
        if grid.world.is_first:
            for _ in range(exchanges):
                sent = now()
                grid.world.send(word, rank, _TAG).wait()
                grid.world.receive(word, rank, _TAG).wait()
                theirs, back = float(word), now()  # (the number is read here: on a GPU that waits for it)
                if (back - sent) / 2 < mine.error:
                    mine = Offset(theirs - (sent + back) / 2, (back - sent) / 2)
        elif grid.world.rank == rank:
            for _ in range(exchanges):
                grid.world.receive(word, 0, _TAG).wait()
                float(word)
                word.fill_(now())
                grid.world.send(word, 0, _TAG).wait()
        found[each] = mine
    known: list[Offset] = grid.world.all_gather_object([found[each] for each in names])[0]
    return known
