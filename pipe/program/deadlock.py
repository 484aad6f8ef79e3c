"""Deadlock of a schedule or program: the error that names the ranks and ops that wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .ops import Op, Orders

Wait = tuple[Op, int]  # the op that must come first, and its rank


class ScheduleError(ValueError):
    """A schedule or program that cannot run. `where` holds the ranks and ops that the message names."""

    def __init__(self, message: str, where: Sequence[tuple[int, Op]] = ()) -> None:
        super().__init__(message)
        self.where = tuple(where)


def deadlock(orders: Orders, at: Sequence[int], waits: Callable[[Op], Wait | None]) -> ScheduleError:
    """Return the error: the circle of ranks that wait for each other, or the chain to a rank that has ended.

    Args:
        orders: the ops of each rank.
        at: for each rank, the number of ops that it has done. One rank or more cannot do the next op.
        waits: function that returns the op for which an op waits, and the rank of that op; None if it waits for none.
    """
    rank = next(r for r, order in enumerate(orders) if at[r] < len(order))
    path: list[int] = []
    while rank not in path:
        path.append(rank)
        wait = waits(orders[rank][at[rank]]) if at[rank] < len(orders[rank]) else None
        if wait is None:
            break
        rank = wait[1]
    else:
        path = path[path.index(rank) :]
    lines, where = [], []
    for r in path:
        if at[r] == len(orders[r]):
            lines.append(f"rank {r} has ended")
            continue
        op = orders[r][at[r]]
        where.append((r, op))
        wait = waits(op)
        lines.append(f"rank {r} stands at {op}" + (f" and waits for {wait[0]} of rank {wait[1]}" if wait else ""))
    return ScheduleError("deadlock: " + "; ".join(lines), where)
