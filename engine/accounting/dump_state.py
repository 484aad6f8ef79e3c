"""``dump_state``: prints at start-up what each rank holds and how it will be optimized."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sized
from typing import Any

import torch

from ...pipe.module import PipelineModule
from ...zero.held_bytes import held_bytes, offloaded_bytes
from ..kinds import AnyEngine


def dump(engine: AnyEngine) -> None:
    """Rank 0 prints ``describe(engine)`` as JSON. Collective over the grid."""
    state = describe(engine)
    if engine.grid.rank == 0:
        print(json.dumps({"engine": state}, indent=2), flush=True)


def describe(engine: AnyEngine) -> dict[str, Any]:
    """Return a description of an engine, ready for JSON. Collective over the grid.

    It has the engine's class, module, grid and batch; the optimizer with the options of its parameter groups; the
    learning-rate schedule; the loss scale; the number of training samples; and for each rank its coordinate, stages,
    parameters (held and trained), dtypes, buckets and bytes.
    """
    grid = engine.grid
    optimizer, scheduler, loader = engine.optimizer, engine.lr_scheduler, engine.training_dataloader
    dataset = None if loader is None else loader.dataset
    return {
        "class": "PipelineEngine" if isinstance(engine.module, PipelineModule) else "ModuleEngine",
        "module": type(engine.module).__name__,
        "grid": {**grid.topology.sizes, "device": str(grid.device), "timeout": grid.timeout},
        "batch": engine.batch._asdict(),
        "optimizer": None if optimizer is None else _optimizer(optimizer, engine.data_axis.optimizer),
        "scheduler": scheduler and {"class": type(scheduler).__name__, **_plain_entries(vars(scheduler), "optimizer")},
        "loss_scale": engine.loss_scale(),
        "training_samples": len(dataset) if isinstance(dataset, Sized) else None,
        "ranks": grid.world.all_gather_json(_rank(engine)),
    }


def _rank(engine: AnyEngine) -> dict[str, Any]:
    module, grid = engine.module, engine.grid
    stages = {}
    if isinstance(module, PipelineModule):
        ends = module.boundaries
        stages = {f"stage {s}": f"layers {ends[s]} to {ends[s + 1] - 1}" for s in module.stages}
    parameters = list(module.parameters())
    buckets = engine.data_axis.buckets
    return {
        "rank": grid.rank,
        "coordinate": grid.coordinate._asdict(),
        **({"stages": stages} if stages else {}),
        "parameters": sum(p.numel() for p in parameters),
        "trained": sum(member.parameter.numel() for b in buckets if b.trained for member in b.members),
        "dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in parameters}),
        "buckets": len(buckets),
        "elements_owned": sum(bucket.owned[1] - bucket.owned[0] for bucket in buckets if bucket.trained),
        "bytes_held": held_bytes(engine.data_axis, module),
        "bytes_offloaded": offloaded_bytes(engine.data_axis),
    }


def _optimizer(optimizer: torch.optim.Optimizer, inner: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Describe an optimizer: the class of the one that ZeRO runs, and the options of the groups."""
    groups = [_plain_entries(group, "params") for group in optimizer.param_groups]
    return {"class": type(inner or optimizer).__name__, "groups": groups}


def _plain_entries(entries: Mapping[str, Any], without: str) -> dict[str, Any]:
    return {key: _plain(value) for key, value in entries.items() if key != without and not key.startswith("_")}


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold: the value itself, a number for a tensor of one element, or its repr."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else repr(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)
