"""A net, its microbatches and plain loops with ShardedOptimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from triax import Grid
from triax.zero import ShardedOptimizer

WIDTH, SAMPLES, STEPS = 6, 4, 4  # samples of a backward pass of one replica


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.rare = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.empty = nn.Parameter(torch.zeros(0, WIDTH))
        self.frozen = nn.Parameter(torch.full((WIDTH,), 1.5), requires_grad=False)

    def forward(self, x: Tensor, rare: bool) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(x * self.frozen)))
        y = y + self.down(torch.tanh(self.up(y)))  # both a second time
        return y + self.rare(y) if rare else y


class Net(nn.Module):
    """A model with parameters that are used twice, sometimes or never, and with empty and frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, rare: int) -> Tensor:
        x = self.enter(x)
        for number, block in enumerate(self.blocks):
            x = block(x, rare=bool(rare >> number & 1))
        return self.norm(x) @ self.enter.weight.T  # a tied head


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def microbatch(step: int, index: int, replica: int) -> tuple[Tensor, Tensor, int]:
    """Inputs, labels, and the blocks that use their rare parameters: on some replicas, in the last step on none."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * index + replica)
    x, y = torch.randn(2, SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    rare = (0, 0b11110, 0b10001, 0b01010)[replica % 4] if step < STEPS - 1 else 0
    return x, y, rare


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor, int]) -> Tensor:
    x, y, rare = batch
    loss: Tensor = (model(x, rare) - y).square().mean()
    return loss


def backward(model: nn.Module, batch: tuple[Tensor, Tensor, int]) -> Tensor:
    loss = loss_of(model, batch)
    loss.backward()
    return loss


def sharded_sgd(model: nn.Module, grid: Grid, stage: int = 3, lr: float = 0.1, **more: Any) -> ShardedOptimizer:
    """Return a ShardedOptimizer of all parameters with SGD."""
    parameters = list(model.parameters())
    return ShardedOptimizer(torch.optim.SGD, parameters, grid, stage=stage, module=model, lr=lr, **more)
