"""Dry run of a training file: its model, engine and data format, with rows of zeros instead of its data.

The data and a folder's weights are not read, so that a file can be tried out where neither is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...engine.initialize import initialize
from ...grid import Grid
from ..job import Job
from ..model import build_module, parameter_groups

# Sections of the engine's configuration that write files, or read a checkpoint.
_LEFT_OUT = ("checkpoint", "json_monitor", "csv_monitor", "tensorboard", "wandb", "timeline", "histograms")


class JobSteps:
    """Steps of a resolved training file on one rank. Calling it builds the engine and trains without end.

    Args:
        job: the resolved file.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    def __call__(self) -> None:
        """Train on rows of zeros."""
        job = self._without_weights()
        size = job.topology.size
        grid = Grid(
            pipe=size("pipe"), data=size("data"), context=size("context"), tensor=size("tensor"), expert=size("expert")
        )
        module = build_module(job, grid)
        config = {key: value for key, value in job.engine.items() if key not in _LEFT_OUT}
        engine, *_ = initialize(model=module, model_parameters=parameter_groups(job, module), config=config)
        rows = self._rows()
        while True:
            engine.train_batch(rows)

    def _without_weights(self) -> Job:
        file, section = self._job.file, self._job.file.model
        if not section.has_weights:
            return self._job
        shape = section.model_copy(update={"weights": False})
        changed = object.__new__(Job)  # as it is resolved already
        vars(changed).update(vars(self._job) | {"file": file.model_copy(update={"model": shape})})
        return changed

    def _rows(self) -> Iterator[tuple[Any, torch.Tensor]]:
        """Yield microbatches in the format of ``TokenData``."""
        tokens = torch.zeros(self._job.batch.micro, self._job.sequence, dtype=torch.int64)
        while True:
            yield ((tokens, tokens) if self._job.file.data.document_mask else tokens), tokens
