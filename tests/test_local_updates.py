"""Replicas that step on their own and meet: against plain loops of N replicas in one process, in float64."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import gpt_logits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import triax
from triax import Grid, initialize
from triax.engine.config import ConfigError, read_config
from triax.models.gpt import GPTConfig, GPTLoss, gpt

VOCABULARY, LENGTH, SAMPLES, STEPS = 13, 5, 48, 7
SIZES = GPTConfig(VOCABULARY, LENGTH, 8, 2, 2)
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
SGD = {"type": "SGD", "params": {"lr": 0.2, "momentum": 0.9}}
OUTER = {"outer_lr": 0.6, "outer_momentum": 0.8}
Weights = dict[str, Tensor]


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
    **more: Any,
) -> Any:
    grid = Grid(*shape, timeout=30)
    sizes = GPTConfig(VOCABULARY, LENGTH, 8, 2, 2, dropout=dropout)
    loss = GPTLoss(grid, vocab_size=VOCABULARY)
    model = triax.PipelineModule(gpt(sizes), grid=grid, loss_fn=loss, seed=3, dtype=dtype)
    config = settings(local, optimizer, shape[1], **more)
    return initialize(model=model, config=config, training_data=dataset())[0]


def trained(shape: tuple[int, int, int], local: dict[str, Any] | None, optimizer: dict[str, Any], **more: Any) -> Any:
    """Of each rank: the weights before, and after each step its replica's weights and loss; and the accounts."""
    engine = make(shape, local, optimizer, **more)
    before, trace = engine.gather(), []
    for _ in range(STEPS):
        loss = engine.train_batch().item()
        trace.append((engine.gather(), loss))
    return engine.grid.data.rank, before, trace, engine.traffic_report()


# --------------------------------------------------------------------------------------------------- the references


def batches(replicas: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Of each step, each replica's part of the global batch: read from a plain run's loader on one process."""
    loader = triax.engine.data.make_loader(dataset(), 4 * replicas, 4, 0, 1, seed=0)
    found: list[list[tuple[Tensor, Tensor]]] = []
    parts: Iterator[Any] = (batch for _ in range(9) for batch in loader)
    while len(found) < STEPS:
        found.append([tuple(next(parts)) for _ in range(replicas)])  # type: ignore[misc]
    return found


def inner_step(weights: Weights, optimizer: torch.optim.Optimizer, inputs: Tensor, labels: Tensor) -> float:
    optimizer.zero_grad(set_to_none=False)
    loss = F.cross_entropy(gpt_logits(weights, inputs, 2, 2).flatten(0, 1), labels.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(weights.values(), 0.5)
    optimizer.step()
    return loss.item()


def reference(before: Weights, replicas: int, local: dict[str, Any], optimizer: dict[str, Any]) -> Any:
    """N models, N optimizers, and every H steps what the papers say. Of each step the replicas' weights and losses."""
    models = [{name: w.clone().requires_grad_() for name, w in before.items()} for _ in range(replicas)]
    kind = getattr(torch.optim, optimizer["type"])
    optimizers = [kind(model.values(), **optimizer["params"]) for model in models]
    common = {name: w.clone() for name, w in before.items()}
    velocity = {name: torch.zeros_like(w) for name, w in before.items()}
    trace = []
    for step, parts in enumerate(batches(replicas)):
        losses = [inner_step(m, o, *part) for m, o, part in zip(models, optimizers, parts, strict=True)]
        if (step + 1) % local["every"] == 0:
            for name, weight in common.items():
                mean = sum(model[name].detach() for model in models) / replicas
                if local["type"] == "local_sgd":
                    weight.copy_(mean)
                else:
                    gradient = weight - mean
                    velocity[name] = local["outer_momentum"] * velocity[name] + gradient
                    weight -= local["outer_lr"] * (gradient + local["outer_momentum"] * velocity[name])
                for model in models:
                    model[name].data.copy_(weight)
            if local.get("average_optimizer"):
                for each in zip(*(model.values() for model in models), strict=True):
                    states = [o.state[w] for o, w in zip(optimizers, each, strict=True)]
                    for key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
                        if key in states[0]:
                            mean = sum(state[key] for state in states) / replicas
                            for state in states:
                                state[key].copy_(mean)
        trace.append(([{n: w.detach().clone() for n, w in model.items()} for model in models], losses))
    return trace


def same(one: Weights, other: Weights) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


CASES: list[tuple[tuple[int, int, int], dict[str, Any], dict[str, Any]]] = [
    ((1, 2, 1), {"type": "local_sgd", "every": 2}, SGD),
    ((1, 2, 1), {"type": "local_sgd", "every": 2, "average_optimizer": True}, ADAMW),
    ((1, 4, 1), {"type": "diloco", "every": 2, **OUTER}, ADAMW),
    ((2, 2, 1), {"type": "diloco", "every": 2, **OUTER}, ADAMW),
    ((1, 2, 2), {"type": "diloco", "every": 2, "average_optimizer": True, **OUTER}, SGD),
    ((2, 2, 1), {"type": "local_sgd", "every": 1}, ADAMW),
    ((1, 2, 2), {"type": "local_sgd", "every": 3}, ADAMW),
    ((1, 4, 1), {"type": "async_diloco", "every": 2, "max_staleness": 0, **OUTER}, ADAMW),
    ((2, 2, 1), {"type": "async_diloco", "every": 2, "max_staleness": 0, **OUTER}, ADAMW),
    ((1, 2, 2), {"type": "async_diloco", "every": 3, "max_staleness": 0, **OUTER}, SGD),
]


@pytest.mark.parametrize(("shape", "local", "optimizer"), CASES)
def test_replicas_step_and_meet_as_the_papers_say(
    ranks: Any, shape: tuple[int, int, int], local: dict[str, Any], optimizer: dict[str, Any]
) -> None:
    """After every step each replica's weights and loss; between meetings they differ, at one they are the same bits."""
    found = ranks(shape[0] * shape[1] * shape[2], trained, shape, local, optimizer)
    expected = reference(found[0][1], shape[1], local, optimizer)
    first: dict[int, Weights] = {}
    for replica, before, trace, _ in found:
        same(before, found[0][1])
        for step, (weights, loss) in enumerate(trace):
            models, losses = expected[step]
            same(weights, models[replica])
            assert loss == pytest.approx(losses[replica], rel=1e-10)
            others = first.setdefault(step, weights)
            equal = all(torch.equal(weights[name], others[name]) for name in weights)
            assert equal == (replica == found[0][0] or (step + 1) % local["every"] == 0)
