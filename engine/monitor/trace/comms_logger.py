"""``monitor.communication``: count, latency and bandwidth of each collective and message.

Bandwidths are defined as in nccl-tests (doc/PERFORMANCE.md), in Gbit/s. For S bytes in t seconds over n ranks the
algorithmic bandwidth is S / t. The bus bandwidth is S / t times 2 (n - 1) / n for an all-reduce, (n - 1) / n for an
all-gather, a reduce-scatter and an all-to-all, and 1 for a broadcast and a message. It is the load of each link of a
ring, to be compared with the link's speed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from ....base.errors import ConfigError
from ....base.records import show
from ....grid import Grid
from ....grid.comm.comms_log import CommsLog, LoggedCall
from .. import format as units

Durations = dict[LoggedCall, list[float]]  # seconds of each call

_BUS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
}
_MESSAGES = ("send", "receive")


def install(grid: Grid, ops: Collection[str], verbose: bool = False, callers: bool = False) -> None:
    """Log the communication of a grid from now on. A grid that is logged already keeps its log.

    Args:
        grid: the grid.
        ops: methods of ``Axis`` to log.
        verbose: rank 0 prints a line for each call.
        callers: log the name of the calling function too.
    """
    if grid.spans.reader(CommsLog) is not None:
        return
    report_call = _print_call if verbose and grid.rank == 0 else None
    grid.spans.read(CommsLog(grid.synchronize, report_call, callers), *ops)


def bandwidths(op: str, size: int, ranks: int, seconds: float) -> tuple[float, float]:
    """Return the algorithmic and the bus bandwidth of one call, in Gbit/s.

    Args:
        op: method of ``Axis``.
        size: bytes, as ``LoggedCall`` counts them.
        ranks: number of ranks that took part.
        seconds: duration of the call.
    """
    if seconds <= 0:
        return 0.0, 0.0
    rate = size * 8 / seconds / 1e9
    return rate, rate * _BUS.get(op, lambda n: 1.0)(ranks)


def summary(grid: Grid, show_straggler: bool = False) -> str:
    """Return the table of the calls that were logged on this rank. Rank 0 also prints its own table.

    Args:
        grid: a grid that is logged.
        show_straggler: add a column with the time spent waiting for the slowest rank, which is the time beyond that of
            the rank that waited least in the same call. Collective over the grid if it is set.

    Raises:
        ConfigError: the grid is not logged.
    """
    log = grid.spans.reader(CommsLog)
    if log is None:
        raise ConfigError(
            "no communication was logged: pass monitor=triax.Monitoring(communication=triax.CommunicationLog())"
        )
    # A copy, without the exchange between ranks that follows.
    taken = {call: list(seconds) for call, seconds in log.seconds.items()}
    everyone = grid.world.all_gather_json(taken) if show_straggler else []
    waits = stragglers(taken, everyone) if show_straggler else None
    text = table(taken, waits)
    if show_straggler:
        text += f"\n{late_rank(everyone)}"
    if grid.rank == 0:
        show(text)
    return text


def stragglers(mine: Durations, everyone: Sequence[Durations]) -> dict[LoggedCall, float]:
    """Return the seconds that this rank waited for the slowest rank, for each kind of logged collective.

    The rank with the shortest duration of a call is taken to be the slowest one, which arrived last and did not wait.
    The time of this rank beyond that duration is waiting time. Messages are left out, and so are collectives that were
    not called equally often on all ranks of their axis.

    Args:
        mine: kind of call -> seconds of each call on this rank.
        everyone: ``mine`` of each rank.
    """
    waits = {}
    for call, seconds in mine.items():
        others = [everyone[rank].get(call, []) for rank in call.ranks]
        if call.op not in _MESSAGES and all(len(other) == len(seconds) for other in others):
            waits[call] = sum(seconds) - sum(map(min, zip(*others)))
    return waits


def late_rank(everyone: Sequence[Durations]) -> str:
    """Return a line that names the rank for which the others waited most, in all logged collectives together.

    Args:
        everyone: kind of call -> seconds of each call, of each rank.
    """
    caused = [0.0] * len(everyone)
    for call in {LoggedCall(*call) for seconds in everyone for call in seconds}:  # plain tuples, from other ranks
        if call.op in _MESSAGES:
            continue
        calls = [everyone[rank].get(call, []) for rank in call.ranks]
        if all(len(calls_of_rank) == len(calls[0]) for calls_of_rank in calls):
            for durations in zip(*calls):
                last = min(range(len(durations)), key=durations.__getitem__)
                caused[call.ranks[last]] += sum(durations) - len(durations) * durations[last]
    slowest = max(range(len(caused)), key=caused.__getitem__)
    if not caused[slowest]:
        return "No rank waited for another one in a collective"
    return (
        f"Rank {slowest} was late most: the others waited {caused[slowest] * 1e3:.2f} ms for it, of "
        f"{sum(caused) * 1e3:.2f} ms that ranks waited in collectives"
    )


def table(taken: Durations, waits: dict[LoggedCall, float] | None = None) -> str:
    """Return a text with a line for each operation on an axis, and below it one for each message size.

    Args:
        taken: kind of call -> seconds of each call.
        waits: result of ``stragglers``, for a further column. None: no such column.
    """
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


def _print_call(call: LoggedCall, seconds: float) -> None:
    caller = f" [Caller Func: {call.caller}]" if call.caller else ""
    algorithmic, bus = bandwidths(call.op, call.size, len(call.ranks), seconds)
    show(
        f"comm op: {call.op}{caller} over {call.axis} | time (ms): {seconds * 1e3:.3f} | msg size: "
        f"{units.size(call.size)} | algbw (Gbps): {algorithmic:.2f} | busbw (Gbps): {bus:.2f}"
    )
