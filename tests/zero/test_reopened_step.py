"""A backward pass after user code read reduced gradients: both passes count once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax.tensor_parallel.norm import RMSNorm

TOKENS, WIDTH, FACTORS = 4, 3, (1.0, 10.0)
BETWEEN: dict[str, Callable[[Any], object]] = {
    "nothing": lambda engine: None,
    "clips": lambda engine: engine.clip_grad_norm_(1e9),
    "reads .grad": lambda engine: [parameter.grad for parameter in engine.module.parameters()],
}


def tokens(replica: int) -> Tensor:
    generator = torch.Generator().manual_seed(replica)
    return torch.randn(2, TOKENS, WIDTH, generator=generator, dtype=torch.float64)


def plain_weight(replicas: int) -> Tensor:
    norm = nn.RMSNorm(WIDTH, eps=1e-6, dtype=torch.float64)
    for replica, factor in product(range(replicas), FACTORS):
        (norm(tokens(replica)).square().sum() * factor / replicas).backward()
    torch.optim.SGD(norm.parameters(), lr=0.1).step()
    return norm.weight.detach()


def weight(stage: Any, tensor: int, reduction: dict[str, Any], act: Callable[[Any], object]) -> Tensor:
    """Train a norm. Each tensor rank has a part of the tokens, and the gradient is the sum over these ranks."""
    grid = triax.Grid(tensor=tensor, timeout=60)
    norm = RMSNorm(WIDTH, grid=grid, sequence_parallel=True).double()
    optimizer = triax.Optimizer("SGD", lr=0.1)
    engine = triax.Engine(
        norm,
        grid=grid,
        optimizer=optimizer,
        batch=2 * grid.data.size,
        zero=triax.Zero(stage=stage),
        reduction=triax.GradientReduction(**reduction),
    )
    part = tokens(grid.data.rank).chunk(tensor, 1)[grid.tensor.rank]
    for factor in FACTORS:
        engine.backward(engine(part).square().sum() * factor)
        act(engine)
    engine.step()
    return engine.gather()["weight"]


def wrong_cases(tensor: int, reductions: Sequence[dict[str, Any]]) -> list[Any]:
    """Return the cases whose weight is not that of plain PyTorch."""
    wanted = plain_weight(triax.Grid(tensor=tensor, timeout=60).data.size)
    return [
        (stage, more, name)
        for stage, more, name in product(range(4), reductions, BETWEEN)
        if not (weight(stage, tensor, more, BETWEEN[name]) - wanted).abs().max() <= 1e-10
    ]


PREDIVIDED = {"predivide": 4.0}


@pytest.mark.parametrize(
    ("size", "tensor", "reductions"),
    [
        (1, 1, [PREDIVIDED]),
        (2, 1, [{}, PREDIVIDED]),
        (2, 2, [{}]),
        *(
            pytest.param(size, tensor, [{}, PREDIVIDED], marks=pytest.mark.exhaustive)
            for size, tensor in ((1, 1), (2, 2), (4, 2))
        ),
    ],
)
def test_a_backward_pass_after_a_reduction_counts_once(
    ranks: Any, size: int, tensor: int, reductions: list[dict[str, Any]]
) -> None:
    assert ranks(size, wrong_cases, tensor, reductions) == [[]] * size
