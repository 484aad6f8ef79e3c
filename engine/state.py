"""``dump_state``: what an engine is, as it starts: what every rank holds, and how it will be stepped."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ..pipe.module import PipelineModule
from .accounts import held_bytes

if TYPE_CHECKING:
    from .engine import Engine
    from .module_engine import ModuleEngine


def dump(engine: Engine | ModuleEngine) -> None:
    """Rank 0 prints ``describe(engine)`` as JSON. Collective over the grid."""
    found = describe(engine)
    if engine.grid.rank == 0:
        print(json.dumps({"engine": found}, indent=2), flush=True)


def describe(engine: Engine | ModuleEngine) -> dict[str, Any]:
    """What there is, as JSON has it. Collective over the grid.

    Returns:
        The engine's class, module, grid, device and batch; its optimizer with the options of its parameter groups, its
        schedule of learning rates, loss scale and dropout's seed; the parameters of the whole model; and of every rank
        its coordinate, stages, parameters (held, trained) and dtypes, buckets and bytes held.
    """
    grid = engine.grid
    optimizer, scheduler, scaler = engine.optimizer, engine.lr_scheduler, engine._scaler
    return {
        "class": type(engine).__name__,
        "module": type(engine.module).__name__,
        "grid": {**grid.topology.axes, "device": str(grid.device), "timeout": grid.timeout},
        "batch": engine.batch.model_dump(),
        "optimizer": None if optimizer is None else _optimizer(optimizer),
        "scheduler": None if scheduler is None else _scheduler(scheduler),
        "loss_scale": None if scaler is None else scaler.scale,
        "training_samples": _samples(engine),
        "ranks": grid.world.all_gather_object(_rank(engine)),
    }


def _rank(engine: Engine | ModuleEngine) -> dict[str, Any]:
    module, grid = engine.module, engine.grid
    stages = {}
    if isinstance(module, PipelineModule):
        stages = {
            f"stage {stage}": f"layers {module.boundaries[stage]} to {module.boundaries[stage + 1] - 1}"
            for stage in module.stages
        }
    parameters = list(module.parameters())
    buckets = engine._replicas.buckets
    return {
        "rank": grid.rank,
        "coordinate": grid.coordinate._asdict(),
        **({"stages": stages} if stages else {}),
        "parameters": sum(p.numel() for p in parameters),
        "trained": sum(member.parameter.numel() for b in buckets if b.trained for member in b.members),
        "dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in parameters}),
        "buckets": len(buckets),
        "elements_owned": sum(bucket.owned[1] - bucket.owned[0] for bucket in buckets if bucket.trained),
        "bytes_held": held_bytes(engine._replicas, module),
        "bytes_offloaded": engine._replicas.offloaded(),
    }


def _optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    inner = getattr(optimizer, "_inner", optimizer)
    groups = [
        {key: _plain(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    return {"class": type(inner).__name__, "groups": groups}


def _scheduler(scheduler: LRScheduler) -> dict[str, Any]:
    values = {key: _plain(value) for key, value in vars(scheduler).items() if not key.startswith("_")}
    return {"class": type(scheduler).__name__, **{k: v for k, v in values.items() if k != "optimizer"}}


def _samples(engine: Engine | ModuleEngine) -> int | None:
    loader = engine.training_dataloader
    return None if loader is None else len(loader.dataset)  # type: ignore[arg-type]


def _plain(value: Any) -> Any:
    """As JSON has it, or as it prints."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else repr(value)
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)
