"""Hugging Face's ``config.json`` and our configurations: one from the other. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from .config import GPTConfig, LlamaConfig, RopeScaling

__all__ = ["from_hf", "layer_count", "read_config", "same_model", "to_hf"]

Config = GPTConfig | LlamaConfig

# What does not change the function that a model computes from its weights.
_FREE = ("dropout", "init_std", "sequence_length")


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a folder.

    Raises:
        FileNotFoundError: there is none.
    """
    file = folder / "config.json"
    if not file.is_file():
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) if folder.is_dir() else "no such folder"
        raise FileNotFoundError(
            f"{file} is missing ({found or 'an empty folder'}): give a folder as save_pretrained writes it, with "
            "config.json and *.safetensors"
        )
    read: dict[str, Any] = json.loads(file.read_text())
    return read


def layer_count(config: Mapping[str, Any]) -> int:
    """The number of blocks, whatever the family calls it; 0 where it says nothing."""
    return int(config.get("num_hidden_layers") or config.get("n_layer") or 0)


def from_hf(config: Mapping[str, Any]) -> Config:
    """Our configuration of the model that a ``config.json`` describes.

    Args:
        config: of the family gpt2, llama, qwen2 or qwen3.

    Raises:
        ValueError: another family, or a setting that our layers do not have; the message names it.
    """
    family = config.get("model_type")
    if family == "gpt2":
        return _gpt(config)
    if family in ("llama", "qwen2", "qwen3"):
        return _llama(config, family)
    raise ValueError(
        f"model_type {family!r} is none that is known (gpt2, llama, qwen2, qwen3): pass your own layers and names, "
        "load_hf(path, layers, names={'layers.0.weight': 'model.embed.weight', ...})"
    )


def to_hf(config: Config) -> dict[str, Any]:
    """The ``config.json`` of a model of ours, without its dtype."""
    return _to_gpt2(config) if isinstance(config, GPTConfig) else _to_llama(config)


def same_model(ours: Config, theirs: Config) -> str | None:
    """What differs of all that the function depends on, such as ``"norm_eps is 1e-05 here, 1e-06 there"``, or None."""
    if type(ours) is not type(theirs):
        return f"it is a {type(ours).__name__} here, a {type(theirs).__name__} there"
    differing = [
        f"{field.name} is {getattr(ours, field.name)} here, {getattr(theirs, field.name)} there"
        for field in fields(ours)
        if field.name not in _FREE and getattr(ours, field.name) != getattr(theirs, field.name)
    ]
    if isinstance(ours, GPTConfig) and ours.sequence_length != theirs.sequence_length:  # learned positions
        differing.append(f"sequence_length is {ours.sequence_length} here, {theirs.sequence_length} there")
    return ", ".join(differing) or None


def _gpt(config: Mapping[str, Any]) -> GPTConfig:
    _require(
        config,
        activation_function=("gelu_new", "gelu_pytorch_tanh"),
        scale_attn_weights=(True,),
        scale_attn_by_inverse_layer_idx=(False,),
        add_cross_attention=(False,),
    )
    width = config["n_embd"]
    hidden = config.get("n_inner") or 4 * width
    if hidden % width:
        raise ValueError(
            f"n_inner={hidden} is no multiple of n_embd={width}, which our GPT's MLP is: mlp_ratio x width"
        )
    return GPTConfig(
        vocab_size=config["vocab_size"],
        sequence_length=config["n_positions"],
        width=width,
        layers=config["n_layer"],
        heads=config["n_head"],
        mlp_ratio=hidden // width,
        dropout=config.get("resid_pdrop", 0.1),
        tie_embeddings=config.get("tie_word_embeddings", True),
        init_std=config.get("initializer_range", 0.02),
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
    )


def _llama(config: Mapping[str, Any], family: str) -> LlamaConfig:
    _require(config, hidden_act=("silu",), mlp_bias=(False,), attention_bias=(False,), use_sliding_window=(False,))
    # Transformers 5 keeps both in rope_parameters, 4 beside each other.
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(f"rope_type={kind!r} is not implemented; there are 'default' and 'llama3'")
    scaling = None
    if kind == "llama3":
        scaling = RopeScaling(
            factor=rope["factor"],
            low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
            original_length=rope["original_max_position_embeddings"],
        )
    return LlamaConfig(
        vocab_size=config["vocab_size"],
        sequence_length=config["max_position_embeddings"],
        width=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        hidden=config["intermediate_size"],
        head_dim=config.get("head_dim") or 0,
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 1e4),
        rope_scaling=scaling,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        tie_embeddings=config.get("tie_word_embeddings", False),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        init_std=config.get("initializer_range", 0.02),
    )


def _require(config: Mapping[str, Any], **allowed: tuple[Any, ...]) -> None:
    for key, values in allowed.items():
        value = config.get(key, values[0])
        if value not in values:
            raise ValueError(
                f"{config['model_type']} with {key}={value!r} is not implemented; our layers are those of "
                f"{key}={' or '.join(map(repr, values))}. (triax.parallelize shards the Hugging Face model itself.)"
            )


def _to_gpt2(config: GPTConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "vocab_size": config.vocab_size,
        "n_positions": config.sequence_length,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.mlp_ratio * config.width,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": 0.0,
        "layer_norm_epsilon": config.norm_eps,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings,
        # The defaults are GPT-2's own tokens, which another vocabulary need not have.
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _to_llama(config: LlamaConfig) -> dict[str, Any]:
    if config.qkv_bias and config.qk_norm:
        raise ValueError("no Hugging Face family has both qkv_bias (Qwen2) and qk_norm (Qwen3)")
    family, name = "llama", "LlamaForCausalLM"
    if config.qkv_bias:
        family, name = "qwen2", "Qwen2ForCausalLM"
    elif config.qk_norm:
        family, name = "qwen3", "Qwen3ForCausalLM"
    elif config.heads * config.head_dim != config.width and config.width % config.heads:
        raise ValueError(f"Hugging Face's Llama has {config.heads} heads divide the width, and it is {config.width}")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": config.rope_scaling.factor,
            "low_freq_factor": config.rope_scaling.low_freq_factor,
            "high_freq_factor": config.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling.original_length,
        }
    return {
        "architectures": [name],
        "model_type": family,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.sequence_length,
        "hidden_size": config.width,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
        "rope_theta": config.rope_theta,  # with rope_scaling, where Transformers 4 looks
        "rope_scaling": rope if config.rope_scaling is not None else None,
        "attention_bias": False,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
    }
