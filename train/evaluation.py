"""Evaluation: the mean loss over the tokens of held-out documents, equal on every grid."""

from __future__ import annotations

from typing import Any

import torch

from ..data.packing import IGNORED
from ..data.token_data import TokenData
from ..data.token_loader import TokenLoader
from ..engine.pipeline_engine import PipelineEngine
from .job import Job


class FirstRows:
    """First rows of some data, as one epoch: data for a ``TokenLoader``, and its rows.

    Args:
        data: the data.
        most: number of rows; None: an epoch.
        seed: seed of the order.
    """

    is_mixture = False  # also the rows of a mixture have an end here

    def __init__(self, data: TokenData, most: int | None, seed: int) -> None:
        self.length, self.document_mask, self.facts = data.length, data.document_mask, data.facts
        rows = data.rows(seed)
        self.fill, self.count = rows.fill, rows.count if most is None else min(most, rows.count)

    def rows(self, seed: int) -> Any:
        """Return the rows, in the order of the seed that they were made with."""
        return self


class Evaluation:
    """Evaluation of a run. Every grid evaluates the same rows: the last batch is filled with rows without labels.

    Args:
        job: the run.
        data: the held-out rows.
        engine: the engine of the run.
    """

    def __init__(self, job: Job, data: TokenData, engine: PipelineEngine) -> None:
        self._job, self._engine = job, engine
        self._rows = FirstRows(data, job.file.evaluate.sequences, job.file.seed)
        self._labels = [int(torch.count_nonzero(labels != IGNORED)) for _, labels in self.batches()]
        if not any(self._labels):
            raise ValueError("the held-out documents have no token to predict: hold out more of them")

    def batches(self) -> TokenLoader:
        """Return the batches that are evaluated, whole: ``(inputs, labels)``."""
        return self._loader(self._job.batch.train, 0, 1)

    def loss(self) -> float:
        """Compute the mean loss over all labels, equal on every rank. Collective."""
        grid, total = self._engine.grid, 0.0
        loader = self._loader(self._job.batch.micro, grid.replica, grid.replicas)
        for labels in self._labels:
            if labels:
                total += labels * float(self._engine.eval_batch(loader))
            else:  # a batch without labels has no loss
                loader.advance(self._job.batch.accumulation)
        return total / sum(self._labels)

    def _loader(self, micro: int, replica: int, replicas: int) -> TokenLoader:
        return TokenLoader(self._rows, self._job.batch.train, micro, replica, replicas, threads=0, epochs=1)
