"""Gradient compression by its papers, in numpy and torch, and engines that compress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, PipelineModule
from triax.tensor_parallel import ColumnParallelLinear, RowParallelLinear

WIDTH, STEPS, SAMPLES, LR = 6, 12, 8, 0.2
Gradients = dict[str, Tensor]
Reference = Callable[[list[Gradients]], Gradients]


class Part(nn.Module):
    """Two linear layers around a tanh, sharded over the tensor axis, and a norm, which is not."""

    def __init__(self, *, grid: Grid) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(WIDTH, 4 * WIDTH, grid=grid)
        self.down = RowParallelLinear(4 * WIDTH, WIDTH, grid=grid)
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)  # whole on every tensor rank, and a matrix

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.mix(self.norm(self.down(torch.tanh(self.up(x)))))
        return y


def batches(replica: int, replicas: int) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor]]]:
    """Microbatches of 2 samples, each with a weight: replicas have unequal shares of the batch's weight."""
    generator = torch.Generator().manual_seed(3)
    share = SAMPLES // replicas
    while True:
        x, y = torch.randn(2, SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
        weight = torch.randint(1, 9, (SAMPLES, 1), generator=generator).double()
        mine = slice(replica * share, (replica + 1) * share)
        yield from zip(x[mine].split(2), zip(y[mine].split(2), weight[mine].split(2), strict=True), strict=True)


def loss_fn(outputs: Tensor, labels: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    y, weight = labels
    return ((outputs - y).square() * weight).sum() / WIDTH, weight.sum()


def engine(grid: Grid, options: dict[str, Any]) -> triax.PipelineEngine:
    layers = [LayerSpec(Part) for _ in range(2)]
    model = PipelineModule(layers, grid=grid, loss_fn=loss_fn, dtype=torch.float64, partition="uniform")
    config = {
        "train_batch_size": SAMPLES,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_optimization": {"stage": 0, "reduce_bucket_size": 200},
        **options,
    }
    made, *_ = triax.initialize(model=model, config=config)
    return made


Trace = list[tuple[Gradients, Gradients]]  # of each step: gradients, weights


def plain(start: Gradients, replicas: int, exchange: Reference, steps: int = STEPS) -> Trace:
    """SGD in one process: each replica's share of the mean gradient, combined by the paper's equations."""
    model = nn.Sequential(Part(grid=Grid()), Part(grid=Grid())).double()
    names = [f"layers.{name}" for name, _ in model.named_parameters()]
    parameters = list(model.parameters())
    with torch.no_grad():
        for name, parameter in zip(names, parameters, strict=True):
            parameter.copy_(start[name])
    data, trace = batches(0, 1), []
    for _ in range(steps):
        batch = [next(data) for _ in range(SAMPLES // 2)]
        whole = sum(float(weight.sum()) for _, (_, weight) in batch)
        share = len(batch) // replicas
        local = []
        for replica in range(replicas):
            mine = batch[replica * share : (replica + 1) * share]
            loss = torch.stack([loss_fn(model(x), labels)[0] for x, labels in mine]).sum()
            found = torch.autograd.grad(loss / whole, parameters)
            local.append(dict(zip(names, (g.clone() for g in found), strict=True)))
        gradients = exchange(local)
        with torch.no_grad():
            for name, parameter in zip(names, parameters, strict=True):
                parameter.sub_(LR * gradients[name])
        trace.append((gradients, {n: p.detach().clone() for n, p in zip(names, parameters, strict=True)}))
    return trace


def assert_same(found: Trace, wanted: Trace) -> None:
    for step, ((gradients, weights), (theirs, want)) in enumerate(zip(found, wanted, strict=True)):
        for mine, other, what in ((gradients, theirs, "gradient"), (weights, want, "weight")):
            for name, value in other.items():
                message = f"{what} of {name} after step {step + 1}: {{}}".format
                torch.testing.assert_close(mine[name], value, rtol=1e-10, atol=1e-12, msg=message)


TOPK = {"type": "topk", "ratio": 0.05}
FULL = {"type": "topk", "ratio": 0.03, "momentum": 0.7, "clip": 0.2, "warmup_steps": 6, "start_step": 2}
POWER = {"type": "powersgd", "rank": 1, "min_compression": 2.0}


def total(made: triax.PipelineEngine, grid: Grid) -> dict[str, dict[str, Tensor]]:
    """Sum of the residuals of all replicas: state -> parameter -> sum."""
    found: dict[str, dict[str, Tensor]] = {}
    exchange = made.data_axis.exchange
    assert exchange is not None
    for key, flats in exchange.state().items():
        for bucket, flat in zip([b for b in made.data_axis.buckets if b.trained], flats, strict=True):
            whole = flat.clone()
            grid.data.all_reduce(whole)
            for slot, member in zip(bucket.flat.slots, bucket.members, strict=True):
                if flat.numel():
                    found.setdefault(key, {})[member.layout.name] = whole[slot.start : slot.stop]
    return found
