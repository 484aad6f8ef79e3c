"""Assembling of unsharded tensors from the shards on all ranks of a grid."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from .grid import Grid
from .layout import Layout
from .topology import Topology

MESSAGE = 2**26  # bytes of a message: a message costs 0.1 ms and more, a small shard's bytes nothing
Shard = tuple[Layout, Tensor]  # a parameter's layout, and the elements of it that a rank holds


def assemble(grid: Grid, shards: Mapping[str, Shard]) -> dict[str, Tensor]:
    """Gather the shards of all ranks and return name -> unsharded tensor, on every rank. Collective over the grid.

    Args:
        grid: the grid whose ranks hold the shards.
        shards: name -> shard on this rank. Only the shards of the first replica are used.
    """
    owned = {name: shard for name, shard in shards.items() if grid.axis(shard[0].replicas).is_first}
    told = grid.world.all_gather_json(
        [(name, tuple(vars(layout).values()), tensor.shape, tensor.dtype) for name, (layout, tensor) in owned.items()]
    )
    ranks: list[dict[str, Shard]] = []
    with grid.world.traffic.uncounted():
        for rank, listed in enumerate(told):
            layouts = {name: Layout(*layout) for name, layout, _, _ in listed}
            held = (owned[name][1] if rank == grid.world.rank else torch.empty(s, dtype=d) for name, _, s, d in listed)
            tensors = [tensor for message in _messages(held) for tensor in _broadcast(grid, message, rank)]
            ranks.append({name: (layouts[name], tensor) for name, tensor in zip(layouts, tensors, strict=True)})
    return assemble_ranks(grid.topology, ranks)


def _messages(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors in lists of up to ``MESSAGE`` bytes each, or of one larger tensor."""
    message: list[Tensor] = []
    free = MESSAGE
    for tensor in tensors:
        if message and tensor.nbytes > free:
            yield message
            message, free = [], MESSAGE
        message.append(tensor)
        free -= tensor.nbytes
    if message:
        yield message


def _broadcast(grid: Grid, tensors: list[Tensor], source: int) -> list[Tensor]:
    """Return copies, on the CPU, of the source's tensors, sent in one message."""
    # As bytes: gloo does not send every dtype. A 0-dim tensor becomes a vector first.
    flat = torch.cat([tensor.to(grid.device).contiguous().view(-1).view(torch.uint8) for tensor in tensors])
    grid.world.broadcast(flat, source=source).wait()
    pieces = flat.cpu().split([tensor.nbytes for tensor in tensors])
    # A view would keep the whole message, and might not be aligned.
    return [piece.clone().view(tensor.dtype).view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


def assemble_ranks(topology: Topology, ranks: Sequence[Mapping[str, Shard]]) -> dict[str, Tensor]:
    """Return name -> unsharded tensor, assembled from the shards of each rank."""
    assembled: dict[str, Tensor] = {}
    experts_of = {rank: group for group in topology.groups("expert") for rank in group}
    tensor_of = {rank: group for group in topology.groups("tensor") for rank in group}
    for rank, shards in enumerate(ranks):
        for name, (layout, _) in shards.items():
            if name not in assembled:
                experts = experts_of[rank] if layout.expert_dim is not None else [rank]
                held = [[ranks[r][name][1] for r in tensor_of[expert_rank]] for expert_rank in experts]
                assembled[name] = layout.assemble_experts(held)
    return assembled
