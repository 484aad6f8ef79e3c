"""Training of decoders on any grid, in float64, and its comparison with the same training on one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import triax
from triax.context import shard
from triax.models.config import AnyDecoderConfig
from triax.models.decoder import decoder_layers
from triax.models.layers import NextTokenLoss

from support.training import Step, assert_steps_equal, train

VOCABULARY, ROWS, STEPS = 37, 4, 2


@dataclass(frozen=True)
class Job:
    """What is computed: equal on every grid.

    Attributes:
        config: the model, of ``VOCABULARY`` tokens.
        length: tokens of a row.
        packed: rows have several documents.
        scale: factor of the initial matrices: at their initial size the branches hardly matter.
        cut: a rank is given the ids and labels of its own tokens alone, as a loader of one's own would give them.
    """

    config: AnyDecoderConfig
    length: int = 16
    packed: bool = False
    scale: float = 1.0
    cut: bool = False


@dataclass(frozen=True)
class Place:
    """Where it is computed, and how; ``grid`` has the sizes of pipe, data, context and tensor."""

    grid: tuple[int, int, int, int] = (1, 1, 1, 1)
    attention: str = "ring"
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    stage: int = 0
    recompute: str = ""
    expert: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return torch.Size(self.grid).numel()


def batch(job: Job, step: int) -> tuple[Any, Tensor]:
    """Return the inputs and labels of a step, (ROWS, length) each; the inputs of packed rows are a pair."""
    generator = torch.Generator().manual_seed(7 + step)
    ids, labels = (torch.randint(VOCABULARY, (ROWS, job.length), generator=generator) for _ in range(2))
    labels[:, ::5] = -100
    documents = (torch.rand(ids.shape, generator=generator) < 0.2).cumsum(1)
    return (ids, documents) if job.packed else ids, labels


def rows(job: Job, step: int, places: slice, grid: triax.Grid) -> tuple[Any, Tensor]:
    """Return some rows of a step's batch, as this rank is given them."""
    inputs, labels = batch(job, step)
    ids, *documents = (part[places] for part in (inputs if job.packed else (inputs,)))
    labels = labels[places]
    if job.cut:
        ids, labels = shard(ids, grid.context), shard(labels, grid.context, fill=-100)
    return (ids, *documents) if job.packed else ids, labels


def trained(job: Job, place: Place) -> list[Step]:
    """Train this rank's part: losses, norms, and gathered gradients and weights of each step."""
    pipe, data, context, tensor = place.grid
    grid = triax.Grid(pipe, data, tensor, context=context, expert=place.expert)
    layers = decoder_layers(job.config, sequence_parallel=place.sequence_parallel, attention=place.attention)
    loss = NextTokenLoss(grid, VOCABULARY)
    options: dict[str, Any] = {"seed": 3, "dtype": torch.float64, "partition": "uniform"}
    model = triax.PipelineModule(layers, grid=grid, loss_fn=loss, **options)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data *= job.scale
    micro = 2 if data == 1 and pipe < 4 else 1  # two microbatches at least, and as many as stages
    settings: dict[str, Any] = {
        "train_batch_size": ROWS,
        "train_micro_batch_size_per_gpu": micro,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "gradient_clipping": 0.1,
        "zero_optimization": {"stage": place.stage},
        "pipeline": {"schedule": place.schedule},
    }
    if place.recompute:
        settings["activation_checkpointing"] = {"granularity": place.recompute}
    engine, *_ = triax.initialize(model=model, config=settings)
    share = ROWS // data
    own = [slice(at, at + micro) for at in range(grid.data.rank * share, (grid.data.rank + 1) * share, micro)]
    return train(engine, iter(rows(job, step, places, grid) for step in range(STEPS) for places in own), STEPS)


def trained_all(cells: list[tuple[Job, Place]]) -> list[list[Step]]:
    """Train each job at its place; they have equally many ranks."""
    return [trained(*cell) for cell in cells]


def assert_equal_to_one_process(ranks: Any, cells: list[tuple[Job, Place]]) -> None:
    """Train all jobs at their places, and compare each with its training on one process."""
    alone = {job: trained(job, Place()) for job in dict.fromkeys(job for job, _ in cells)}
    for count in sorted({place.ranks for _, place in cells}):
        here = [cell for cell in cells if cell[1].ranks == count]
        for (job, place), steps in zip(here, ranks(count, trained_all, here, timeout=250)[0], strict=True):
            print(job, place)  # pytest shows it where the comparison fails
            assert_steps_equal(steps, alone[job])
            assert [step.loss for step in steps] == pytest.approx([step.loss for step in alone[job]], rel=1e-12)
