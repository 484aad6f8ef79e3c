"""Dry run of a training file: its model, engine and data format, with rows of zeros instead of its data.

The data and a folder's weights are not read, so that a file can be tried out where neither is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ..base.errors import ConfigError
from ..engine.pipeline_engine import PipelineEngine
from ..grid import Grid
from ..options.checkpoints import Checkpoints
from ..options.monitoring import Monitoring
from ..train.job import Job
from ..train.model import blank_microbatch, build_module, parameter_groups


class JobSteps:
    """Steps of a resolved training file on one rank. Calling it builds the engine and trains without end.

    Args:
        job: the resolved file.

    Raises:
        ConfigError: the layers depend on values.
    """

    def __init__(self, job: Job) -> None:
        if job.file.data.images:
            raise ConfigError("data.images takes layers that need values: train a few steps, training.steps=3")
        self._job = job

    def __call__(self) -> None:
        """Train on rows of zeros."""
        job = self._without_weights()
        sizes: dict[str, Any] = job.topology.sizes
        grid = Grid(**sizes)
        module = build_module(job, grid)
        # Nothing is written, no checkpoint is read, and no coordinator is asked.
        options = job.options.changed(checkpoint=Checkpoints(), monitor=Monitoring(), fault_tolerance=None)
        engine = PipelineEngine(module, options, parameters=parameter_groups(job, module))
        rows = self._rows()
        while True:
            engine.train_batch(rows)

    def _without_weights(self) -> Job:
        file, section = self._job.file, self._job.file.model
        if not section.has_weights:
            return self._job
        shape = section.changed(weights=False)
        return replace(self._job, file=file.changed(model=shape))

    def _rows(self) -> Iterator[tuple[Any, Any]]:
        """Yield microbatches in the format of ``TokenData``, or of a method with all that its loss needs."""
        job = self._job
        tokens = torch.zeros(job.batch.micro, job.sequence, dtype=torch.int64)
        while True:
            if job.file.method is not None:
                yield blank_microbatch(job, job.sequence)
            else:
                yield ((tokens, tokens) if job.document_mask else tokens), tokens
