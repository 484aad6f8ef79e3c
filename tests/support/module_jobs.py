"""Engines and plain loops that several tests of the engine of plain modules use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from triax import initialize

from support.module_training import CLIP, OPTIMIZERS, STEPS, config, groups, microbatch, net

Trace = list[tuple[dict[str, Tensor], dict[str, Tensor], float]]  # of each step: gradients, weights, norm


def plain(kind: str, replicas: int, accumulation: int) -> Trace:
    """Reference run: one process, torch's own optimizer, and the mean of all microbatches' losses."""
    model = net()
    cls, options = OPTIMIZERS[kind]
    optimizer = cls(groups(model), **options)
    trace = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for index in range(accumulation):
            for replica in range(replicas):
                x, y = microbatch(step, index, replica)
                ((model(x, times=0.9) - y).square().mean() / replicas / accumulation).backward()
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        norm = nn.utils.clip_grad_norm_(trained.values(), CLIP).item()
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in trained.items()}
        optimizer.step()
        trace.append((gradients, {n: p.detach().clone() for n, p in model.named_parameters()}, norm))
    return trace


def one(settings: dict[str, Any] | None = None, **others: Any) -> Any:
    others.setdefault("model", net())
    return initialize(config=config() if settings is None else settings, **others)[0]


def loss_of(engine: Any, step: int = 0) -> Tensor:
    x, y = microbatch(step, 0, 0)
    loss: Tensor = (engine(x) - y).square().mean()
    return loss


def weights(engine: Any) -> list[Tensor]:
    return [p.detach().clone() for p in engine.module.parameters()]
