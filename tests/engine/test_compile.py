"""Compiled layers: gradients and steps of the uncompiled engine and of one process, and graphs that do run.

The backend is aot_eager, which traces and differentiates graphs as inductor does, and compiles no kernels.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from module_training import CLIP, net
from module_training import microbatch as module_microbatch
from torch import Tensor, nn

import triax
from triax import Grid, PipelineModule
from triax.grid.errors import ConfigError
from triax.models.gpt import GPTConfig, GPTLoss, gpt_layers
from triax.models.mixtral import MixtralConfig, mixtral_layers

ON = {"enabled": True, "backend": "aot_eager"}
VOCABULARY, LENGTH, SAMPLES, STEPS = 24, 8, 8, 2
# Sizes of the axes that are not 1, and keys of the configuration; "model" and "chunks" are arguments of the model.
Case = dict[str, Any]
CASES: dict[str, Case] = {
    "1f1b": {"pipe": 2},
    "zb-v": {"pipe": 2, "pipeline": {"schedule": "zb-v"}},
    "zb-h1, recomputed, stage 2": {
        "pipe": 2,
        "data": 2,
        "pipeline": {"schedule": "zb-h1"},
        "activation_checkpointing": {"interval": 1},
        "zero_optimization": {"stage": 2},
    },
    "interleaved": {"pipe": 2, "pipeline": {"schedule": "interleaved"}},
    "stage 0": {"data": 2},
    "stage 1": {"data": 2, "zero_optimization": {"stage": 1}},
    "stage 2": {"data": 2, "zero_optimization": {"stage": 2}},
    "stage 3": {"data": 2, "zero_optimization": {"stage": 3}},
    "stage 3, pipe": {"pipe": 2, "data": 2, "zero_optimization": {"stage": 3}},
    "stage 3, recomputed": {
        "data": 2,
        "zero_optimization": {"stage": 3},
        "activation_checkpointing": {"interval": 2},
        "dropout": 0.2,
    },
    "offload": {"data": 2, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
    "tensor": {"tensor": 2},
    "tensor, zb-v": {"pipe": 2, "tensor": 2, "pipeline": {"schedule": "zb-v"}},
    "sequence": {"tensor": 2, "sequence_parallel": True, "dropout": 0.2},
    "sequence, recomputed": {"tensor": 2, "sequence_parallel": True, "activation_checkpointing": {"interval": 1}},
    "context": {"context": 2},
    "experts": {"data": 2, "expert": 2, "model": "mixtral"},
    "dropout": {"dropout": 0.2},
}
AXES = ("pipe", "data", "context", "tensor", "expert")
DEFAULT = "stage 3, recomputed"


def data(grid: Grid) -> Iterator[tuple[Tensor, Tensor]]:
    generator, share = torch.Generator().manual_seed(1), SAMPLES // grid.data.size
    while True:
        text = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
        for part in text[grid.data.rank * share : (grid.data.rank + 1) * share].split(2):
            yield part[:, :-1], part[:, 1:]


def made(case: Case, compiled: Any = None, sizes: Any = None) -> triax.PipelineEngine:
    """An engine of a case; ``sizes`` are the axes of another grid."""
    case = dict(case)
    axes = {axis: case.pop(axis, 1) for axis in AXES}
    grid = Grid(**(axes if sizes is None else sizes))
    options = {"sequence_parallel": case.pop("sequence_parallel", False)}
    common: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2}
    common |= {"num_attention_heads": 2, "dropout": case.pop("dropout", 0.0)}
    if case.pop("model", "gpt") == "gpt":
        layers = gpt_layers(GPTConfig(**common, max_position_embeddings=LENGTH), **options)
    else:
        more = {"num_key_value_heads": 2, "intermediate_size": 16, "num_local_experts": 2, "num_experts_per_tok": 2}
        layers = mixtral_layers(MixtralConfig(**common, **more), **options)
    loss = GPTLoss(grid, vocab_size=VOCABULARY)
    model = PipelineModule(layers, grid=grid, loss_fn=loss, seed=3, dtype=torch.float64)
    config = {
        "train_batch_size": SAMPLES,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "seed": 5,
        **({} if sizes else case),
    }
    return triax.initialize(model=model, config=config | ({} if compiled is None else {"compile": compiled}))[0]  # type: ignore[return-value]


def values(engine: triax.PipelineEngine) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor], Any]:
    """Losses, first gradients, last weights, and bytes sent."""
    batches, losses, gradients = data(engine.grid), [], {}
    for _ in range(STEPS):
        losses.append(engine.train_batch(batches).item())
        gradients = gradients or {k: v.clone() for k, v in engine.gather("gradients").items()}
    return losses, gradients, engine.gather(), engine.traffic_report()["sent"]


def alike(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)


def compared(case: Case) -> tuple[Any, ...]:
    """On a rank: a case compiled and not; its differences, and the graphs."""
    import torch._dynamo

    torch._dynamo.reset()  # the process has run other tests
    losses, gradients, weights, sent = values(made(case))
    engine = made(case, ON)
    found = values(engine)
    assert found[0] == pytest.approx(losses, abs=1e-12)
    assert found[3] == sent
    assert alike(found[1], gradients) < 1e-12
    assert alike(found[2], weights) < 1e-10
    counts = engine.compilation
    assert counts is not None and engine.is_compiled
    ran = counts.runs
    evaluated = engine.eval_batch(data(engine.grid)).item()  # runs no graph
    assert counts.runs == ran
    return losses, gradients, weights, evaluated, (len(counts.layers), counts.graphs, counts.runs)


def check(ranks: Any, case: Case, logged: Any = None) -> list[tuple[int, int, int]]:
    size = 1
    for axis in AXES[:-1]:
        size *= case.get(axis, 1)
    results = ranks(size, compared, case, timeout=180)
    whole = dict.fromkeys(AXES, 1)
    losses, gradients, weights, _ = values(made(case, sizes=whole))
    for result in results:
        assert result[0] == pytest.approx(losses, abs=1e-10)
        assert alike(result[1], gradients) < 1e-10
        assert alike(result[2], weights) < 1e-10
    return [result[4] for result in results]


def test_compiled_layers_have_the_gradients_of_uncompiled_ones(ranks: Any) -> None:
    for layers, graphs, runs in check(ranks, CASES[DEFAULT]):
        assert layers == 5  # embedding, positions, 2 blocks, norm; the head is the embedding
        assert layers <= graphs + 1 <= 3 * layers  # the two blocks share their graphs
        assert runs > layers * STEPS * 2  # the forward pass and the recomputation


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_compiled_layers_on_every_grid(ranks: Any, name: str) -> None:
    for layers, graphs, runs in check(ranks, CASES[name]):
        assert graphs >= layers - 1 and runs >= layers * STEPS
