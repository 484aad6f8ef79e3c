"""The GPT: its sizes, its initial values, its math against torch's own transformer, and its invariance."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triax.grid import Grid
from triax.grid.layout import Layout, layout_of
from triax.models.gpt import GPTConfig, GPTLoss, gpt
from triax.pipe.spec import TiedLayerSpec
from triax.tensor_parallel import VocabParallelEmbedding

# An uneven vocabulary, and a sequence shorter than the positions.
CONFIG = GPTConfig(vocab_size=53, sequence_length=16, width=24, layers=2, heads=4)


def build(config: GPTConfig, grid: Grid) -> list[nn.Module]:
    """The layers in order, as whoever runs them builds them; a tie's second spec gives the first one's layer."""
    torch.manual_seed(11)
    built: list[nn.Module] = []
    ties: dict[str, nn.Module] = {}
    for spec in gpt(config):
        key = spec.key if isinstance(spec, TiedLayerSpec) else ""
        layer = ties.get(key) or spec.build(grid)
        if key:
            ties[key] = layer
        built.append(layer.double())
    return built


def run(layers: list[nn.Module], config: GPTConfig, x: Tensor) -> Tensor:
    for spec, layer in zip(gpt(config), layers, strict=True):
        forward = spec.forward_fn if isinstance(spec, TiedLayerSpec) else None
        x = forward(layer, x) if forward else layer(x)
    return x


def parameters(layers: list[nn.Module]) -> dict[str, nn.Parameter]:
    return dict(nn.ModuleList(layers).named_parameters())  # a tied one once


def batch(config: GPTConfig, rows: int = 3, length: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(config.vocab_size, (rows, length + 1), generator=generator)
    inputs, labels = tokens[:, :-1], tokens[:, 1:].clone()
    labels[0, :5] = -100
    return inputs, labels


def train_on_rank(size: int, config: GPTConfig, smoothing: float = 0.0) -> dict[str, Any]:
    grid = Grid(tensor=size)
    layers = build(config, grid)
    inputs, labels = batch(config)
    logits = run(layers, config, inputs)
    total, weight = GPTLoss(grid, config.vocab_size, label_smoothing=smoothing)(logits, labels)
    (total / weight).backward()
    named = parameters(layers)
    return {
        "loss": total.detach(),
        "weight": weight,
        "logits": logits.detach(),
        "weights": {name: p.detach() for name, p in named.items()},
        "grads": {name: p.grad for name, p in named.items()},
        "layouts": {name: layout_of(p) for name, p in named.items()},
    }


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("tied", "dropout", "smoothing"), [(True, 0.0, 0.0), (False, 0.0, 0.1), (True, 0.1, 0.0)])
def test_every_gradient_is_that_of_one_process(
    ranks: Any, size: int, tied: bool, dropout: float, smoothing: float
) -> None:
    config = GPTConfig(**{**vars(CONFIG), "tie_embeddings": tied, "dropout": dropout})
    (alone,) = ranks(1, train_on_rank, 1, config, smoothing)
    found = ranks(size, train_on_rank, size, config, smoothing)
    for rank in found:
        torch.testing.assert_close(rank["loss"], alone["loss"], rtol=1e-10, atol=0)
        assert int(rank["weight"]) == int(alone["weight"]) == 3 * 12 - 5
    for name, layout in found[0]["layouts"].items():
        assert torch.equal(layout.assemble([r["weights"][name] for r in found]), alone["weights"][name]), name
        for copies in [found] if layout.sharded else [[r] for r in found]:
            grad = layout.assemble([r["grads"][name] for r in copies])
            torch.testing.assert_close(grad, alone["grads"][name], rtol=1e-10, atol=1e-12, msg=name)
    logits = Layout((3, 12, 53), shard_dim=2).assemble([r["logits"] for r in found])
    torch.testing.assert_close(logits, alone["logits"], rtol=1e-10, atol=1e-12)
    if dropout:
        still = GPTConfig(**{**vars(config), "dropout": 0.0})
        (without,) = ranks(1, train_on_rank, 1, still, smoothing)
        assert abs(float(alone["loss"] - without["loss"])) > 1e-6  # something was dropped


def test_it_computes_what_torchs_own_transformer_computes() -> None:
    """An independent implementation of the same model: pre-norm encoder layers under a causal mask."""
    layers = build(CONFIG, Grid())
    inputs, labels = batch(CONFIG)
    named = {name: p.detach() for name, p in parameters(layers).items()}
    x = F.embedding(inputs, named["0.weight"]) + named["1.weight"][: inputs.shape[1]]
    mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1], dtype=torch.float64)
    for i in range(2, 2 + CONFIG.layers):
        peer = nn.TransformerEncoderLayer(
            CONFIG.width,
            CONFIG.heads,
            4 * CONFIG.width,
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
    x = F.layer_norm(x, (CONFIG.width,), eps=CONFIG.norm_eps)
    expected = x @ named["0.weight"].T
    logits = run(layers, CONFIG, inputs)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-12)
    total, weight = GPTLoss(Grid(), CONFIG.vocab_size)(logits, labels)
    mean = F.cross_entropy(expected.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(total / weight, mean, rtol=1e-10, atol=0)


def test_no_token_sees_a_later_one() -> None:
    layers = build(CONFIG, Grid())
    inputs, _ = batch(CONFIG)
    changed = inputs.clone()
    changed[:, 7] = (changed[:, 7] + 1) % CONFIG.vocab_size
    before, after = run(layers, CONFIG, inputs), run(layers, CONFIG, changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-12)
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_nothing_that_counts_is_a_loss_of_0() -> None:
    logits = torch.randn(2, 3, 53, requires_grad=True)
    total, weight = GPTLoss(Grid(), 53)(logits, torch.full((2, 3), -100))
    total.backward()
    assert float(total.detach()) == 0.0 and int(weight) == 0 and not bool(logits.grad.any())  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------------ the config


@pytest.mark.parametrize(
    ("name", "count"),
    [
        # As transformers counts GPT-2's released weights.
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_gpt2_has_its_published_number_of_parameters(name: str, count: int) -> None:
    assert GPTConfig.preset(name).parameter_count == count


@pytest.mark.parametrize("name", GPTConfig.presets())
@pytest.mark.parametrize("tied", [True, False])
def test_the_parameter_count_is_that_of_the_built_model(name: str, tied: bool) -> None:
    config = GPTConfig.preset(name, tie_embeddings=tied, layers=2)  # 2 layers show what any number would
    with torch.device("meta"):
        layers = build(config, Grid())
    assert sum(p.numel() for p in parameters(layers).values()) == config.parameter_count


def test_sizes_of_the_largest_preset() -> None:
    billions = GPTConfig.preset("gpt3-175b").parameter_count / 1e9
    assert 174 < billions < 176


def test_initial_values_are_gpt2s() -> None:
    config = GPTConfig.preset("bytes-small", width=256)
    layers = build(config, Grid())
    for name, p in parameters(layers).items():
        value = p.detach()
        if name.endswith("bias"):
            assert not value.any(), name
        elif "norm" in name or name == f"{config.layers + 2}.weight":
            assert bool((value == 1).all()), name
        else:
            std = 0.02 / math.sqrt(2 * config.layers) if name.endswith(("out.weight", "down.weight")) else 0.02
            assert abs(float(value.std()) / std - 1) < 0.03, name
            assert abs(float(value.mean())) < 0.03 * std, name


def test_the_list_of_layers() -> None:
    specs = gpt(CONFIG)
    assert [spec.typename for spec in specs] == [
        "VocabParallelEmbedding",
        "PositionEmbedding",
        "Block",
        "Block",
        "LayerNorm",
        "VocabParallelEmbedding",
    ]
    first, head = specs[0], specs[-1]
    assert isinstance(first, TiedLayerSpec) and isinstance(head, TiedLayerSpec)
    assert first.key == head.key == "embed" and head.forward_fn is VocabParallelEmbedding.attend
    untied = gpt(GPTConfig(**{**vars(CONFIG), "tie_embeddings": False}))
    assert untied[-1].typename == "VocabParallelHead"
    assert not any(isinstance(spec, TiedLayerSpec) for spec in untied)


def test_names_of_a_blocks_parameters() -> None:
    block = gpt(CONFIG)[2].build(Grid())
    names = {name.rpartition(".")[0] for name, _ in block.named_parameters()}
    assert names == {"norm1", "attention.qkv", "attention.out", "norm2", "mlp.up", "mlp.down"}


# --------------------------------------------------------------------------------------------------- errors


def refused_on_rank(size: int, config: GPTConfig) -> str:
    try:
        build(config, Grid(tensor=size))
    except ValueError as error:
        return str(error)
    return "no error"


def test_heads_that_the_tensor_axis_does_not_divide(ranks: Any) -> None:
    config = GPTConfig(width=24, heads=6, layers=1, vocab_size=50, sequence_length=8)
    message = "6 attention heads do not divide over tensor=4; give tensor=1, 2, 3, 6, or another number of heads"
    assert ranks(4, refused_on_rank, 4, config) == [message] * 4
    with pytest.raises(ValueError, match=message):
        config.check_tensor(4)
    with pytest.raises(ValueError, match="a vocabulary of 3 does not reach over tensor=6"):
        GPTConfig(width=24, heads=6, vocab_size=3).check_tensor(6)
    config.check_tensor(3)


def test_a_sequence_longer_than_the_positions() -> None:
    layers = build(CONFIG, Grid())
    with pytest.raises(ValueError, match="a sequence of 17 tokens, and the model has 16 positions"):
        run(layers, CONFIG, torch.zeros(1, 17, dtype=torch.long))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers is 0; give at least 1"),
        ({"width": 100, "heads": 16}, "16 heads do not divide a width of 100; give width=96, say"),
        ({"dropout": 1.0}, r"dropout is a probability in \[0, 1\), not 1.0"),
    ],
)
def test_a_config_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPTConfig(**changes)


def test_an_unknown_preset_or_field_names_those_there_are() -> None:
    with pytest.raises(ValueError, match="no preset 'gpt5'; there are gpt2, gpt2-medium"):
        GPTConfig.preset("gpt5")
    with pytest.raises(TypeError, match="no field depth in a GPTConfig; its fields are vocab_size"):
        GPTConfig.preset("gpt2", depth=3)
