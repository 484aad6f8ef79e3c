"""``exact_rows``: log-probabilities recorded while answers are drawn are bitwise those of the trainer."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import triax
from triax import Grid
from triax.train.methods import Rollouts, exact_rows, grpo_loss

PROMPTS = [list(b"ab"), list(b"xyz "), list(b"q"), list(b"longer one")]
VOCAB = 127
# Widths that no vector unit divides.
LLAMA = triax.LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=20,
    intermediate_size=38,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    max_position_embeddings=24,
)
GPT = triax.GPTConfig(
    vocab_size=VOCAB, hidden_size=20, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=24
)


def engine_of(grid: Grid, config: Any, dtype: torch.dtype, **options: Any) -> Any:
    layers = triax.gpt_layers(config) if config is GPT else triax.llama_layers(config, **options)
    loss_fn = grpo_loss(grid, VOCAB, temperature=0.9, chunk_tokens=12)
    module = triax.PipelineModule(layers, grid=grid, loss_fn=loss_fn, seed=0, dtype=dtype)
    for parameter in {id(p): p for p in module.parameters()}.values():
        parameter.data *= 8 if parameter.dim() > 1 else 1
    sgd = partial(torch.optim.SGD, lr=0.1)
    return triax.Engine(module, optimizer=sgd, batch=triax.Batch(size=16, microbatch=4), zero=triax.Zero(stage=1))


def spread(completion_ids: Any, **_: Any) -> list[float]:
    return [float(len({*ids})) - ids[0] / 100 for ids in completion_ids]


def drawn(engine: Any, sampler: Any) -> tuple[Rollouts, Any]:
    rollouts = Rollouts(engine, sampler, spread, group=4, max_new_tokens=6, eos=ord("e"))
    return rollouts, rollouts(PROMPTS)


def errors(axes: dict[str, Any], name: str) -> list[tuple[float, float]]:
    """The mean ratio of the first step on new answers, and the largest error: without the context, and within it."""
    engine = engine_of(Grid(**axes, timeout=60), GPT if name == "gpt" else LLAMA, torch.float32)
    sampler = triax.init_inference(engine, max_batch=3)
    found = []
    rollouts, data = drawn(engine, sampler)
    engine.train_batch(iter(data))
    found.append((engine.metrics["ratio"], rollouts.largest_difference()))
    for _ in range(2):  # new weights, and other answers
        with exact_rows(sampler):
            rollouts, data = drawn(engine, sampler)
            engine.train_batch(iter(data))
        found.append((engine.metrics["ratio"], rollouts.largest_difference()))
    return found


@pytest.mark.parametrize(
    ("axes", "name"),
    [
        ({}, "gpt"),
        pytest.param({"pipe": 2, "tensor": 2}, "llama", marks=pytest.mark.exhaustive),
        pytest.param({}, "llama", marks=pytest.mark.exhaustive),
        pytest.param({"data": 2, "tensor": 2}, "gpt", marks=pytest.mark.exhaustive),
    ],
)
def test_exact_rows_makes_the_first_ratios_exactly_1(ranks: Any, axes: dict[str, int], name: str) -> None:
    for first, *within in ranks(4 if axes else 1, errors, axes, name):
        assert first[1] > 0  # without the context they differ
        assert within == [(1.0, 0.0)] * 2


def test_exact_rows_changes_no_loss_or_gradient() -> None:
    steps = []
    for exact in (False, True):
        engine = engine_of(Grid(), LLAMA, torch.float64)
        sampler = triax.init_inference(engine, max_batch=3)
        _, data = drawn(engine, sampler)
        data = [(ids, labels | {"old": labels["old"] - 0.1 * (labels["labels"] % 3)}) for ids, labels in data]
        if exact:
            with exact_rows(sampler):
                loss = engine.train_batch(iter(data))
        else:
            loss = engine.train_batch(iter(data))
        steps.append((loss, engine.gather("gradients")))
    (loss, gradients), (other, others) = steps
    assert abs(loss.item()) > 0.01 and other.item() == pytest.approx(loss.item(), abs=1e-10)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=0, atol=1e-10, msg=name)


def in_parts() -> str:
    engine = engine_of(Grid(context=2, timeout=60), LLAMA, torch.float32, attention="ring")
    sampler = triax.init_inference(engine)
    with pytest.raises(ValueError, match="exact_rows does not cover") as error, exact_rows(sampler):
        pass
    return str(error.value)


def test_exact_rows_refuses_a_context_axis(ranks: Any) -> None:
    said = "exact_rows does not cover context=2, whose ranks add in another order. Leave the context out."
    assert ranks(2, in_parts) == [said] * 2
