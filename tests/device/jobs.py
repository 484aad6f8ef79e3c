"""Training jobs that run on the CPU and on a device: a GPT and a plain module, with the values of each step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import triax
from triax.models.gpt import GPTConfig, GPTLoss, gpt_layers

from support.differences import largest

VOCABULARY, LENGTH, SAMPLES, STEPS = 61, 16, 8, 3
CONFIG: dict[str, Any] = {
    "train_batch_size": SAMPLES,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}},
    "seed": 5,
}
# What the engine's dtypes are called in the configuration, and the rounding of one operation.
DTYPES: dict[str, tuple[dict[str, Any], torch.dtype, float]] = {
    "float64": ({}, torch.float64, 2.0**-52),
    "fp32": ({}, torch.float32, 2.0**-23),
    "bf16": ({"bf16": {"enabled": True}}, torch.float32, 2.0**-8),
    "fp16": ({"fp16": {"enabled": True, "initial_scale_power": 8}}, torch.float32, 2.0**-11),
}


class Trained(NamedTuple):
    """Values of a job, on the CPU."""

    losses: list[float]
    norms: list[float]
    initial: dict[str, Tensor]
    gradients: dict[str, Tensor]  # of the first step
    weights: dict[str, Tensor]  # after the last step


def gpt_engine(grid: triax.Grid, dtype: torch.dtype = torch.float32, *, dropout: float = 0.0, **config: Any) -> Any:
    """A GPT of four blocks on a grid."""
    shape = GPTConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        dropout=dropout,
    )
    loss = GPTLoss(grid, vocab_size=VOCABULARY)
    chunks = config.pop("chunks", 1)
    model = triax.PipelineModule(gpt_layers(shape), grid=grid, loss_fn=loss, seed=7, dtype=dtype, chunks=chunks)
    engine = triax.initialize(model=model, config={**CONFIG, **config})[0]
    assert isinstance(engine, triax.PipelineEngine)
    return engine


def microbatches(grid: triax.Grid) -> Iterator[tuple[Tensor, Tensor]]:
    """Random tokens, in microbatches of two samples."""
    generator, share = torch.Generator().manual_seed(1), SAMPLES // grid.data.size
    while True:
        text = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
        for part in text[grid.data.rank * share : (grid.data.rank + 1) * share].split(2):
            yield part[:, :-1], part[:, 1:]


def train_gpt(grid: triax.Grid, dtype: str = "fp32", steps: int = STEPS, **config: Any) -> Trained:
    """Train a GPT for a few steps."""
    options, weights, _ = DTYPES[dtype]
    engine, data = gpt_engine(grid, weights, **options, **config), microbatches(grid)
    initial, losses, norms = engine.gather(), [], []
    gradients: dict[str, Tensor] = {}
    for _ in range(steps):
        losses.append(engine.train_batch(data).item())
        norms.append(engine.get_global_grad_norm() or 0.0)
        gradients = gradients or on_cpu(engine.gather("gradients"))
    return Trained(losses, norms, on_cpu(initial), gradients, on_cpu(engine.gather()))


def on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of tensors on the CPU."""
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def furthest(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest relative error of a tensor, where a tensor's norm counts as at least 1 % of all tensors'."""
    assert found.keys() == wanted.keys()
    norms = {name: float(tensor.double().norm()) for name, tensor in wanted.items()}
    least = 1e-2 * math.hypot(*norms.values())
    away = {name: float((found[name].double() - tensor.double()).norm()) for name, tensor in wanted.items()}
    return largest(away[name] / max(norms[name], least) for name in wanted)
