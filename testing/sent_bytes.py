"""Bytes that this rank sends within a context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..grid import Grid


@contextmanager
def count_bytes(grid: Grid) -> Iterator[dict[str, float]]:
    """Context that counts the bytes that this rank sends: a dict of axis -> bytes, which grows within it.

    Collectives count what a ring algorithm sends from each rank, as ``engine.traffic_report`` does. Messages by which
    ranks agree on a step, such as forms of losses, do not count.
    """
    sizes: dict[str, float] = {}
    traffic = grid.traffic
    add = traffic.add

    def counting(axis: str, collective: str, size: float) -> None:
        if not traffic.suspended:
            sizes[axis] = sizes.get(axis, 0.0) + size
        add(axis, collective, size)

    traffic.add = counting  # type: ignore[method-assign]
    try:
        yield sizes
    finally:
        traffic.add = add  # type: ignore[method-assign]  # an outer context counts on
