"""Keys of the context and the expert axis: sequence_parallel_size, expert_parallel_size, moe and sparse_attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import triax
from triax.base.errors import ConfigError
from triax.models.gpt import GPTConfig, GPTLoss, gpt_layers

from support import reference
from support.rank_checks import float64_by_default

SIZES = GPTConfig(37, 16, 16, 2, 4)
SECTION = {"mode": "fixed", "block": 2, "num_local_blocks": 2, "attention": "unidirectional"}


def make(grid: triax.Grid, layers: Any = None, **config: Any) -> Any:
    module = triax.PipelineModule(layers or gpt_layers(SIZES), grid=grid, loss_fn=GPTLoss(grid, 37), seed=3)
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}} | config
    return triax.initialize(model=module, config=config)[0]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            {"sequence_parallel_size": 2},
            r"sequence_parallel_size is 2, but .* 1 on its context axis.*Grid\(context=2\)",
        ),
        ({"expert_parallel_size": 2}, r"expert_parallel_size is 2.*Grid\(expert=2\)"),
        ({"moe": {"ep_size": 4}}, r"moe.ep_size is 4.*Grid\(expert=4\)"),
        ({"moe": {"num_experts": 4}}, r"MoE\(hidden, experts, top_k\) in the model"),
        ({"sparse_attention": {"mode": "dense", "num_random_blocks": 2}}, "which the mode dense does not have"),
        ({"sparse_attention": {"mode": "fixed", "num_global_blocks": 3}}, "does not divide num_local_blocks"),
        ({"sparse_attention": {"mode": "wide"}}, "sparse_attention.mode"),
    ],
)
def test_parallel_keys_that_do_not_fit_are_refused(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make(triax.Grid(), **config)


def test_a_model_without_attention_is_refused() -> None:
    layers = [triax.LayerSpec(torch.nn.Linear, 4, 4)]
    with pytest.raises(ConfigError, match=r"no layer of the model has an attribute sparsity: call triax\.context"):
        make(triax.Grid(), layers, sparse_attention={"mode": "dense"})


@float64_by_default()
def step(context: int, tensor: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    grid = triax.Grid(context=context, tensor=tensor)
    engine = make(grid, sparse_attention=SECTION, sequence_parallel_size=context, gradient_accumulation_steps=2)
    before = engine.gather()
    ids = torch.randint(37, (2, 16), generator=torch.Generator().manual_seed(1))
    engine.train_batch(iter([(row[None], row[None].roll(-1, 1)) for row in ids]))
    return before, engine.gather("gradients")


def test_sparse_attention_equals_dense_attention_with_a_mask(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask: blocks of 2 in windows of 4 tokens, and the last block of each earlier window."""
    seen = torch.zeros(16, 16, dtype=torch.bool)
    for i in range(16):
        for j in range(i + 1):
            seen[i, j] = i // 4 == j // 4 or j % 4 >= 2
    plain = reference.visible
    monkeypatch.setattr(reference, "visible", lambda ids, documents: (seen[None, None], plain(ids, documents)[1]))
    ids = torch.randint(37, (2, 16), generator=torch.Generator().manual_seed(1))
    for context, tensor in ((1, 1), (2, 1), (1, 2)):
        before, found = step(1, 1) if context * tensor == 1 else ranks(2, step, context, tensor)[0]
        weights = {name: value.clone().requires_grad_() for name, value in before.items()}
        logits = reference.gpt_logits(weights, ids, 2, 4)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten())
        loss.backward()
        for name, value in weights.items():
            torch.testing.assert_close(
                found[name], value.grad, rtol=1e-10, atol=1e-12, msg=f"{name} on {context} x {tensor}"
            )
