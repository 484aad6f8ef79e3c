"""A pipeline of small layers, its configuration and its samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, PipelineModule, Schedule
from triax.grid.randomness.random import Dropout

from support.toys import mean_loss

WIDTH = 4
BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}


def layers(dropout: float = 0.0) -> list[Any]:
    linear = LayerSpec(nn.Linear, WIDTH, WIDTH)
    return [linear, LayerSpec(Dropout, dropout), linear, torch.tanh, linear]


def engine(grid: Grid, dropout: float = 0.0, loss: Any = mean_loss, **config: Any) -> Any:
    model = PipelineModule(layers(dropout), grid=grid, loss_fn=loss, dtype=torch.float64, partition="uniform")
    return triax.initialize(model=model, config={**BASE, **config})[0]


def samples(count: int = 64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, count, WIDTH, generator=generator, dtype=torch.float64)
    return x[0], x[1]


def microbatches(grid: Grid, micro: int = 2, batch: int = 16) -> Iterator[tuple[Tensor, Tensor]]:
    x, y = samples()
    share = batch // grid.data.size
    for start in range(0, len(x), batch):
        for at in range(start + grid.data.rank * share, start + (grid.data.rank + 1) * share, micro):
            yield x[at : at + micro], y[at : at + micro]


def given(schedule: str | Schedule, **options: Any) -> Any:
    model = PipelineModule(layers(), loss_fn=mean_loss, dtype=torch.float64, **{"partition": "uniform", **options})
    return triax.initialize(model=model, config=BASE, schedule=schedule)[0]
