"""Groups of consecutive replicas that share a host."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from itertools import groupby

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
