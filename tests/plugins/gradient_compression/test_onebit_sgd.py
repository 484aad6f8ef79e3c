"""1-bit SGD: each step equal to the formula of Seide et al. 2014, N replicas in one process in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import Grid
from triax.base.errors import ConfigError
from triax.compat.deepspeed.from_config import read_config
from triax.plugins.gradient_compression import OneBitSGD

from support.toys import mean_loss

WIDTH, BATCH, STEPS, FREEZE = 6, 8, 7, 2
OPTIONS: dict[str, Any] = {"lr": 0.05, "momentum": 0.8, "weight_decay": 0.1, "nesterov": True, "freeze_step": FREEZE}
Weights = dict[str, Tensor]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 11), nn.Tanh(), nn.Linear(11, WIDTH)).double()


def batch(step: int, replica: int, replicas: int) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, BATCH, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    share = BATCH // replicas
    return x[replica * share : (replica + 1) * share], y[replica * share : (replica + 1) * share]


def engine(replicas: int) -> Any:
    config = {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "OneBitSGD", "params": OPTIONS},
    }
    return triax.initialize(model=net(), config=config, grid=Grid(data=replicas, timeout=60))[0]


def step(made: Any, number: int) -> None:
    x, y = batch(number, made.grid.data.rank, made.grid.data.size)
    made.backward(mean_loss(made(x), y))
    made.step()


def trained(replicas: int) -> tuple[list[Weights], Weights]:
    """Return the weights after each step, and the chunk of each element."""
    made, trace = engine(replicas), []
    for number in range(STEPS):
        step(made, number)
        trace.append(made.gather())
    chunks = {}
    for bucket in made.data_axis.buckets:
        part = bucket.flat.numel // replicas
        for slot, member in zip(bucket.flat.slots, bucket.members, strict=True):
            chunks[member.layout.name] = torch.arange(slot.start, slot.stop) // part
    return trace, chunks


def quantized(x: Tensor, chunk: Tensor) -> Tensor:
    """Seide et al. 2014, section 3.2: each element becomes the mean of those of its sign, in its chunk."""
    found = torch.zeros_like(x)
    for number in chunk.unique():
        for sign in (x >= 0, x < 0):
            here = (chunk == number) & sign
            if here.any():
                found[here] = x[here].mean()
    return found


def formula(replicas: int, chunks: Weights) -> list[Weights]:
    model = net()
    named = dict(model.named_parameters())
    zeros = {name: torch.zeros(p.numel(), dtype=torch.float64) for name, p in named.items()}
    momentum = {name: value.clone() for name, value in zeros.items()}
    own = [{name: value.clone() for name, value in zeros.items()} for _ in range(replicas)]
    server = {name: value.clone() for name, value in zeros.items()}
    trace = []
    for number in range(STEPS):
        gradients: list[Weights] = []
        for replica in range(replicas):
            model.zero_grad()
            x, y = batch(number, replica, replicas)
            mean_loss(model(x), y).backward()
            gradients.append({name: p.grad.flatten().clone() for name, p in named.items() if p.grad is not None})
        for name, p in named.items():
            mean = torch.stack([each[name] for each in gradients]).mean(0)
            if number >= FREEZE and replicas > 1:
                total = torch.zeros_like(mean)
                for replica in range(replicas):
                    whole = gradients[replica][name] + own[replica][name]
                    sent = quantized(whole, chunks[name])
                    own[replica][name] = whole - sent
                    total += sent / replicas
                total += server[name]
                mean = quantized(total, chunks[name])
                server[name] = total - mean
            g = mean + 0.1 * p.detach().flatten()
            momentum[name] = 0.8 * momentum[name] + g
            p.data.sub_(0.05 * (g + 0.8 * momentum[name]).view_as(p))
        trace.append({name: p.detach().clone() for name, p in named.items()})
    return trace


@pytest.mark.parametrize("replicas", [1, 2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_1_bit_sgd_steps_equal_the_formula(ranks: Any, replicas: int) -> None:
    results = ranks(replicas, trained, replicas)
    wanted = formula(replicas, results[0][1])
    for trace, _ in results:
        for mine, its in zip(trace, wanted, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-10, atol=1e-12)


def test_1_bit_sgd_on_one_replica_equals_torchs_sgd() -> None:
    model, its = net(), net()
    optimizers = (
        OneBitSGD(model.parameters(), **OPTIONS),
        torch.optim.SGD(its.parameters(), lr=0.05, momentum=0.8, weight_decay=0.1, nesterov=True),
    )
    for number in range(STEPS):
        for each, optimizer in zip((model, its), optimizers, strict=True):
            x, y = batch(number, 0, 1)
            optimizer.zero_grad()
            mean_loss(each(x), y).backward()
            optimizer.step()
    for mine, other in zip(model.parameters(), its.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)


def resumed(replicas: int, folder: str) -> Weights:
    made = engine(replicas)
    start = 0
    if made.load_checkpoint(folder)[0] is not None:
        start = made.global_steps
    for number in range(start, STEPS):
        if number == 4 and not start:
            made.save_checkpoint(folder)
        step(made, number)
    found: Weights = made.gather()
    return found


@pytest.mark.exhaustive
def test_1_bit_sgd_saves_its_error_feedback(ranks: Any, tmp_path: Path) -> None:
    first, second = (ranks(2, resumed, 2, str(tmp_path))[0] for _ in range(2))
    torch.testing.assert_close(second, first, rtol=0, atol=0)


def test_1_bit_sgd_is_refused_with_shards() -> None:
    optimizer = {"type": "OneBitSGD", "params": {"lr": 0.1}}
    with pytest.raises(ConfigError, match="set stage 0"):
        read_config({"train_batch_size": 4, "optimizer": optimizer, "zero_optimization": {"stage": 1}})
