"""Assembling of unsharded tensors from the shards on all ranks of a grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from .grid import Grid
from .layout import Layout
from .topology import Topology

Shard = tuple[Layout, Tensor]  # a parameter's layout, and the elements of it that a rank holds


def assemble(grid: Grid, shards: Mapping[str, Shard]) -> dict[str, Tensor]:
    """Gather the shards of all ranks and return name -> unsharded tensor, on every rank. Collective over the grid.

    Args:
        grid: the grid whose ranks hold the shards.
        shards: name -> shard on this rank. Only the shards of the first replica are used.
    """
    # Without the clone, a view would be sent with the whole flat buffer behind it.
    mine = {name: (layout, tensor.clone().cpu()) for name, (layout, tensor) in shards.items()}
    return assemble_ranks(grid.topology, grid.world.all_gather_object(mine if grid.data.is_first else {}))


def assemble_ranks(topology: Topology, ranks: Sequence[Mapping[str, Shard]]) -> dict[str, Tensor]:
    """Return name -> unsharded tensor, assembled from the shards of each rank."""
    whole: dict[str, Tensor] = {}
    for rank, shards in enumerate(ranks):
        coordinate = topology.coordinate(rank)
        for name, (layout, _) in shards.items():
            if name not in whole:
                tensor_ranks = (
                    topology.rank(**{**coordinate._asdict(), "tensor": t}) for t in range(topology.size("tensor"))
                )
                whole[name] = layout.assemble([ranks[r][name][1] for r in tensor_ranks])
    return whole
