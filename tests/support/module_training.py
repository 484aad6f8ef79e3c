"""A plain module, its microbatches and configurations, for tests of the engine of plain modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WIDTH, MICRO, STEPS, CLIP = 6, 4, 3, 0.3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.full((WIDTH,), 1.5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(x * self.frozen)))
        return y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("shift", torch.randn(WIDTH))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: Tensor, *, times: float = 1.0) -> Tensor:
        x = self.enter(x) + self.shift
        for block in self.blocks:
            x = block(x) * times
        return self.norm(x) @ self.enter.weight.T


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.2},
        {"params": [p for p in trained if p.dim() <= 1], "lr": 0.003, "weight_decay": 0.0},
    ]


def microbatch(step: int, index: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * index + replica)
    x, y = torch.randn(2, MICRO, WIDTH, generator=generator, dtype=torch.float64)
    return x, y


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
}


def config(kind: str = "SGD", accumulation: int = 1, stage: int = 0, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "reduce_bucket_size": 300, **more.pop("zero", {})}
    if stage == 3:  # the default of the adapter of DeepSpeed would leave such a small model whole
        zero.setdefault("stage3_param_persistence_threshold", 0)
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": kind, "params": OPTIMIZERS[kind][1]},
        "gradient_clipping": CLIP,
        "zero_optimization": zero,
        **more,
    }
