"""Pipelines and plain modules whose replicas step alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import triax
from triax import Grid, initialize
from triax.models.gpt import GPTConfig, GPTLoss, gpt_layers

VOCABULARY, LENGTH, SAMPLES, STEPS = 13, 5, 48, 7
ADAMW: dict[str, Any] = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
SGD: dict[str, Any] = {"type": "SGD", "params": {"lr": 0.2, "momentum": 0.9}}
OUTER = {"outer_lr": 0.6, "outer_momentum": 0.8}
Weights = dict[str, Tensor]
Case = tuple[tuple[int, int, int], dict[str, Any], dict[str, Any]]  # grid, local_updates, optimizer


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
    labels = text[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100  # batches of unlike weight
    return TensorDataset(text[:, :-1], labels)


def settings(local: dict[str, Any] | None, optimizer: dict[str, Any], replicas: int, **more: Any) -> dict[str, Any]:
    found = {
        "train_batch_size": 4 * replicas,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "optimizer": optimizer,
        "zero_optimization": {"reduce_bucket_size": 300},
        **more,
    }
    return found if local is None else {**found, "local_updates": local}


def make(
    shape: tuple[int, int, int],
    local: dict[str, Any] | None,
    optimizer: dict[str, Any],
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float64,
    context: int = 1,
    **more: Any,
) -> Any:
    grid = Grid(*shape, context=context, timeout=30)
    sizes = GPTConfig(VOCABULARY, LENGTH, 8, 2, 2, dropout=dropout)
    loss = GPTLoss(grid, vocab_size=VOCABULARY)
    model = triax.PipelineModule(gpt_layers(sizes), grid=grid, loss_fn=loss, seed=3, dtype=dtype)
    config = settings(local, optimizer, shape[1], **more)
    return initialize(model=model, config=config, training_data=dataset())[0]


def same(one: Weights, other: Weights) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-10, atol=1e-10, msg=name)


def network() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3), nn.BatchNorm1d(3)).double()


def microbatch(step: int, index: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * index + replica)
    x, y = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64)
    return x, y[:, :3]


def module_engine(local: dict[str, Any] | None, optimizer: dict[str, Any] = SGD, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 5,
        "gradient_accumulation_steps": 2,
        "optimizer": optimizer,
        **({} if local is None else {"local_updates": local}),
        **more,
    }
    torch.manual_seed(torch.distributed.get_rank())  # weights that differ, until they are made the same
    model = network()
    if torch.distributed.get_rank():
        nn.init.normal_(next(model.parameters()))
    return initialize(model=model, config=config, grid=Grid(timeout=20))[0]


def module_step(engine: Any, step: int, factor: float = 1.0) -> None:
    for index in range(2):
        x, y = microbatch(step, index, engine.grid.data.rank)
        engine.backward(factor * (engine(x) - y).square().mean())
        engine.step()


def weights_of(engine: Any) -> Weights:
    return {name: p.detach().clone() for name, p in engine.module.named_parameters()}
