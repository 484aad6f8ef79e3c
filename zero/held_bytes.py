"""Bytes that a rank holds between two steps: on its device, by kind, and offloaded, by place and kind."""

from __future__ import annotations

from typing import Any

import torch

from ..base.torch_private import storage_id
from .data_axis import ZeroDataAxis


def held_bytes(data_axis: ZeroDataAxis, module: torch.nn.Module) -> dict[str, int]:
    """Return the bytes that this rank holds between two steps, by kind.

    A storage with several views counts once. Weights count as shards in stage 3 and as full weights in other stages. An
    fp32 master copy that shares its storage with the weight shard does not count again. Offloaded tensors do not count,
    because ``offloaded_bytes`` counts them.
    """

    def on_device(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage().nbytes() if data_axis.memory.place(tensor) == "none" else 0

    held = {"parameters": 0, "gradients": 0, "masters": 0, "optimizer": 0, "buffers": 0}
    managed: set[Any] = set()
    for bucket in data_axis.buckets:
        managed.update(member.parameter for member in bucket.members)
        weights = bucket.weights.untyped_storage().nbytes()
        apart = storage_id(bucket.shard.untyped_storage()) != storage_id(bucket.weights.untyped_storage())
        held["parameters"] += weights + (on_device(bucket.shard) if apart else 0)
        gradient = bucket.gradients if bucket.gradients is not None else bucket.owned_gradient
        held["gradients"] += on_device(gradient)
        if bucket.master is not None and bucket.master_is_copy:
            held["masters"] += on_device(bucket.master)
    held["parameters"] += sum(p.nbytes for p in module.parameters() if p not in managed)
    held["buffers"] = sum(buffer.nbytes for buffer in module.buffers())
    if data_axis.gatherer is not None and data_axis.gatherer.kept_bytes:
        held["secondary"] = data_axis.gatherer.kept_bytes
    if data_axis.exchange is not None:
        held["compression"] = sum(t.nbytes for flats in data_axis.exchange.state().values() for t in flats)
    if data_axis.optimizer is not None:
        states = [t for state in data_axis.optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
        states += [t for b in data_axis.buckets for t in data_axis.stepper.sub_group_state(b) if b.state is not None]
        held["optimizer"] = sum(t.nbytes for t in states if t.dim() and data_axis.memory.place(t) == "none")
    return held


def offloaded_bytes(data_axis: ZeroDataAxis) -> dict[str, dict[str, int]]:
    """Return the offloaded bytes of this rank: place (``cpu``, ``nvme``) -> their kind -> bytes."""
    offloaded: dict[str, dict[str, int]] = {}
    for bucket in data_axis.buckets:
        held = [("parameters", bucket.shard), ("gradients", bucket.owned_gradient)]
        if bucket.master is not None and bucket.master_is_copy:
            held.append(("masters", bucket.master))
        held += [("optimizer", state) for state in data_axis.stepper.sub_group_state(bucket)]
        for kind, tensor in held:
            if (place := data_axis.memory.place(tensor)) != "none":
                sizes = offloaded.setdefault(place, {})
                sizes[kind] = sizes.get(kind, 0) + tensor.nbytes
    return offloaded
