"""``run.json``: what a run was, beside its ``metrics.jsonl``: grid, configuration, schedule, memory and traffic."""

from __future__ import annotations

import json
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..grid import layout_of
from .config_cli import resolved
from .report_read import RUN


def write_run(engine: Any, folder: Path, flops: float | None = None, peak: float | None = None) -> None:
    """Write what is known of the run by now. Collective; rank 0 writes.

    Args:
        engine: any.
        folder: where.
        flops: the model's, of one step.
        peak: TFLOP/s of one device.
    """
    grid, steps = engine.grid, engine.global_steps
    pipelined = "_executor" in vars(engine)
    mine = {
        "name": grid.describe(),
        **grid.coordinate._asdict(),
        "parameters": _parameters(engine),
        "memory": engine.memory_report() if pipelined and steps else None,
        "traffic": engine.traffic_report() if pipelined and steps else None,
    }
    ranks = grid.world.all_gather_object(mine)
    if grid.rank != 0:
        return
    program = engine._training if pipelined else None
    # A tensor rank holds its shards, a replica what the others hold too: the model is one of each.
    whole = [rank["parameters"] for rank in ranks if rank["data"] == rank["tensor"] == 0]
    record = {
        "triax": _version(),
        "torch": torch.__version__,
        "written": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "after_steps": steps,
        "device": grid.device_name(),
        "grid": {name: grid.axis(name).size for name in ("pipe", "data", "tensor")},
        "model": type(engine.module).__name__,
        "parameters": sum(whole),
        "zero": engine.config.zero_optimization.stage,
        "batch": engine.batch.model_dump(),
        "schedule": program.schedule.to_dict() if program is not None else None,
        "flops_per_step": flops,
        "peak_tflops": peak,
        "config": resolved(engine.config, engine.batch),
        "ranks": ranks,
    }
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{RUN}.part"
    part.write_text(json.dumps(record, indent=1, default=str))
    part.replace(folder / RUN)


def _parameters(engine: Any) -> int:
    """Elements of this rank's parameters, whole, each once over the pipe ranks."""
    module = engine.module
    if hasattr(module, "placed"):
        shapes = [placed.layout.shape for placed in module.placed() if placed.counted]
    else:
        shapes = [layout_of(p).shape for p in module.parameters()]
    return sum(torch.Size(shape).numel() for shape in shapes)


def _version() -> str | None:
    try:
        return version("triax")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return None
