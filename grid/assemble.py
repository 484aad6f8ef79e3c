"""Assembling of unsharded tensors from the shards on all ranks of a grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple

import torch
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
    mine = {name: shard for name, shard in shards.items() if grid.axis(shard[0].replicas).is_first}
    told = grid.world.all_gather_json(
        [(name, astuple(layout), tensor.shape, tensor.dtype) for name, (layout, tensor) in mine.items()]
    )
    ranks: list[dict[str, Shard]] = [{} for _ in told]
    with grid.world.traffic.uncounted():
        for rank, listed in enumerate(told):
            for name, layout, shape, dtype in listed:
                here = mine[name][1] if rank == grid.world.rank else torch.empty(shape, dtype=dtype)
                sent = here.to(grid.device).contiguous()
                # As bytes: gloo does not send every dtype. A 0-dim tensor becomes a vector first.
                grid.world.broadcast(sent.view(-1).view(torch.uint8), source=rank).wait()
                # A copy of this rank's own: a view would keep the whole flat buffer behind it.
                ranks[rank][name] = Layout(*layout), sent.cpu().clone() if rank == grid.world.rank else sent.cpu()
    return assemble_ranks(grid.topology, ranks)


def assemble_ranks(topology: Topology, ranks: Sequence[Mapping[str, Shard]]) -> dict[str, Tensor]:
    """Return name -> unsharded tensor, assembled from the shards of each rank."""
    whole: dict[str, Tensor] = {}
    experts_of = {rank: group for group in topology.groups("expert") for rank in group}
    for rank, shards in enumerate(ranks):
        for name, (layout, _) in shards.items():
            if name not in whole:
                experts = experts_of[rank] if layout.expert_dim is not None else [rank]
                places = [topology.coordinate(each)._asdict() for each in experts]
                tensor_ranks = [
                    [topology.rank(**{**place, "tensor": t}) for t in range(topology.size("tensor"))]
                    for place in places
                ]
                whole[name] = layout.assemble_experts([[ranks[r][name][1] for r in row] for row in tensor_ranks])
    return whole
