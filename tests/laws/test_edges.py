"""Parameters that are frozen, unused, empty, shared, or in groups of their own, in every ZeRO stage."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, PipelineModule

WIDTH, SAMPLES, STEPS, LAYERS = 6, 4, 4, 6


class Block(nn.Module):
    """A residual block with all that an optimizer must get right; a sample's last feature says what it uses."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.rare, self.never = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.empty = nn.Parameter(torch.zeros(0, WIDTH))
        self.frozen = nn.Parameter(torch.full((WIDTH,), 1.5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        rare = int(x.detach()[0, -1] * 64)
        y = x + self.down(self.frozen * torch.tanh(self.up(x))) + self.down(x)  # `down` twice
        y = y + self.rare(y) if rare >> self.number & 1 else y
        return torch.cat([y[:, :-1], x[:, -1:]], dim=1)


def layers() -> list[Any]:
    return [LayerSpec(Block, number) for number in range(LAYERS)]


def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs[:, :-1] - labels[:, :-1]).square().mean()


def sample(step: int, index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + index)
    x, y = torch.randn(2, 1, WIDTH, generator=generator, dtype=torch.float64)
    # Some samples use one block's rare parameters, some another's; those of the last step and of block 0 none do.
    x[0, -1] = (0b111100, 0b000010, 0b100100, 0)[index] / 64 if step < STEPS - 1 else 0
    return x, y


def grouped(named: list[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    return [
        {"params": [p for n, p in named if "down" in n], "lr": 0.02, "weight_decay": 0.3},
        {"params": [p for n, p in named if "down" not in n], "weight_decay": 0.01},
    ]


Trace = list[tuple[dict[str, Tensor], dict[str, Tensor]]]


def trained(sizes: tuple[int, int, int], stage: int, schedule: str, chunks: int) -> Trace:
    grid = Grid(*sizes, timeout=60)
    model = PipelineModule(
        layers(),
        grid=grid,
        loss_fn=loss_fn,
        dtype=torch.float64,
        partition="uniform",
        chunks=chunks,
        placement="v" if schedule == "zb-v" else "loop",
    )
    engine, *_ = triax.initialize(
        model=model,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
        model_parameters=grouped([(p.layout.name, p.parameter) for p in model.local_parameters()]),
        config={
            "train_batch_size": SAMPLES,
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 300},
            "pipeline": {"schedule": schedule},
        },
    )
    share = SAMPLES // grid.data.size

    def data() -> Iterator[tuple[Tensor, Tensor]]:
        for step in range(STEPS):
            for index in range(grid.data.rank * share, (grid.data.rank + 1) * share):
                yield sample(step, index)

    source, trace = data(), []
    for step in range(STEPS):
        if step == 2:  # from here on frozen: decay and momentum leave it alone
            for placed in model.local_parameters():
                if placed.layout.name == "layers.1.up.weight":
                    placed.parameter.requires_grad_(False)
        engine.train_batch(source)
        trace.append((engine.gather("gradients"), engine.gather()))
    return trace


def plain() -> Trace:
    model = PipelineModule(layers(), dtype=torch.float64, partition="uniform")
    named = [(p.layout.name, p.parameter) for p in model.local_parameters()]
    optimizer = torch.optim.SGD(grouped(named), lr=0.05, momentum=0.9)
    trained = [(n, p) for n, p in named if p.requires_grad]
    trace = []
    for step in range(STEPS):
        if step == 2:
            dict(named)["layers.1.up.weight"].requires_grad_(False)
        optimizer.zero_grad()
        for index in range(SAMPLES):
            x, y = sample(step, index)
            (loss_fn(model(x), y) / SAMPLES).backward()
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in trained}
        optimizer.step()
        trace.append((gradients, {n: p.detach().clone() for n, p in named}))
    return trace


@pytest.mark.parametrize(
    ("sizes", "schedule", "chunks", "stages"),
    [
        ((1, 1, 1), "1f1b", 1, (0, 1, 2, 3)),
        ((1, 4, 1), "gpipe", 1, (1,)),
        ((2, 2, 1), "zb-v", 2, (3,)),
        pytest.param((1, 4, 1), "gpipe", 1, (0, 2, 3), marks=pytest.mark.exhaustive),
        pytest.param((2, 2, 1), "zb-v", 2, (0, 1, 2), marks=pytest.mark.exhaustive),
    ],
)
def test_every_parameter_is_stepped_as_in_torch(
    ranks: Any, sizes: tuple[int, int, int], schedule: str, chunks: int, stages: tuple[int, ...]
) -> None:
    wanted = plain()
    (_, before), (_, after) = wanted[-2:]
    still = {name for name in after if torch.equal(before[name], after[name])}
    assert {n.split(".", 2)[2] for n in still} >= {"rare.weight", "never.bias", "empty", "frozen", "up.weight"}
    for stage in stages:
        for found in ranks(sizes[0] * sizes[1] * sizes[2], trained, sizes, stage, schedule, chunks):
            for (gradients, weights), (want_gradients, want_weights) in zip(found, wanted, strict=True):
                torch.testing.assert_close(gradients, want_gradients, rtol=1e-10, atol=1e-13)
                torch.testing.assert_close(weights, want_weights, rtol=1e-10, atol=1e-13)


def abandoned(stage: int) -> int:
    """Number of grids that are still alive after the last reference to their engines is gone."""
    grids = []
    for _ in range(2):
        grid = Grid(pipe=2, data=2, timeout=60)
        config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        model = PipelineModule(layers(), grid=grid, loss_fn=loss_fn, dtype=torch.float64)
        engine, *_ = triax.initialize(model=model, config={**config, "zero_optimization": {"stage": stage}})
        engine.train_batch(iter([sample(0, 0)]))
        grids.append(weakref.ref(grid))
    dist.destroy_process_group()
    del grid, model, engine
    gc.collect()
    return sum(reference() is not None for reference in grids)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_unreferenced_engines_free_their_grids(ranks: Any, stage: int) -> None:
    """Hooks of parameters kept the engine alive, unseen by the garbage collector: sockets and threads added up."""
    assert ranks(4, abandoned, stage) == [0] * 4
