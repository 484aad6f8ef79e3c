"""Configurations of DeepSpeed's, and a small engine for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, PipelineModule

from support.toys import mean_loss

WIDTH = 3
TUTORIAL = """{
  // as DeepSpeed's pages have it; "a comment" is none: {
  "train_batch_size": 16,  # sixteen samples // a step
  "train_micro_batch_size_per_gpu": "auto",
  "steps_per_print": 2000, /* two
  lines, "and an odd quote */
  "optimizer": {
    "type": "Adam",
    "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
  },
  "scheduler": {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}
  },
  "gradient_clipping": 1.0,
  "prescale_gradients": false,
  "fp16": {
    "enabled": true, "fp16_master_weights_and_grads": false, "loss_scale": 0, "loss_scale_window": 500,
    "hysteresis": 2, "min_loss_scale": 1, "initial_scale_power": 15
  },
  "wall_clock_breakdown": false,
  "zero_optimization": {
    "stage": 2, "allgather_partitions": true, "reduce_scatter": true, "allgather_bucket_size": 50000000,
    "reduce_bucket_size": 5e7, "overlap_comm": true, "contiguous_gradients": true, "cpu_offload": true,
  },
}"""


def engine(grid: Grid | None = None, **config: Any) -> Any:
    layers: list[Any] = [LayerSpec(nn.Linear, WIDTH, WIDTH), torch.tanh, LayerSpec(nn.Linear, WIDTH, WIDTH)]
    dtype = torch.float32 if "fp16" in config else torch.float64
    model = PipelineModule(layers, grid=grid, loss_fn=mean_loss, dtype=dtype)
    base = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    return triax.initialize(model=model, config={**base, **config})[0]


def data(grid: Grid | None = None, micro: int = 2) -> Iterator[tuple[Tensor, Tensor]]:
    x, y = torch.randn(2, 64, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rank, size = (0, 1) if grid is None else (grid.data.rank, grid.data.size)
    while True:
        for start in range(rank * micro, 64 - micro + 1, micro * size):
            yield x[start : start + micro], y[start : start + micro]
