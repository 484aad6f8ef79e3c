"""Saving and loading of gradient compression's residuals (error feedback), one set for each replica.

``exchange/residual/00002/layers.0.weight`` is the part of the gradient that replica 2 had not sent. The sum of all
residuals must be kept, because the optimizer has not applied it yet. If the run continues with n replicas and n has
changed, new replica i mod n adds the residuals of each old replica i; replicas that get none start from zero. If n is
the same, each replica gets its own residuals, bit-identical.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.snapshot import EXCHANGE, Snapshot
from ...grid import Axis, Grid
from ...grid.layout import FlatRange
from ...zero.data_axis import ZeroDataAxis
from ...zero.protocols import Compressing, ReplicatedTensor
from ...zero.state_shards import StateShards


def ranges(grid: Grid, shards: StateShards) -> Iterator[tuple[str, FlatRange]]:
    """Yield this replica's compression residuals that this rank writes: (checkpoint name, flat range of values)."""
    for key, residual in shards.residuals():
        yield f"{EXCHANGE}/{key}/{grid.data_context.rank:05}/{residual.name}", residual


def whole_tensors(grid: Grid, shards: StateShards) -> Iterator[tuple[str, Tensor]]:
    """Yield the compressor's tensors that are equal on all replicas and that this rank writes.

    Yields:
        Name in the checkpoint, and tensor.
    """
    for kept in _replicated(shards.data_axis):
        if shards.writes(kept.member.layout.name):
            yield _name(grid.tensor, kept), kept.value


def numbers(grid: Grid, data_axis: ZeroDataAxis) -> dict[str, Any]:
    """Return the compressor's class and step counter for JSON. They are equal on every rank."""
    exchange = data_axis.exchange
    if exchange is None:
        return {}
    steps = exchange.steps if isinstance(exchange, Compressing) else None
    return {EXCHANGE: {"type": type(exchange).__name__, "replicas": grid.data_context.size, "steps": steps}}


@torch.no_grad()
def restore(grid: Grid, data_axis: ZeroDataAxis, shards: StateShards, snapshot: Snapshot) -> list[str]:
    """Load a compressor's residuals, and its tensors that are equal on all replicas, from a snapshot. Collective.

    Returns:
        Notes about the tensors that could not be loaded.
    """
    tensors, saved = snapshot.tensors, snapshot.header["run"].get(EXCHANGE)
    exchange, axis = data_axis.exchange, grid.data_context
    saved_keys = {name.split("/")[1].partition(".")[0] for name in tensors if name.startswith(f"{EXCHANGE}/")}
    if exchange is None and not saved_keys:
        return []
    used: set[str] = set()
    new: set[str] = set()
    saved_replicas = 0 if saved is None else int(saved["replicas"])
    for key, residual in shards.residual_targets():
        residual.value.zero_()
        names = [
            f"{EXCHANGE}/{key}/{replica:05}/{residual.name}" for replica in range(axis.rank, saved_replicas, axis.size)
        ]
        fitting = [name for name in names if name in tensors and tensors[name].shape == residual.layout.shape]
        for number, name in enumerate(fitting):
            into = residual.value if not number else torch.empty_like(residual.value)
            tensors[name].read_range(residual._replace(value=into), grid)
            if number:
                residual.value.add_(into)
        (used if f"{EXCHANGE}/{key}/00000/{residual.name}" in tensors else new).add(key)
    for kept in _replicated(data_axis):
        name = _name(grid.tensor, kept)
        fits = name in tensors and tensors[name].shape == tuple(kept.value.shape)
        if fits:
            kept.value.copy_(tensors[name].read_all())
        (used if fits else new).add(kept.key)
    if isinstance(exchange, Compressing) and saved is not None and saved["steps"] is not None:
        exchange.steps = int(saved["steps"])
    gathered = grid.world.all_gather_json((used, new))
    unused = saved_keys.difference(*(keys_of_rank for keys_of_rank, _ in gathered))
    missing = set().union(*(keys_of_rank for _, keys_of_rank in gathered))
    notes = []
    if unused:
        what = "compression" if saved is None else saved["type"]
        notes.append(f"the state of {what} ({', '.join(sorted(unused))}) is not loaded: this run does not use it")
    if missing:
        notes.append(
            f"{', '.join(sorted(missing))} of {type(exchange).__name__} is not in the checkpoint, or only in part: the "
            "missing part starts from zero"
        )
    return notes


def _replicated(data_axis: ZeroDataAxis) -> Iterator[ReplicatedTensor]:
    """Yield the compressor's tensors that are equal on all replicas."""
    if isinstance(data_axis.exchange, Compressing):
        yield from data_axis.exchange.replicated()


def _name(axis: Axis, kept: ReplicatedTensor) -> str:
    """Return the checkpoint name of a compressor's tensor that does not have the shape of a parameter.

    If the tensor belongs to a tensor-parallel shard, the name contains the index of the shard and the size of the
    tensor axis. With another size the name is therefore not found, and the tensor starts from zero.
    """
    layout = kept.member.layout
    of = f".{axis.rank}of{axis.size}" if layout.sharded and axis.size > 1 else ""
    return f"{EXCHANGE}/{kept.key}{of}/{layout.name}"
