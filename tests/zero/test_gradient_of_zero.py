"""A parameter whose gradient is exactly 0 on one replica, while another has none: steps, and what user code sees.

No replica can tell the sum of such gradients from that of no gradients. The step asks all replicas, so it is right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from triax import Grid
from triax.zero import ShardedOptimizer

from support.toys import error_text, same

STEPS = 2
OPTIONS: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}


class Gated(nn.Module):
    """``gate`` has the gradient 0 where it is used, and ``never`` is used on no replica."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3).double()
        self.gate, self.never = (nn.Parameter(torch.ones(4, dtype=torch.float64)) for _ in range(2))

    def forward(self, replica: int) -> Tensor:
        y: Tensor = self.layer(torch.full((2, 3), 1.0 + replica, dtype=torch.float64)).sum()
        return y if replica else y + (0.0 * self.gate).sum()


def nothing(model: Gated) -> None:
    pass


def read(model: Gated) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def read_and_change(model: Gated) -> None:
    read(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(parameter, alpha=0.1)


def trained(act: Callable[[Gated], None], stage: int | None) -> dict[str, Tensor]:
    """Train on both replicas' batches, with this replica's, or in plain PyTorch (stage None) with the mean of both."""
    model = Gated()
    grid = None if stage is None else Grid(timeout=60)
    optimizer: Any = torch.optim.AdamW(model.parameters(), **OPTIONS)
    if grid is not None and stage is not None:
        optimizer = ShardedOptimizer(torch.optim.AdamW, model.parameters(), grid, stage=stage, **OPTIONS)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (model(0) + model(1)) / 2 if grid is None else model(grid.data.rank)
        loss.backward()
        act(model)
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("act", [nothing, read])
def test_a_zero_gradient_of_one_replica_steps_as_plain_pytorch(
    ranks: Any, act: Callable[[Gated], None], stage: int
) -> None:
    plain = trained(act, stage=None)
    assert not torch.equal(plain["gate"], torch.ones(4)) and torch.equal(plain["never"], torch.ones(4).double())
    for weights in ranks(2, trained, act, stage):
        same(weights, plain)


def refused() -> str:
    return error_text(lambda: trained(read_and_change, 0), RuntimeError)


def test_a_change_that_one_replica_skips_is_refused(ranks: Any) -> None:
    """The replica without a gradient sees None after the read, and the other replica sees zeros."""
    assert all("was changed differently on different replicas" in message for message in ranks(2, refused))
