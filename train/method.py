"""Method of post-training of a run: what its batches need of the model, and the evaluation on held-out samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from ..base.errors import ConfigError
from ..base.safetensors import write_file
from ..data.answers import Answers
from ..data.dataloader import RepeatingLoader
from ..engine.pipeline_engine import PipelineEngine
from ..grid.agreement.agreement import agreed
from .job import Job
from .methods.answer_losses import AnswerLoss
from .methods.reference import row_log_probs, with_baseline

Microbatch = tuple[Tensor, Any]


class Method:
    """Post-training of a run.

    The reference model is the one that training starts from: its log-probabilities of all samples are computed once,
    before the first step, and kept in the run's folder for a run that goes on.

    Args:
        job: the run.
        engine: its engine, with its checkpoint loaded.
        training, held_out: the samples.

    Raises:
        ConfigError: the run goes on, but the reference's log-probabilities are not there.
    """

    def __init__(self, job: Job, engine: PipelineEngine, training: Answers, held_out: Answers | None) -> None:
        self._job, self._engine, self._training = job, engine, training
        loss: Any = getattr(engine.module.loss_fn, "loss_fn", None)
        self._has_baseline = training.form == "unpaired"
        self._batches = RepeatingLoader(engine.training_dataloader) if self.prepares else None  # type: ignore[arg-type]
        if isinstance(loss, AnswerLoss) and loss.uses_reference:
            parts = [training] if held_out is None else [training, held_out]
            for part in parts:
                shared = part is held_out and part.rows is training.rows  # a share of the same file
                part.reference = training.reference if shared else self._reference(part)

    @property
    def prepares(self) -> bool:
        """True if the microbatches of a step need numbers of a model as it is then."""
        return self._has_baseline

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers of the last step beside those of its loss, equal on every rank."""
        return {}

    @property
    def state(self) -> Any:
        """Plain data for a checkpoint behind the step that was handed out; None: nothing."""
        return None

    def collate(self, data: Answers, numbers: Sequence[int]) -> Microbatch:
        """Return a microbatch of samples, as ``prepared`` takes it."""
        return data.collate(numbers)

    def next_batch(self) -> Iterator[Microbatch] | None:
        """Return the microbatches of the next step; None: the engine reads them itself. Collective."""
        if self._batches is None:
            return None
        return iter(self.prepared([next(self._batches) for _ in range(self._job.batch.accumulation)], self._training))

    def prepared(self, microbatches: list[Microbatch], data: Answers) -> list[Microbatch]:
        """Return the microbatches of a batch with what the loss needs of the model as it is now. Collective."""
        if not self._has_baseline:
            return microbatches
        mismatched = [data.mismatched(labels["sample"].tolist()) for _, labels in microbatches]
        return with_baseline(self._engine, microbatches, mismatched)

    def _reference(self, data: Answers) -> Tensor:
        """Return the reference's log-probabilities of all rows, float64 (samples, rows of a sample). Collective."""
        engine, grid = self._engine, self._engine.grid
        file = self._job.folder / f"reference-{data.checksum[:16]}.safetensors"
        if engine.global_steps == 0:
            found = self._computed(data)
            with agreed(grid):
                if grid.rank == 0:
                    write_file(file, {"log_probs": found})
            return found
        there = grid.world.all_gather_json(file.is_file() if grid.rank == 0 else None)[0]
        if not there:
            raise ConfigError(
                f"the run continues at step {engine.global_steps}, but the reference model's log-probabilities of its "
                f"data, {file}, are missing: put the file back, give the run's data, or start from the beginning with "
                "checkpoint.resume=never"
            )
        found = torch.empty(len(data.rows) // data.width, data.width, dtype=torch.float64)
        with agreed(grid):
            if grid.rank == 0:
                found.copy_(load_file(file)["log_probs"])  # raises for another shape, before the others wait for it
        found = found.to(grid.device)
        grid.world.broadcast(found)
        return found.cpu()

    def _computed(self, data: Answers) -> Tensor:
        """Compute the log-probabilities of all rows by the model as it is now."""
        axis, micro, count = self._engine.grid.data, self._job.batch.micro, len(data.rows) // data.width
        rounds = -(-count // (micro * axis.size))
        mine: list[Tensor] = []  # (rows of a sample, micro) of each microbatch
        for first in range(0, rounds, self._job.batch.accumulation):
            numbers = [
                [min((k * axis.size + axis.rank) * micro + i, count - 1) for i in range(micro)]
                for k in range(first, min(first + self._job.batch.accumulation, rounds))
            ]
            makers = (data.collate, data.mismatched)[: 2 if self._has_baseline else 1]
            rows = [row_log_probs(self._engine, [make(each) for each in numbers]) for make in makers]
            mine += [torch.cat(each).view(data.width, micro) for each in zip(*rows, strict=True)]
        own = torch.stack(mine).to(self._engine.device)  # (rounds, width, micro)
        every = own.new_empty(axis.size * rounds, data.width, micro)
        axis.all_gather(every, own)
        every = every.view(axis.size, rounds, data.width, micro)
        return every.permute(1, 0, 3, 2).reshape(-1, data.width)[:count].cpu()


class AnswerEvaluation:
    """Evaluation of a run with a method: the loss of the first held-out samples, equal on every grid.

    ``metrics`` are then the terms and metrics of the loss, as of training, in the mean over the batches.

    Whole batches are evaluated: the samples that do not fill a last one are left out.

    Args:
        job: the run.
        data: the held-out samples.
        engine: the engine of the run.
        method: the method of the run.

    Raises:
        ConfigError: there are less samples than a batch.
    """

    def __init__(self, job: Job, data: Answers, engine: PipelineEngine, method: Method) -> None:
        self._job, self._data, self._engine, self._method = job, data, engine, method
        self.metrics: dict[str, float] = {}
        train, most = job.batch.train, job.file.evaluate.sequences
        self._count = min(len(data), most or len(data)) // train
        if not self._count:
            raise ConfigError(
                f"evaluate has {min(len(data), most or len(data))} held-out samples, less than a batch of {train}: "
                "hold out more of them, or give a smaller batch.size"
            )
        batches = range(0, self._count * train, train)
        self._weights = [self._weight([data[at] for at in range(first, first + train)]) for first in batches]

    def _weight(self, numbers: Sequence[int]) -> float:
        """Return the weight of a batch's loss: the labels of ``sft`` that count; of the others 1."""
        if self._data.form != "sft":
            return 1.0
        return float(sum(self._data.rows[number].counts[1:].sum() for number in numbers))

    def loss(self) -> float:
        """Compute the mean loss, equal on every rank: over tokens for ``sft``, else over samples. Collective."""
        total, sums = 0.0, dict[str, float]()
        grid, batch = self._engine.grid, self._job.batch
        for step, weight in enumerate(self._weights):
            numbers = [self._data[at] for at in range(step * batch.train, (step + 1) * batch.train)]
            share = batch.train // grid.replicas
            mine = numbers[grid.replica * share : (grid.replica + 1) * share]
            parts: Sequence[Any] = [mine[at : at + batch.micro] for at in range(0, share, batch.micro)]
            microbatches = self._method.prepared([self._method.collate(self._data, each) for each in parts], self._data)
            total += weight * float(self._engine.eval_batch(iter(microbatches)))
            for name, value in self._engine.metrics.items():
                if not isinstance(value, list):
                    sums[name] = sums.get(name, 0.0) + weight * value
        self.metrics = {name: value / sum(self._weights) for name, value in sums.items()}
        return total / sum(self._weights)
