"""A model, its batches and engines, for tests of gradients between backward and step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import triax
from triax import Grid

WIDTH, MICRO, LIMIT = 5, 3, 0.05
OPTIONS: Any = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
REFUSED = r"(p\.grad of \S+ was (read or changed|assigned).*[Cc]all (engine|optimizer)\.clip_grad_norm_\(max_norm\))"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(2 * WIDTH, 2 * WIDTH) for _ in range(2))
        self.never = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        y: Tensor = self.leave(x)
        return y


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch(step: int, index: int, replica: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * index + replica)
    return 3.0 * torch.randn(MICRO, WIDTH, generator=generator, dtype=torch.float64)


def compared(found: Any, wanted: Any, name: str) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12, check_dtype=False, msg=lambda m: f"{name}: {m}")


def engine_of(grid: Grid, stage: int, passes: int = 1, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": passes,
        "optimizer": {"type": "SGD", "params": OPTIONS},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 70},
        **more,
    }
    return triax.initialize(model=net(), config=config, grid=grid)[0]
