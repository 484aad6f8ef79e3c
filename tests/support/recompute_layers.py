"""Layers that count or change, and engines that recompute them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from triax import Grid, LayerSpec, PipelineModule


class Counts(nn.Linear):
    """Counts how often it runs."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.record = SimpleNamespace(runs=0)  # an attribute itself would not count the second run

    def forward(self, x: Tensor) -> Tensor:
        self.record.runs += 1
        return super().forward(x).relu()


def counting(interval: int, **options: Any) -> PipelineModule:
    layers = [LayerSpec(Counts, 4) for _ in range(5)]
    return PipelineModule(layers, grid=Grid(), activation_checkpoint_interval=interval, **options)


def runs(model: PipelineModule) -> list[int]:
    layers: list[Any] = [*model.layers.values()]
    return [layer.record.runs for layer in layers]
