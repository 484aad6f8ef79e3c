"""Layers whose elements are sharded, for LAMB and Muon: norms over the shards, and whole matrices on one rank each.

A rank owns a flat range of each bucket, so it holds parts of layers. A norm of a layer is summed over the replicas that
own parts of it, in the order of ranks, and over the tensor axis. A matrix is sent to one replica, which assembles it
(over the tensor axis too), computes the function of it, and sends each replica its part of the result: 2 bytes per
element in each direction in bfloat16, and each replica computes its share of the matrices. In stage 0, where
every replica holds all updates, each computes all matrices and nothing is sent over the data axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..grid import Axis, Grid
from ..grid.layout import Layout
from .bucket import Bucket
from .managed import ManagedParameter
from .norm import square

Function = Callable[[Tensor], Tensor]


class _Matrix(NamedTuple):
    """Layer in a list of updates: its bucket, its elements there, and the replica that computes its function."""

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

    def parts(self, stepped: Tensor) -> list[tuple[slice, tuple[int, ...]]]:
        """Return the index of each layer's part in a stepped range, and the shape of the whole layer."""
        bucket = self._bucket_of[stepped]
        return [(span, bucket.members[number].layout.shape) for number, span in _parts(bucket)]

    def norms(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Return for each stepped range and its update the 2-norms of the layers and of their updates, (parts, 2)."""
        buckets = [self._bucket_of[stepped] for stepped, _ in pairs]
        tables = [torch.zeros(len(b.members), 2, dtype=torch.float64, device=self._grid.device) for b in buckets]
        for (stepped, update), bucket, table in zip(pairs, buckets, tables, strict=True):
            for number, span in _parts(bucket):
                table[number, 0], table[number, 1] = square(stepped.detach()[span]), square(update[span])
        for axis in dict.fromkeys(b.axis for b in buckets if b.sharded):
            _sum([t for t, b in zip(tables, buckets, strict=True) if b.sharded and b.axis is axis], axis)
        layouts = [member.layout for bucket in buckets for member in bucket.members]
        tensor, expert = self._grid.tensor, self._grid.expert
        if tables and tensor.size > 1:  # a replicated layer has the norm of the first rank, equal on all
            _sum(tables, tensor, torch.tensor([layout.sharded for layout in layouts], device=self._grid.device))
        if expert.size > 1 and any(layout.expert_dim is not None for layout in layouts):
            spread = [layout.expert_dim is not None for layout in layouts]
            _sum(tables, expert, torch.tensor(spread, device=self._grid.device))
        return [t.sqrt()[[number for number, _ in _parts(b)]] for t, b in zip(tables, buckets, strict=True)]

    def whole(self, updates: Sequence[tuple[Tensor, Tensor, Function]], dtype: torch.dtype) -> list[Tensor]:
        """Return the updates, in ``dtype``, after a function of each layer's whole update."""
        given = [update.to(dtype) for _, update, _ in updates]
        results = [torch.zeros_like(update) for update in given]
        functions = [function for *_, function in updates]
        sharded: dict[Axis, list[_Matrix]] = {}
        for index, (stepped, *_) in enumerate(updates):
            bucket = self._bucket_of[stepped]
            for slot, member in zip(bucket.flat.slots, bucket.members, strict=True):
                matrix = _Matrix(index, bucket, member, slot.start, slot.stop, 0)
                if bucket.sharded:
                    sharded.setdefault(bucket.axis, []).append(matrix)
                else:
                    span = slice(slot.start, slot.stop)
                    results[index][span] = self._apply(matrix, given[index][span], functions[index])
        for axis, matrices in sharded.items():
            self._exchange(axis, _assigned(matrices, axis.size), given, results, functions)
        return results

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
        mine = by_owner[axis.rank]
        leaving = [given[m.update][m.part(axis.rank)] for owned in by_owner for m in owned]
        send = [sum(m.size(axis.rank) for m in owned) for owned in by_owner]
        receive = [sum(m.size(rank) for m in mine) for rank in ranks]
        outgoing = torch.cat(leaving)
        incoming = outgoing.new_empty(sum(receive))
        axis.all_to_all(incoming, outgoing, receive=receive, send=send)

        arrived = iter(incoming.split([m.size(rank) for rank in ranks for m in mine]))
        pieces: list[list[Tensor]] = [[] for _ in mine]
        for _ in ranks:
            for row in pieces:
                row.append(next(arrived))
        done = [self._apply(m, torch.cat(row), functions[m.update]) for m, row in zip(mine, pieces, strict=True)]
        back = [whole.split([m.size(rank) for rank in ranks]) for m, whole in zip(mine, done, strict=True)]
        incoming = torch.cat([row[rank] for rank in ranks for row in back]) if back else incoming
        axis.all_to_all(outgoing, incoming, receive=send, send=receive)
        returned = iter(outgoing.split([m.size(axis.rank) for owned in by_owner for m in owned]))
        for owned in by_owner:
            for m in owned:
                results[m.update][m.part(axis.rank)] = next(returned)

    def _apply(self, matrix: _Matrix, flat: Tensor, function: Function) -> Tensor:
        """Return this rank's shard of a function of a layer, flat, from its shard of the layer. Collective over tensor.

        Experts are layers of their own: those of other ranks are not gathered.
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
        whole = function(layout.gather(tensor, flat.view(shape)))
        return layout.shard(whole, tensor.rank, tensor.size).reshape(-1)


def _parts(bucket: Bucket) -> list[tuple[int, slice]]:
    """Return the number and the elements of each layer of which this rank owns a part, within the owned range."""
    start, stop = bucket.owned
    cut = [(max(slot.start, start) - start, min(slot.stop, stop) - start) for slot in bucket.flat.slots]
    return [(number, slice(low, high)) for number, (low, high) in enumerate(cut) if low < high]


def _sum(tables: Sequence[Tensor], axis: Axis, chosen: Tensor | None = None) -> None:
    """Sum tables (n, 2) over an axis, in place, in the order of ranks: every rank gets the same bits. Collective.

    Args:
        tables: the tables.
        axis: the axis.
        chosen: (n of all tables,): rows to sum; the other rows take the values of the first rank. None: all.
    """
    mine = torch.cat(list(tables))
    every = mine.new_empty(axis.size, *mine.shape)
    axis.all_gather(every, mine)
    total = every[0].clone()
    for row in every[1:]:
        total += row if chosen is None else row * chosen.unsqueeze(1)
    for table, part in zip(tables, total.split([len(table) for table in tables]), strict=True):
        table.copy_(part)


def _assigned(matrices: Sequence[_Matrix], size: int) -> list[_Matrix]:
    """Assign matrices to owners, the largest first, each to the replica with the fewest elements so far."""
    loads, owners = [0] * size, {}
    for number in sorted(range(len(matrices)), key=lambda number: -math.prod(matrices[number].member.layout.shape)):
        owner = loads.index(min(loads))
        owners[number] = owner
        loads[owner] += math.prod(matrices[number].member.layout.shape)
    return [matrix._replace(owner=owners[number]) for number, matrix in enumerate(matrices)]
