"""Layers whose elements are sharded, for LAMB and Muon: norms over the shards, and whole matrices on one rank each.

A layer is a parameter, or one expert of a parameter that holds several. A rank owns a flat range of each bucket, so it
holds parts of layers. A norm of a layer is summed over the replicas that
own parts of it, in the order of ranks, and over the tensor axis. A matrix is sent to one replica, which assembles it
(over the tensor axis too), computes the function of it, and sends each replica its part of the result: 2 bytes per
element in each direction in bfloat16, and each replica computes its share of the matrices. In stage 0, where
every replica holds all updates, each computes all matrices and nothing is sent over the data axis.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..grid import Axis, Grid
from ..grid.layout import Layout
from .bucket import Bucket
from .gradient_norm import square
from .managed import ManagedParameter

Function = Callable[[Tensor], Tensor]


class _Matrix(NamedTuple):
    """Parameter in a list of updates: its bucket, its elements there, the replica that computes its function."""

    update: int  # index in the list
    bucket: Bucket
    member: ManagedParameter
    start: int
    stop: int
    owner: int

    def part(self, rank: int) -> slice:
        """Return the elements that a replica owns of the layer, counted from the start of its range."""
        first, last = self.bucket.flat.owned(rank)
        low = max(self.start, first)
        return slice(low - first, max(low, min(self.stop, last)) - first)

    def size(self, rank: int) -> int:
        """Return the number of elements that a replica owns."""
        part = self.part(rank)
        return int(part.stop - part.start)


class ShardedLayers:
    """The layers in the flat ranges that a rank's optimizer steps. All calls are collective over data and tensor.

    The interface is ``optim.layerwise.Layers``.

    Args:
        buckets: the trained buckets of this rank, whose masters the optimizer steps.
        grid: the grid of this rank.
    """

    def __init__(self, buckets: Sequence[Bucket], grid: Grid) -> None:
        self._grid = grid
        self._bucket_of: dict[Tensor, Bucket] = {b.master: b for b in buckets if b.master is not None}
        self._layers = {bucket: BucketLayers.of(bucket) for bucket in self._bucket_of.values()}

    def under_names(self, bucket_of: Mapping[Tensor, Bucket]) -> ShardedLayers:
        """Return these layers for other tensors than the masters: those that are stepped in place of them."""
        made = copy.copy(self)
        made._bucket_of = dict(bucket_of)
        return made

    def parts(self, stepped: Tensor) -> list[tuple[slice, tuple[int, ...]]]:
        """Return the index of each layer's part in a stepped range, and the shape of the whole layer."""
        layers = self._layers[self._bucket_of[stepped]]
        return [(span, layers.shapes[number]) for number, span in layers.parts]

    def norms(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Return for each stepped range and its update the 2-norms of the layers and of their updates, (parts, 2)."""
        buckets = [self._bucket_of[stepped] for stepped, _ in pairs]
        layers_of = [self._layers[bucket] for bucket in buckets]
        tables = [torch.zeros(len(e.shapes), 2, dtype=torch.float64, device=self._grid.device) for e in layers_of]
        for (stepped, update), layers, table in zip(pairs, layers_of, tables, strict=True):
            if layers.parts:
                values = stepped.detach()
                squares = [square(flat[span]) for _, span in layers.parts for flat in (values, update)]
                table.index_add_(0, layers.numbers, torch.stack(squares).view(-1, 2).to(table.device))
        for axis in dict.fromkeys(b.shard_axis for b in buckets if b.sharded):
            _sum([t for t, b in zip(tables, buckets, strict=True) if b.sharded and b.shard_axis is axis], axis)
        if tables and self._grid.tensor.size > 1:  # a replicated layer has the norm of the first rank, equal on all
            sharded = [chosen for layers in layers_of for chosen in layers.sharded]
            _sum(tables, self._grid.tensor, torch.tensor(sharded, device=self._grid.device))
        found = [table.sqrt()[layers.numbers] for table, layers in zip(tables, layers_of, strict=True)]
        return [norms.to(stepped.device) for norms, (stepped, _) in zip(found, pairs, strict=True)]

    def whole(self, updates: Sequence[tuple[Tensor, Tensor, Function]], dtype: torch.dtype) -> list[Tensor]:
        """Return the updates, in ``dtype``, after a function of each layer's whole update."""
        given = [update.to(self._grid.device, dtype) for _, update, _ in updates]  # they may be offloaded
        results = [torch.zeros_like(update) for update in given]
        functions = [function for *_, function in updates]
        sharded: dict[Axis, list[_Matrix]] = {}
        for index, (stepped, *_) in enumerate(updates):
            bucket = self._bucket_of[stepped]
            for slot, member in zip(bucket.flat.slots, bucket.members, strict=True):
                matrix = _Matrix(index, bucket, member, slot.start, slot.stop, 0)
                if bucket.sharded:
                    sharded.setdefault(bucket.shard_axis, []).append(matrix)
                else:
                    span = slice(slot.start, slot.stop)
                    results[index][span] = self._apply(matrix, given[index][span], functions[index])
        for axis, matrices in sharded.items():
            self._exchange(axis, _assigned(matrices, axis.size), given, results, functions)
        return [result.to(stepped.device) for result, (stepped, *_) in zip(results, updates, strict=True)]

    def _exchange(
        self,
        axis: Axis,
        matrices: Sequence[_Matrix],
        given: Sequence[Tensor],
        results: Sequence[Tensor],
        functions: Sequence[Function],
    ) -> None:
        """Send each matrix to its owner, and fill ``results`` with the parts that come back. Collective."""
        ranks = range(axis.size)
        by_owner = [[m for m in matrices if m.owner == rank] for rank in ranks]
        owned_here = by_owner[axis.rank]
        leaving = [given[m.update][m.part(axis.rank)] for owned in by_owner for m in owned]
        send = [sum(m.size(axis.rank) for m in owned) for owned in by_owner]
        receive = [sum(m.size(rank) for m in owned_here) for rank in ranks]
        outgoing = torch.cat(leaving)
        incoming = outgoing.new_empty(sum(receive))
        axis.all_to_all(incoming, outgoing, receive=receive, send=send)

        arrived = iter(incoming.split([m.size(rank) for rank in ranks for m in owned_here]))
        pieces: list[list[Tensor]] = [[] for _ in owned_here]
        for _ in ranks:
            for row in pieces:
                row.append(next(arrived))
        done = [self._apply(m, torch.cat(row), functions[m.update]) for m, row in zip(owned_here, pieces, strict=True)]
        back = [result.split([m.size(rank) for rank in ranks]) for m, result in zip(owned_here, done, strict=True)]
        incoming = torch.cat([row[rank] for rank in ranks for row in back]) if back else incoming
        axis.all_to_all(outgoing, incoming, receive=send, send=receive)
        returned = iter(outgoing.split([m.size(axis.rank) for owned in by_owner for m in owned]))
        for owned in by_owner:
            for m in owned:
                results[m.update][m.part(axis.rank)] = next(returned)

    def _apply(self, matrix: _Matrix, flat: Tensor, function: Function) -> Tensor:
        """Return this rank's shard of a function of a layer, flat, from its shard of the layer. Collective over tensor.

        Experts are layers of their own: a rank does not gather the experts of other ranks.
        """
        layout, shape = matrix.member.layout, matrix.member.parameter.shape
        if layout.expert_dim is not None:
            layout = Layout(
                (*layout.shape[: layout.expert_dim], shape[layout.expert_dim], *layout.shape[layout.expert_dim + 1 :]),
                shard_dim=layout.shard_dim,
                parts=layout.parts,
                unit=layout.unit,
            )
        tensor = self._grid.tensor
        whole = matrix.member.layout.map_layers(function, layout.gather(tensor, flat.view(shape)))
        return layout.shard(whole, tensor.rank, tensor.size).reshape(-1)


class BucketLayers(NamedTuple):
    """Layers of a bucket, of which this rank owns parts."""

    shapes: list[tuple[int, ...]]  # of the whole layers
    sharded: list[bool]  # True for a layer that the tensor axis shards
    parts: list[tuple[int, slice]]  # number of the layer, and elements within the owned range
    numbers: Tensor  # of the layers in ``parts``, (parts,)

    @classmethod
    def of(cls, bucket: Bucket) -> BucketLayers:
        """Return the layers of a bucket: of each parameter one, or one for each of this rank's experts."""
        start, stop = bucket.owned
        shapes: list[tuple[int, ...]] = []
        sharded: list[bool] = []
        parts: list[tuple[int, slice]] = []
        for slot, member in zip(bucket.flat.slots, bucket.members, strict=True):
            first, layout, dim, local = len(shapes), member.layout, member.layout.expert_dim, member.parameter.shape
            experts = 1 if dim is None else local[dim]
            run = math.prod(local) if dim is None else math.prod(local[dim + 1 :])  # consecutive elements of a layer
            shapes += [layout.shape if dim is None else layout.shape[:dim] + layout.shape[dim + 1 :]] * experts
            sharded += [layout.sharded] * experts
            for turn in range((slot.stop - slot.start) // run if run else 0):
                low, high = max(slot.start + turn * run, start), min(slot.start + (turn + 1) * run, stop)
                if low < high:
                    parts.append((first + turn % experts, slice(low - start, high - start)))
        numbers = torch.tensor([number for number, _ in parts], dtype=torch.int64, device=bucket.weights.device)
        return cls(shapes, sharded, parts, numbers)


def _sum(tables: Sequence[Tensor], axis: Axis, chosen: Tensor | None = None) -> None:
    """Sum tables (n, 2) over an axis, in place, in the order of ranks: every rank gets the same bits. Collective.

    Args:
        tables: the tables.
        axis: the axis.
        chosen: (n of all tables,): rows to sum; the other rows take the values of the first rank. None: all.
    """
    own = torch.cat(list(tables))
    every = own.new_empty(axis.size, *own.shape)
    axis.all_gather(every, own)
    total = every[0].clone()
    for row in every[1:]:
        total += row if chosen is None else row * chosen.unsqueeze(1)
    for table, summed in zip(tables, total.split([len(table) for table in tables]), strict=True):
        table.copy_(summed)


def _assigned(matrices: Sequence[_Matrix], size: int) -> list[_Matrix]:
    """Assign matrices to owners, the largest first, each to the replica with the fewest elements so far."""
    loads, owners = [0] * size, {}
    for number in sorted(range(len(matrices)), key=lambda number: -math.prod(matrices[number].member.layout.shape)):
        owner = loads.index(min(loads))
        owners[number] = owner
        loads[owner] += math.prod(matrices[number].member.layout.shape)
    return [matrix._replace(owner=owners[number]) for number, matrix in enumerate(matrices)]
