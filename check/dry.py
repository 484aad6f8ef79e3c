"""Dry check: a training step of each class of ranks of a grid on the meta device, without values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import cycle
from typing import Any

import torch

from ..dry_run.dry_run import dry_run
from ..dry_run.rank import Settings
from ..dry_run.report import report
from ..engine.pipeline_engine import PipelineEngine
from ..grid import Grid
from ..options.batch import Batch
from .grids import Axes, count, name_of
from .target import Target, batch_of, rows_of


def dry_check(target: Target, grids: Sequence[Axes]) -> tuple[bool, str, dict[str, Any]]:
    """Return (True if the model trains on every grid, the text of the reports, the same for JSON)."""
    texts, values = [], {}
    for axes in grids:
        found = dry_run(partial(_train, target, axes), Settings(count(axes)))
        texts.append(f"{name_of(axes)}\n{report(found)}")
        values[name_of(axes)] = found.problems
    holds = not any(values.values())
    return holds, "\n\n".join(texts), {"target": target.path, "holds": holds, "problems": values}


def _train(target: Target, axes: Axes) -> None:
    """Train on one rank without end: the dry run stops it after a step."""
    build, made = target.open()
    sizes: dict[str, Any] = dict(axes)
    grid = Grid(**{"data": 1, **sizes})
    module = build(grid)
    batch = batch_of(target, module, made, None)
    rows = rows_of(batch[0][0])
    engine = PipelineEngine(
        module, optimizer=partial(torch.optim.SGD, lr=0.1), batch=Batch(size=rows * len(batch), microbatch=rows)
    )
    microbatches = cycle(batch)
    while True:
        engine.train_batch(microbatches)
