"""Groups of consecutive replicas that share one copy of the shards, and the axes within and between groups (HSDP).

8 replicas, shard_size=4      within     0 1 2 3 | 4 5 6 7        weights are gathered, gradients reduce-scattered
                              between    0 4 | 1 5 | 2 6 | 3 7    sums of gradients are all-reduced

Zhao et al. 2023 (PyTorch FSDP), section 3.2.2: hybrid sharding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..grid import Axis, Grid
from .flat import shards_of


class ShardGroup(NamedTuple):
    """Axes of the ranks that hold the same parameters as this rank.

    Attributes:
        within: the ranks that shard the parameters among themselves.
        between: the ranks that hold the same shards as this rank, one of each group; None if there is one group.
    """

    within: Axis
    between: Axis | None


def shard_group(grid: Grid, replicas: str, size: int | None) -> ShardGroup:
    """Return the axes of this rank's shard group. Collective when it makes process groups.

    Args:
        grid: the grid of the replicas.
        replicas: name of the axis over which the parameters are replicated, as ``Layout.replicas``.
        size: consecutive ranks of data x context that make a group; None: all of them are one.
    """
    axis = grid.axis(replicas)
    size = shards(grid, replicas, size)
    if size == axis.size:
        return ShardGroup(axis, None)
    return ShardGroup(inner(grid, size, "", replicas), outer(grid, size, "", replicas))


def shards(grid: Grid, replicas: str, size: int | None) -> int:
    """Return the number of ranks over which parameters are sharded. The arguments are those of ``shard_group``."""
    return shards_of(grid.axis(replicas).size, size, grid.expert.size if replicas == "expert_data" else 1)


def inner(grid: Grid, size: int, purpose: str, replicas: str = "data_context") -> Axis:
    """Make the axis ``data within`` over this rank's group of ``size`` consecutive replicas. Collective.

    ``purpose`` is an argument of ``Grid.subgroup``: each purpose has its own communicator.
    """
    ranks = grid.axis(replicas).size
    return _one_of(grid, [range(first, first + size) for first in range(0, ranks, size)], purpose, "within", replicas)


def outer(grid: Grid, size: int, purpose: str, replicas: str = "data_context") -> Axis:
    """Make the axis ``data between`` over one replica of each group, at this rank's position in its group. Collective.

    ``size`` and ``purpose`` are as for ``inner``.
    """
    ranks = grid.axis(replicas).size
    return _one_of(grid, [range(at, ranks, size) for at in range(size)], purpose, "between", replicas)


def _one_of(grid: Grid, members: Sequence[range], purpose: str, name: str, replicas: str) -> Axis:
    made = [grid.subgroup(replicas, ranks, f"{purpose} {name}") for ranks in members]
    axis_here = next(axis for axis in made if axis is not None)
    # Bytes within a group and between groups are counted apart.
    axis_here.name = f"{'data' if grid.axis(replicas) is grid.data_context else replicas} {name}"
    return axis_here
