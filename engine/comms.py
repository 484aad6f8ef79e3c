"""``comms_logger``: what each collective and message took, and at which bandwidth; DeepSpeed's ``log_summary``.

Bandwidths are those of NCCL's tests (doc/PERFORMANCE.md in its repository), in Gbit/s: with S bytes in t seconds over
n ranks, algorithmic S / t, and of the bus S / t times 2 (n - 1) / n for an all-reduce, (n - 1) / n for an all-gather
and a reduce-scatter, 1 for a broadcast and a message: what each link carries in a ring, to be held against what it can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

from ..grid import Grid
from ..grid.logged import Call, Log
from . import units
from .config import ConfigError
from .config_profiling import CommsLoggerConfig

# Those that are logged, in order, for ``triax.log_summary()``, which names no engine.
_GRIDS: list[ref[Grid]] = []

_BUS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
}
_ALONE = ("send", "receive")  # of two ranks, each on its own


def install(section: CommsLoggerConfig, grid: Grid) -> None:
    """Log what goes through a grid from now on; if it is logged already, it goes on as it does."""
    if not section.enabled or grid.log is not None:
        return
    each = _say if section.verbose and grid.rank == 0 else None
    grid.log_communication(Log(section.wanted, grid.synchronise, each, section.debug))
    _GRIDS.append(ref(grid))


def bandwidths(op: str, size: int, ranks: int, seconds: float) -> tuple[float, float]:
    """Algorithmic and bus bandwidth of one call, in Gbit/s.

    Args:
        op: of ``Call``.
        size: bytes, as ``Call`` counts them.
        ranks: that took part.
        seconds: that it took.
    """
    if seconds <= 0:
        return 0.0, 0.0
    rate = size * 8 / seconds / 1e9
    return rate, rate * _BUS.get(op, lambda n: 1.0)(ranks)


def summary(grid: Grid, show_straggler: bool = False) -> str:
    """The table of all that was logged on this rank; rank 0 prints its own.

    Args:
        grid: that is logged.
        show_straggler: beside each, how much of it was waiting for the slowest rank: the time beyond that of the rank
            that came last, which waited least. Collective over the grid then.

    Raises:
        ConfigError: nothing is logged.
    """
    if grid.log is None:
        raise ConfigError('nothing was logged: set "comms_logger": {"enabled": true} in the configuration')
    # Before the ranks tell each other: that is no part of what is told.
    taken = {call: list(seconds) for call, seconds in grid.log.seconds.items()}
    waits = stragglers(taken, grid.world.all_gather_object(taken)) if show_straggler else None
    text = table(taken, waits)
    if grid.rank == 0:
        print(text, flush=True)
    return text


def log_summary(*engines: Any, show_straggler: bool = False) -> str:
    """``engine.log_summary()`` of these engines, or of every grid that is logged in this process.

    Raises:
        ConfigError: nothing is logged.
    """
    grids = [engine.grid for engine in engines] or [g for each in _GRIDS if (g := each()) is not None]
    if not grids:
        raise ConfigError('nothing was logged: set "comms_logger": {"enabled": true} in the configuration')
    return "\n".join(summary(grid, show_straggler) for grid in dict.fromkeys(grids))


def stragglers(mine: dict[Call, list[float]], everyone: Sequence[dict[Call, list[float]]]) -> dict[Call, float]:
    """Seconds of each kind of collective that were waiting: beyond what the same calls took where they took least.

    Kinds that were not called as often on all ranks of their axis are left out, and messages.
    """
    waits = {}
    for call, seconds in mine.items():
        others = [everyone[rank].get(call, []) for rank in call.ranks]
        if call.op not in _ALONE and all(len(other) == len(seconds) for other in others):
            waits[call] = sum(seconds) - sum(map(min, zip(*others)))
    return waits


def table(taken: dict[Call, list[float]], waits: dict[Call, float] | None = None) -> str:
    """Lines: an operation over an axis, and below it each size of its messages."""
    heads = ["Comm. Op", "Message Size", "Count", "Total Latency(ms)", "Avg Latency(ms)", "algbw_avg (Gbps)"]
    heads += ["busbw_avg (Gbps)", *(["Straggler(ms)"] if waits is not None else [])]
    lines = ["".join(f"{head:<20}" for head in heads).rstrip()]
    last = None
    for call, seconds in sorted(taken.items()):
        if last is None or call[:3] != last[:3]:
            lines.append(f"{call.op} over {call.axis} (ranks {', '.join(map(str, call.ranks))})")
        last = call
        total, count = sum(seconds), len(seconds)
        rates = bandwidths(call.op, call.size, len(call.ranks), total / count)
        cells = [call.caller, units.size(call.size), str(count), f"{total * 1e3:.2f}", f"{total / count * 1e3:.3f}"]
        cells += [f"{rate:.2f}" for rate in rates] if call.size else ["-", "-"]
        if waits is not None:
            cells.append(f"{waits[call] * 1e3:.2f}" if call in waits else "-")
        lines.append("".join(f"{cell:<20}" for cell in cells).rstrip())
    return "\n".join(lines)


def _say(call: Call, seconds: float) -> None:
    caller = f" [Caller Func: {call.caller}]" if call.caller else ""
    algorithmic, bus = bandwidths(call.op, call.size, len(call.ranks), seconds)
    print(
        f"comm op: {call.op}{caller} over {call.axis} | time (ms): {seconds * 1e3:.3f} | msg size: "
        f"{units.size(call.size)} | algbw (Gbps): {algorithmic:.2f} | busbw (Gbps): {bus:.2f}",
        flush=True,
    )
