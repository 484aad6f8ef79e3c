"""A backward pass that fails on every replica, such as out of memory: the step is skipped and training continues."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from triax import Grid
from triax.zero import gathered

from support.sharded_loops import sharded_sgd
from support.toys import replica_inputs, same

WIDTH, DEPTH, STEPS = 6, 4, 3


class Fails(torch.autograd.Function):
    """Identity whose backward fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ArithmeticError("no memory is left")


class Blocks(nn.Module):
    """Linear layers; the backward pass fails behind one of them if ``fails`` names it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.fails: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            if number == self.fails:
                x = Fails.apply(x)
        return x


def blocks() -> Blocks:
    torch.manual_seed(0)
    return Blocks().double()


def goes_on(stage: int) -> list[dict[str, Tensor]]:
    """Train with a failing second step, behind each block in turn; return the weights."""
    found = []
    for fails in range(DEPTH):
        grid, model = Grid(timeout=20), blocks()
        optimizer = sharded_sgd(model, grid, stage=stage, bucket_size=50)
        for step in range(STEPS):
            model.fails = fails if step == 1 else None
            optimizer.zero_grad()
            try:
                model(replica_inputs(step, grid.data.rank)).square().mean().backward()
            except ArithmeticError:
                continue
            optimizer.step()
        with gathered(model):
            found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return found


@pytest.mark.parametrize("stage", range(4))
def test_a_backward_pass_that_failed_everywhere_is_left_out(ranks: Any, stage: int) -> None:
    """Reductions and gathers that had begun were dropped, and the next step took their messages or hung."""
    model = blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in (0, 2):
        optimizer.zero_grad()
        torch.stack([model(replica_inputs(step, replica)).square().mean() for replica in range(2)]).mean().backward()
        optimizer.step()
    wanted = {name: p.detach() for name, p in model.named_parameters()}
    for found in ranks(2, goes_on, stage):
        for weights in found:
            same(weights, wanted)
