"""Layers, batches and engines of ZeRO++, and the keys of its options."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, PipelineModule

from support.toys import summed_loss

WIDTH, LAYERS, MICROBATCHES, STEPS = 40, 3, 2, 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def made(grid: Grid, zero: dict[str, Any], **config: Any) -> triax.PipelineEngine:
    layers = [LayerSpec(Layer) for _ in range(LAYERS)]
    model = PipelineModule(layers, grid=grid, loss_fn=summed_loss, dtype=torch.float64, partition="uniform")
    base = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICROBATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": zero,
    }
    return triax.initialize(model=model, config={**base, **config})[0]


QWZ, QGZ, HPZ = "zero_quantized_weights", "zero_quantized_gradients", "zero_hpz_partition_size"
PLAIN: dict[str, Any] = {"stage": 3}
ALL: dict[str, Any] = {"stage": 3, QWZ: True, QGZ: True}
