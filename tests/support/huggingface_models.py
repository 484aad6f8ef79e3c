"""Small models of transformers, and their weights in triax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_GPT2 = {"n_positions": 16, "n_embd": 32, "n_layer": 3, "n_head": 8, "resid_pdrop": 0.0} | _NO_TOKENS
_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": 32,
} | _NO_TOKENS

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", _GPT2 | {"vocab_size": 53}),
    "gpt2-untied": ("GPT2", _GPT2 | {"vocab_size": 41, "n_inner": 64, "tie_word_embeddings": False}),
    "llama": ("Llama", _LLAMA | {"vocab_size": 61, "num_key_value_heads": 2}),
    "llama-tied": ("Llama", _LLAMA | {"vocab_size": 43, "num_key_value_heads": 8, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", _LLAMA | {"vocab_size": 43, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", _LLAMA | {"vocab_size": 47, "num_key_value_heads": 4, "head_dim": 6}),
}


def make(family: str, options: dict[str, Any]) -> Any:
    """A random model in which no bias is 0 and no norm 1."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**options)
    torch.manual_seed(3)
    model = getattr(transformers, f"{family}{'LMHeadModel' if family == 'GPT2' else 'ForCausalLM'}")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model.eval()


def ids_of(model: Any) -> Tensor:
    return torch.randint(model.config.vocab_size, (4, 13), generator=torch.Generator().manual_seed(5))


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids_of(model)).logits
    return logits


def saved(folder: Path, case: str, **options: Any) -> tuple[Path, Tensor, Tensor]:
    """A model's folder, and what it makes of some ids."""
    model = make(CASES[case][0], CASES[case][1] | options)
    model.save_pretrained(folder / case)
    return folder / case, ids_of(model), logits_of(model)


def read_back(folder: Path | str, **options: Any) -> Any:
    """Read a folder as transformers does, with all weights that the model has, and no others."""
    import transformers

    reader: Any = transformers.AutoModelForCausalLM
    model, info = reader.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info.get(key) for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    return model


def assert_bitwise(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
