"""Engines and plain loops that several tests of the engine of plain modules use."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

from torch import Tensor

from triax import initialize

from support.module_training import CLIP, OPTIMIZERS, STEPS, config, groups, microbatch, net
from support.training import train_plain

Trace = list[tuple[dict[str, Tensor], dict[str, Tensor], float]]  # of each step: gradients, weights, norm


def plain(kind: str, replicas: int, accumulation: int) -> Trace:
    """Reference run: one process, torch's own optimizer, and the mean of all microbatches' losses."""
    model, (cls, options) = net(), OPTIMIZERS[kind]
    places = list(itertools.product(range(accumulation), range(replicas)))
    batches = [[microbatch(step, *place) for place in places] for step in range(STEPS)]
    forward = partial(model, times=0.9)
    steps = train_plain(model, partial(cls, **options), batches, clip=CLIP, parameters=groups(model), forward=forward)
    return [(step.gradients, step.weights, step.norm) for step in steps]


def one(settings: dict[str, Any] | None = None, **others: Any) -> Any:
    others.setdefault("model", net())
    return initialize(config=config() if settings is None else settings, **others)[0]


def loss_of(engine: Any, step: int = 0) -> Tensor:
    x, y = microbatch(step, 0, 0)
    loss: Tensor = (engine(x) - y).square().mean()
    return loss


def weights(engine: Any) -> list[Tensor]:
    return [p.detach().clone() for p in engine.module.parameters()]
