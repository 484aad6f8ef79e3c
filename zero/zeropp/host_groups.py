"""Groups of consecutive replicas that share a host, and the axes within and between them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from itertools import groupby

from ...grid import Axis
from ...grid.grid import Grid


def ranks_per_host(grid: Grid) -> int:
    """Return the number of consecutive replicas that share a host; 1 if it is not the same everywhere. Collective."""
    hosts = grid.world.all_gather_json(socket.gethostname())
    return equal_runs(hosts, grid.topology.groups("data_context"))


def equal_runs(hosts: Sequence[str], groups: Sequence[Sequence[int]]) -> int:
    """Return the common length of the runs of consecutive ranks on one host, or 1 if the lengths differ.

    Args:
        hosts: the host name of each rank.
        groups: the groups of ranks in which runs are counted.

    >>> equal_runs(["a", "a", "b", "b"], [[0, 1, 2, 3]]), equal_runs(["a", "a", "a", "b"], [[0, 1, 2, 3]])
    (2, 1)
    """
    lengths = {len([*run]) for group in groups for _, run in groupby(group, key=lambda rank: hosts[rank])}
    return lengths.pop() if len(lengths) == 1 else 1


def inner(grid: Grid, size: int, purpose: str) -> Axis:
    """Make the axis ``data within`` over this rank's group of ``size`` consecutive replicas. Collective.

    ``purpose`` is an argument of ``Grid.subgroup``: each purpose has its own communicator.
    """
    replicas = grid.data_context.size
    return _one_of(grid, [range(first, first + size) for first in range(0, replicas, size)], purpose, "within")


def outer(grid: Grid, size: int, purpose: str) -> Axis:
    """Make the axis ``data between`` over one replica of each group, at this rank's position in its group. Collective.

    ``size`` and ``purpose`` are as for ``inner``.
    """
    return _one_of(grid, [range(at, grid.data_context.size, size) for at in range(size)], purpose, "between")


def _one_of(grid: Grid, members: Sequence[range], purpose: str, name: str) -> Axis:
    made = [grid.subgroup("data_context", ranks, f"{purpose} {name}") for ranks in members]
    axis_here = next(axis for axis in made if axis is not None)
    axis_here.name = f"data {name}"  # bytes within a group and between groups are counted apart
    return axis_here
