"""The GPT: its sizes, its initial values, its math against torch's own transformer, and its invariance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triax.grid import Grid
from triax.grid.layout import Layout
from triax.models.gpt import GPTConfig, GPTLoss, gpt_layers
from triax.models.layers import TokenEmbedding
from triax.pipe.module import PipelineModule
from triax.pipe.spec import TiedLayerSpec

from support.sweeps import some
from support.toys import error_text, token_batch

# An uneven vocabulary, and a sequence shorter than the positions.
CONFIG = GPTConfig(
    vocab_size=53, max_position_embeddings=16, hidden_size=24, num_hidden_layers=2, num_attention_heads=4
)
# 2 and 4 ranks divide neither the heads nor the hidden width.
UNEVEN = GPTConfig(
    vocab_size=53, max_position_embeddings=16, hidden_size=25, num_hidden_layers=2, num_attention_heads=5, mlp_ratio=3
)


DOCUMENTS = torch.tensor([[0] * 12, [0] * 3 + [1] * 4 + [2] * 5, [7] * 11 + [8]])


def build(config: GPTConfig, grid: Grid) -> list[nn.Module]:
    """Build the layers in order, as a PipelineModule does; a tie's second spec gives the first one's layer."""
    torch.manual_seed(11)
    built: list[nn.Module] = []
    ties: dict[str, nn.Module] = {}
    for spec in gpt_layers(config):
        key = spec.key if isinstance(spec, TiedLayerSpec) else ""
        layer = ties.get(key) or spec.build(grid)
        if key:
            ties[key] = layer
        built.append(layer.double())
    return built


def run(layers: list[nn.Module], config: GPTConfig, x: Any) -> Tensor:
    for spec, layer in zip(gpt_layers(config), layers, strict=True):
        forward = spec.forward_fn if isinstance(spec, TiedLayerSpec) else None
        x = forward(layer, x) if forward else layer(x)
    logits: Tensor = x
    return logits


def parameters(layers: list[nn.Module]) -> dict[str, nn.Parameter]:
    return dict(nn.ModuleList(layers).named_parameters())  # a tied one once


def batch(config: GPTConfig, rows: int = 3, length: int = 12) -> tuple[Tensor, Tensor]:
    return token_batch(config.vocab_size, rows, length)[:2]


def train_on_rank(size: int, cases: list[Case]) -> list[dict[str, Any]]:
    return [train_one(Grid(tensor=size), *case) for case in cases]


def train_one(grid: Grid, config: GPTConfig, smoothing: float, sequence_parallel: bool, packed: bool) -> dict[str, Any]:
    model = PipelineModule(gpt_layers(config, sequence_parallel), grid=grid, seed=11, dtype=torch.float64)
    inputs, labels = batch(config)
    logits = model((inputs, DOCUMENTS) if packed else inputs)
    total, weight = GPTLoss(grid, config.vocab_size, label_smoothing=smoothing)(logits, labels)
    (total / weight).backward()
    placed = {p.layout.name: p for p in model.local_parameters()}
    return {
        "loss": total.detach(),
        "weight": weight,
        "logits": logits.detach(),
        "weights": {name: p.parameter.detach() for name, p in placed.items()},
        "grads": {name: p.parameter.grad for name, p in placed.items()},
        "layouts": {name: p.layout for name, p in placed.items()},
    }


Case = tuple[GPTConfig, float, bool, bool]  # config, label smoothing, sequence parallel, packed
CASES: list[Case] = [
    (CONFIG, 0.0, False, False),
    (replace(CONFIG, tie_word_embeddings=False), 0.1, False, False),
    (replace(CONFIG, dropout=0.1), 0.0, False, True),
    (CONFIG, 0.1, True, False),
    (replace(CONFIG, tie_word_embeddings=False, dropout=0.1), 0.0, True, True),
    (UNEVEN, 0.0, False, False),
    (replace(UNEVEN, dropout=0.1), 0.0, True, False),
]


@pytest.mark.parametrize("size", some([2, 4], [1]))
def test_gpt_gradients_equal_those_of_one_process(ranks: Any, size: int) -> None:
    by_rank = ranks(size, train_on_rank, size, CASES)
    for (config, smoothing, _, packed), *found in zip(CASES, *by_rank, strict=True):
        alone = train_one(Grid(), config, smoothing, sequence_parallel=False, packed=packed)
        for rank in found:
            torch.testing.assert_close(rank["loss"], alone["loss"], rtol=1e-10, atol=0)
            assert int(rank["weight"]) == int(alone["weight"]) == 3 * 12 - 5
        for name, layout in found[0]["layouts"].items():
            assert torch.equal(layout.assemble([r["weights"][name] for r in found]), alone["weights"][name]), name
            grads = [r["grads"][name] for r in found]
            wholes = [layout.assemble(grads)] if layout.sharded else [sum(grads)] if layout.partial else grads
            for whole in wholes:
                torch.testing.assert_close(
                    whole, alone["grads"][name], rtol=1e-10, atol=1e-12, msg=f"{name}: {{}}".format
                )
        logits = Layout((3, 12, 53), shard_dim=2).assemble([r["logits"] for r in found])
        torch.testing.assert_close(logits, alone["logits"], rtol=1e-10, atol=1e-12)
        if config.dropout:
            without = train_one(Grid(), replace(config, dropout=0.0), smoothing, sequence_parallel=False, packed=packed)
            assert abs(float(alone["loss"] - without["loss"])) > 1e-6  # something was dropped


def test_gpt_treats_packed_documents_separately() -> None:
    """Logits and gradients: 5 + 1 + 6 tokens in one row, and then each in a row of its own."""
    loss = GPTLoss(Grid(), CONFIG.vocab_size)
    ids, labels = batch(CONFIG, rows=1)
    documents = torch.tensor([[3] * 5 + [4] + [8] * 6])
    packed, alone = (PipelineModule(gpt_layers(CONFIG), grid=Grid(), dtype=torch.float64) for _ in range(2))
    together = packed((ids, documents))
    loss(together, labels)[0].backward()
    for start, stop in ((0, 5), (5, 6), (6, 12)):
        logits = alone(ids[:, start:stop])
        torch.testing.assert_close(together[:, start:stop].detach(), logits.detach(), rtol=1e-10, atol=1e-12)
        loss(logits, labels[:, start:stop])[0].backward()
    for (name, a), b in zip(packed.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12, msg=f"{name}: {{}}".format)


def test_gpt_equals_torchs_transformer_encoder() -> None:
    """An independent implementation of the same model: pre-norm encoder layers under a causal mask."""
    layers = build(CONFIG, Grid())
    inputs, labels = batch(CONFIG)
    named = {name: p.detach() for name, p in parameters(layers).items()}
    x = F.embedding(inputs, named["0.weight"]) + named["1.weight"][: inputs.shape[1]]
    mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1], dtype=torch.float64)
    for i in range(2, 2 + CONFIG.num_hidden_layers):
        peer = nn.TransformerEncoderLayer(
            CONFIG.hidden_size,
            CONFIG.num_attention_heads,
            4 * CONFIG.hidden_size,
            dropout=0.0,
            activation=lambda h: F.gelu(h, approximate="tanh"),
            batch_first=True,
            norm_first=True,
            dtype=torch.float64,
        )
        renamed = {
            "self_attn.in_proj_": "attention.qkv.",
            "self_attn.out_proj.": "attention.out.",
            "linear1.": "mlp.up.",
            "linear2.": "mlp.down.",
            "norm1.": "norm1.",
            "norm2.": "norm2.",
        }
        state = {
            theirs + end: named[f"{i}.{ours}{end}"] for theirs, ours in renamed.items() for end in ("weight", "bias")
        }
        peer.load_state_dict(state)
        x = peer(x, src_mask=mask)
    x = F.layer_norm(x, (CONFIG.hidden_size,), eps=CONFIG.layer_norm_epsilon)
    expected = x @ named["0.weight"].T
    logits = run(layers, CONFIG, inputs)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-12)
    total, weight = GPTLoss(Grid(), CONFIG.vocab_size)(logits, labels)
    mean = F.cross_entropy(expected.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(total / weight, mean, rtol=1e-10, atol=0)


def test_gpt_logits_do_not_depend_on_later_tokens() -> None:
    layers = build(CONFIG, Grid())
    inputs, _ = batch(CONFIG)
    changed = inputs.clone()
    changed[:, 7] = (changed[:, 7] + 1) % CONFIG.vocab_size
    before, after = run(layers, CONFIG, inputs), run(layers, CONFIG, changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-12)
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_a_batch_without_labels_has_a_loss_of_0() -> None:
    logits = torch.randn(2, 3, 53, requires_grad=True)
    total, weight = GPTLoss(Grid(), 53)(logits, torch.full((2, 3), -100))
    total.backward()
    assert float(total.detach()) == 0.0 and int(weight) == 0 and not bool(logits.grad.any())  # type: ignore[union-attr]


def test_gpt_layers_returns_the_expected_layers() -> None:
    specs = gpt_layers(CONFIG)
    assert [spec.typename for spec in specs] == [
        "TokenEmbedding",
        "PositionEmbedding",
        "GPTBlock",
        "GPTBlock",
        "FinalLayerNorm",
        "TokenEmbedding",
    ]
    first, head = specs[0], specs[-1]
    assert isinstance(first, TiedLayerSpec) and isinstance(head, TiedLayerSpec)
    assert first.key == head.key == "embed" and head.forward_fn is TokenEmbedding.attend
    untied = gpt_layers(GPTConfig(**{**vars(CONFIG), "tie_word_embeddings": False}))
    assert untied[-1].typename == "VocabParallelHead"
    assert not any(isinstance(spec, TiedLayerSpec) for spec in untied)


def test_a_gpt_block_has_the_expected_parameter_names() -> None:
    block = gpt_layers(CONFIG)[2].build(Grid())
    names = {name.rpartition(".")[0] for name, _ in block.named_parameters()}
    assert names == {"norm1", "attention.qkv", "attention.out", "norm2", "mlp.up", "mlp.down"}


# --------------------------------------------------------------------------------------------------- errors


def refused_on_rank(size: int, config: GPTConfig) -> str:
    return error_text(lambda: build(config, Grid(tensor=size)))


def test_gpt_refuses_more_tensor_ranks_than_heads(ranks: Any) -> None:
    config = GPTConfig(
        hidden_size=24, num_attention_heads=3, num_hidden_layers=1, vocab_size=50, max_position_embeddings=8
    )
    message = "num_attention_heads is 3, but tensor=4 needs at least 4. Give tensor=3 at most."
    assert ranks(4, refused_on_rank, 4, config) == [message] * 4
    with pytest.raises(ValueError, match=message):
        config.check_tensor(4)
    with pytest.raises(ValueError, match="vocab_size is 3, but tensor=6 needs at least 6"):
        GPTConfig(hidden_size=24, num_attention_heads=6, vocab_size=3).check_tensor(6)
    GPTConfig(hidden_size=24, num_attention_heads=6).check_tensor(4)


def test_gpt_refuses_sequences_longer_than_its_positions() -> None:
    layers = build(CONFIG, Grid())
    with pytest.raises(ValueError, match="the sequence has 17 tokens, but the model has 16 positions"):
        run(layers, CONFIG, torch.zeros(1, 17, dtype=torch.long))
    packed = torch.tensor([[0] * 8 + [1] * 17])
    with pytest.raises(ValueError, match="the sequence has 17 tokens, but the model has 16 positions"):
        run(layers, CONFIG, (torch.zeros(1, 25, dtype=torch.long), packed))
    run(layers, CONFIG, (torch.zeros(1, 24, dtype=torch.long), packed[:, :24]))  # each document fits
