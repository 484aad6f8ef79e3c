"""`parallelize`: plain modules and Hugging Face models, sharded in place, against themselves on one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from triax.grid import Grid
from triax.grid.layout import layout_of
from triax.tensor_parallel.parallelize import parallelize

# An odd vocabulary, an MLP whose width 2 and 4 do not divide, 6 heads: uneven over 4 ranks.
SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 43, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 6, "n_inner": 37},
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 3, "tie_word_embeddings": True},
    "qwen3": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6},
    "bert": {"num_attention_heads": 4, "intermediate_size": 37},
}
_COMMON = {
    "vocab_size": 43,
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 16,
}
_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None}
_NO_DROPOUT = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 3},
}


def make(family: str, **changes: Any) -> nn.Module:
    """A small random model of a family, in float64, the same wherever it is made."""
    import transformers

    names = {
        "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
        "llama": ("LlamaConfig", "LlamaForCausalLM"),
        "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
        "bert": ("BertConfig", "BertForMaskedLM"),
    }
    config, model = (getattr(transformers, name) for name in names[family])
    common = {} if family == "gpt2" else _COMMON
    torch.manual_seed(3)
    options = common | SMALL[family] | _NO_TOKENS | _NO_DROPOUT.get(family, {}) | changes
    made: nn.Module = model(config(**options)).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)  # biases and norms are no longer 0 and 1
    return made


def exactly(model: nn.Module) -> nn.Module:
    """The model, its RMSNorms computing in its own dtype: theirs round to float32, and so do their gradients."""
    for norm in model.modules():
        if type(norm).__name__.endswith("RMSNorm"):
            norm.forward = functools.partial(_rms_norm, norm)
    return model


def _rms_norm(self: Any, x: Tensor) -> Tensor:
    return nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)


def batch(length: int = 11) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(43, (3, length), generator=generator), torch.randint(43, (3, length), generator=generator)


def run(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """The logits; gradients are left in the parameters."""
    logits: Tensor = model(input_ids=ids).logits
    nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    return logits.detach()


def worst(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape, (a.shape, b.shape)
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-3))


def compare(grid: Grid, family: str, train: bool, changes: dict[str, Any]) -> dict[str, float]:
    """How far outputs and gradients of the sharded model are from the whole one's, relative; and what was sharded."""
    exact = changes.pop("exact", False)
    whole, model = (make(family, **changes).train(train) for _ in range(2))
    if exact:
        whole, model = exactly(whole), exactly(model)
    assert parallelize(model, grid) is model
    ids, labels = batch()
    found = {"logits": worst(run(model, ids, labels), run(whole, ids, labels))}
    reference = dict(whole.named_parameters())
    assert dict(model.named_parameters()).keys() == reference.keys()  # names and ties are as they were
    rank, size = grid.tensor.rank, grid.tensor.size
    for name, parameter in model.named_parameters():
        layout = layout_of(parameter)
        assert layout.name == name and layout.shape == tuple(reference[name].shape)
        assert torch.equal(parameter, layout.shard(reference[name], rank, size))
        assert parameter.grad is not None and reference[name].grad is not None
        found[name] = worst(parameter.grad, layout.shard(reference[name].grad, rank, size))
    return found


def on_rank(size: int, family: str, train: bool = True, changes: dict[str, Any] | None = None) -> dict[str, float]:
    return compare(Grid(tensor=size), family, train, dict(changes or {}))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", SMALL)
def test_a_hugging_face_model_is_what_it_was(ranks: Any, family: str, size: int) -> None:
    """Logits and every gradient, to 1e-9 in float64."""
    for found in ranks(size, on_rank, size, family, timeout=60):
        assert max(found.values()) < 1e-9, {name: error for name, error in found.items() if error >= 1e-9}
        assert len(found) > 15


@pytest.mark.exhaustive
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt2", {"tie_word_embeddings": False}),
        ("gpt2", {"_attn_implementation": "eager"}),
        ("llama", {"num_key_value_heads": 6, "attention_bias": True, "mlp_bias": True}),
        ("llama", {"num_key_value_heads": 1, "_attn_implementation": "eager"}),
        ("llama", {"num_key_value_heads": 2, "attention_bias": True, "tie_word_embeddings": True}),
        ("qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": False}),
        # Keys that several ranks use: each one's gradient goes through the norm, whose float32 would round the parts.
        ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 3, "attention_bias": True, "exact": True}),
        ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 1, "exact": True}),
        ("bert", {"num_attention_heads": 6, "_attn_implementation": "eager"}),
    ],
)
def test_other_configurations(ranks: Any, family: str, changes: dict[str, Any], size: int, train: bool) -> None:
    for found in ranks(size, on_rank, size, family, train, changes, timeout=60):
        assert max(found.values()) < 1e-9, {name: error for name, error in found.items() if error >= 1e-9}
