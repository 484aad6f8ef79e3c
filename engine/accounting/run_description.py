"""Record of a run for ``run.json``: parameters, memory and traffic of each rank, and the description of the run."""

from __future__ import annotations

import math
from typing import Any

from ...grid import Grid
from ...pipe.module import PipelineModule
from ..monitor.records import RunRecord
from ..named_parameters import named_parameters


def run_record(engine: Any, grid: Grid, flops: float | None, peak: float | None, since: int) -> RunRecord | None:
    """Return the record of the run so far on rank 0, None on the others. Collective.

    Args:
        engine: a ``PipelineEngine`` or a ``ModuleEngine``.
        grid: the ranks to record.
        flops: FLOPs of the model in one step.
        peak: peak TFLOP/s of one device.
        since: the first step of this process; 0: it has not taken one.
    """
    steps = engine.global_steps
    pipelined = isinstance(engine.module, PipelineModule)
    own_record = {
        "name": grid.describe(),
        **grid.coordinate._asdict(),
        # Elements of the unsharded parameters. A tied parameter counts on one pipe rank only.
        "parameters": sum(math.prod(layout.shape) for _, layout, counted in named_parameters(engine.module) if counted),
        "memory": engine.memory_report() if since else None,
        "traffic": engine.traffic_report() if since else None,
    }
    ranks = grid.world.all_gather_json(own_record)
    if grid.rank != 0:
        return None
    axes = {name: grid.axis(name).size for name in ("pipe", "data", "context", "tensor", "expert")}
    return RunRecord(
        since_step=since or steps + 1,
        after_steps=steps,
        device=grid.device_name(),
        grid={name: size for name, size in axes.items() if size > 1 or name not in ("context", "expert")},
        model=type(engine.module).__name__,
        # A parameter counts whole on each tensor rank and on each replica: count the first of all.
        parameters=sum(r["parameters"] for r in ranks if r["data"] == r["tensor"] == r.get("context", 0) == 0),
        zero=engine.options.zero.stage,
        batch=engine.batch._asdict(),
        schedule=engine.program.schedule.to_dict() if pipelined else None,
        flops_per_step=flops,
        peak_tflops=peak,
        config=engine.settings(),
        ranks=ranks,
    )
