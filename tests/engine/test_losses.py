"""Values that a loss function returns: a mean, or a pair (sum, weight); all else is refused on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, PipelineModule

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 3,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}


def engine_of(grid: Grid | None = None, loss: Any = None) -> triax.PipelineEngine:
    layers = [LayerSpec(nn.Linear, 6, 6) for _ in range(2)]
    module = PipelineModule(layers, grid=grid, loss_fn=loss, dtype=torch.float64, partition="uniform")
    return triax.initialize(model=module, config=CONFIG)[0]


def plain_engine() -> triax.ModuleEngine:
    return triax.initialize(model=nn.Linear(6, 6).double(), config=CONFIG, grid=Grid())[0]


def signed() -> Iterator[tuple[Tensor, Tensor]]:
    """Microbatches whose labels are positive and negative in turns."""
    x = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for sign in itertools.cycle([1.0, -1.0]):
        yield x, x.abs() * sign


def as_two(outputs: Tensor, labels: Tensor) -> Any:
    """Two losses, not a sum and its weight."""
    return (outputs - labels).square().mean(), outputs.abs().mean()


def odd_pairs(outputs: Tensor, labels: Tensor) -> Any:
    """A pair for every second microbatch, a mean for the others."""
    total = (outputs - labels).square()
    return (total.sum(), total.numel()) if labels[0, 0, 0] > 0 else total.mean()


def of_weight(weight: Any) -> Any:
    return lambda outputs, labels: (outputs.sum(), weight)


BAD_PAIRS = [
    (as_two, "two losses would be trained as their quotient: return one loss"),
    (lambda outputs, labels: [*as_two(outputs, labels)], "two losses would be trained as their quotient"),
    (lambda outputs, labels: (*as_two(outputs, labels), 1.0), "is a tuple of 3: return a mean"),
    (lambda outputs, labels: {"loss": outputs.mean()}, "is a dict: return a mean"),
    (lambda outputs, labels: (outputs.sum(dim=(0, 1)), 3), r"is a tensor of shape \(6,\): return a mean"),
    (of_weight(-2), "is -2, but it must be a count, finite and not negative"),
    (of_weight(torch.tensor(float("nan"))), "is nan, but it must be a count"),
    (of_weight(None), "the weight that loss_fn returned is a NoneType, not a number"),
    (odd_pairs, "a mean for one microbatch of the batch.*return the same form"),
]


def two_losses_refused(sizes: tuple[int, int, int]) -> str:
    with pytest.raises(RuntimeError) as error:
        engine_of(Grid(*sizes, timeout=60), loss=as_two).train_batch(signed())
    return str(error.value)


def refused_backward() -> None:
    x, y = next(signed())
    engine = plain_engine()
    for loss, words in (
        (as_two(engine(x), y), "two losses would be trained as their quotient: pass one loss"),
        ((*as_two(engine(x), y), 1.0), "is a tuple of 3: pass a mean"),
        ((engine(x).sum(), -1), "is -1, but it must be a count"),
        ((engine(x), 1), r"is a tensor of shape"),
    ):
        with pytest.raises(ValueError, match=words):
            engine.backward(loss)
    weight = engine.module.weight
    engine.backward([engine(x).square().sum(), torch.tensor(x.numel())])
    torch.testing.assert_close(weight.grad, torch.autograd.grad(engine.module(x).square().mean(), weight)[0])


def unlike_replicas() -> str:
    grid = Grid(data=2, timeout=60)
    mine = (pair for index, pair in enumerate(signed()) if index % 2 == grid.data.rank)
    engine = engine_of(grid, loss=odd_pairs)
    with pytest.raises(RuntimeError) as error:  # noqa: PT012 (the replica of the pairs may stop in the next step)
        for _ in range(2):
            engine.train_batch(mine)
    return str(error.value)


def test_two_losses_are_not_a_sum_and_its_weight(ranks: Any) -> None:
    """Their quotient was trained, without a word."""
    for loss, words in BAD_PAIRS:
        with pytest.raises(RuntimeError, match=words):
            engine_of(loss=loss).train_batch(signed())
    refused_backward()
    for sizes in ((2, 1, 1), (1, 2, 1)):
        assert all("trained as their quotient" in message for message in ranks(2, two_losses_refused, sizes))
    for message in ranks(2, unlike_replicas):
        assert "return the same form for every microbatch" in message
