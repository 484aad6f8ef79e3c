"""Offsets between the clocks of the ranks, for one time axis in a trace.

Ranks of one host (one boot of one kernel, one time namespace) share the clock that ``time.perf_counter`` reads. For
each further clock, rank 0 exchanges messages with the first rank that reads it. A message sent at a, answered at b by
the other clock and received at c shows that this clock is b - (a + c) / 2 ahead, with an error of at most (c - a) / 2
(Cristian 1989). Of several exchanges the fastest counts.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from ....grid import Grid

_EXCHANGES = 16
_TAG = 1  # no other message is in flight at that time


class Offset(NamedTuple):
    """Difference of a clock from that of rank 0, in seconds: how far it is ahead, and the largest error of that."""

    ahead: float
    error: float


def clock_name() -> str:
    """Return the name of the clock that this process reads. Processes of one host have the same one."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    with contextlib.suppress(OSError):
        return f"{boot.read_text().strip()} {os.readlink('/proc/self/ns/time')}"
    return f"process {os.getpid()}"


def clock_offsets(grid: Grid, name: str | None = None, now: Callable[[], float] = time.perf_counter) -> list[Offset]:
    """Return the offset of each rank's clock, on every rank. Collective.

    Args:
        grid: the ranks. They exchange messages, one host after the other.
        name: name of this rank's clock; None: ``clock_name()``.
        now: reads the clock.
    """
    names: list[str] = grid.world.all_gather_json(clock_name() if name is None else name)
    offsets = {names[0]: Offset(0.0, 0.0)}
    for rank, host in enumerate(names):
        if host in offsets:
            continue
        offset = Offset(0.0, float("inf"))
        reading = torch.zeros(1, dtype=torch.float64, device=grid.device)
        if grid.world.is_first:
            for _ in range(_EXCHANGES):
                sent = now()
                grid.world.send(reading, rank, _TAG).wait()
                grid.world.receive(reading, rank, _TAG).wait()
                theirs, back = float(reading), now()  # on a GPU, float() waits for the message
                if (back - sent) / 2 < offset.error:
                    offset = Offset(theirs - (sent + back) / 2, (back - sent) / 2)
        elif grid.world.rank == rank:
            for _ in range(_EXCHANGES):
                grid.world.receive(reading, 0, _TAG).wait()
                float(reading)
                reading.fill_(now())
                grid.world.send(reading, 0, _TAG).wait()
        offsets[host] = offset
    return [Offset(*known) for known in grid.world.all_gather_json([offsets[each] for each in names])[0]]
