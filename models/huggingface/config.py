"""Conversion between Hugging Face's ``config.json`` and triax's configurations, without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ..config import DeepseekConfig, GPTConfig, LlamaConfig, MixtralConfig, RopeScaling, TransformerConfig, YarnScaling

# Sizes: our field -> GPT-2's key; and those of Llama's family, which have the same names there.
_GPT2 = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "n_positions",
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
}
_LLAMA = (*_GPT2, "intermediate_size")
# Optional settings of GPT-2 (our field -> key, default) and of Llama's family (field and key -> default).
_GPT2_OPTIONS: dict[str, tuple[str, Any]] = {
    "dropout": ("resid_pdrop", 0.1),
    "tie_word_embeddings": ("tie_word_embeddings", True),
    "initializer_range": ("initializer_range", 0.02),
    "layer_norm_epsilon": ("layer_norm_epsilon", 1e-5),
}
_LLAMA_OPTIONS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "initializer_range": 0.02}
# Llama's families -> (qkv_bias, qk_norm).
_LLAMA_FAMILIES = {"llama": (False, False), "qwen2": (True, False), "qwen3": (False, True)}
# Families with experts -> the class's prefix, and the key of the number of experts.
_MIXTRAL_FAMILIES = {
    "mixtral": ("Mixtral", "num_local_experts"),
    "qwen3_moe": ("Qwen3Moe", "num_experts"),
    "olmoe": ("Olmoe", "num_experts"),
}
# DeepSeek's families -> the class's prefix, and the scores of the experts.
_DEEPSEEK_FAMILIES = {"deepseek_v2": ("DeepseekV2", "softmax"), "deepseek_v3": ("DeepseekV3", "sigmoid")}
_DEEPSEEK = (
    *(*_LLAMA, "moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
    *("first_k_dense_replace", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    "routed_scaling_factor",
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # keys of the number of experts
_SHARDED = ("gpt2", *_LLAMA_FAMILIES)  # families that triax.parallelize shards


def read_config(folder: Path) -> dict[str, Any]:
    """Read the content of a folder's ``config.json``.

    Raises:
        FileNotFoundError: the folder has no ``config.json``.
    """
    file = folder / "config.json"
    if not file.is_file():
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) if folder.is_dir() else "no such folder"
        raise FileNotFoundError(
            f"{file} does not exist ({found or 'the folder is empty'}). Give a folder that save_pretrained wrote, with "
            "config.json and *.safetensors."
        )
    read: dict[str, Any] = json.loads(file.read_text())
    return read


def layer_count(config: Mapping[str, Any]) -> int:
    """Return the number of blocks that a ``config.json`` gives under any family's key, or 0 if it gives none."""
    return int(config.get("num_hidden_layers") or config.get("n_layer") or 0)


def expert_count(config: Mapping[str, Any]) -> int:
    """Return the number of experts that a ``config.json`` gives under any family's key, or 0 if it gives none."""
    return int(next((config[key] for key in _EXPERTS if config.get(key)), 0))


def from_hf(config: Mapping[str, Any]) -> TransformerConfig:
    """Return the configuration of the model that a ``config.json`` describes, for example a ``LlamaConfig``.

    Args:
        config: the content of ``config.json`` of a model of the family gpt2, llama, qwen2, qwen3, mixtral,
            qwen3_moe, olmoe, deepseek_v2 or deepseek_v3.

    Raises:
        ValueError: the model is of another family or has a setting that triax's layers do not support. The message
            names the setting.
    """
    family = config.get("model_type")
    if family == "gpt2":
        return _gpt(config)
    if family in _LLAMA_FAMILIES:
        return _llama(config, str(family))
    if family in _MIXTRAL_FAMILIES:
        return _mixtral(config, str(family))
    if family in _DEEPSEEK_FAMILIES:
        return _deepseek(config, str(family))
    known = ", ".join((*_SHARDED, *_MIXTRAL_FAMILIES, *_DEEPSEEK_FAMILIES))
    raise ValueError(
        f"model_type is {family!r}, but the known ones are {known}. Pass your own layers and names, "
        " load_hf(path, layers, names={'layers.0.weight': 'model.embed.weight', ...})."
    )


def to_hf(config: TransformerConfig) -> dict[str, Any]:
    """Return the content of ``config.json`` for a configuration, without the dtype."""
    if isinstance(config, MixtralConfig):
        return _to_mixtral(config)
    if isinstance(config, DeepseekConfig):
        return _to_deepseek(config)
    if config.sliding_window is not None:
        raise ValueError(
            f"sliding_window={config.sliding_window} has no counterpart in Hugging Face's model. Leave it out, or pass "
            "the content of config.json as a dict."
        )
    if isinstance(config, LlamaConfig):
        return _to_llama(config)
    assert isinstance(config, GPTConfig)
    return _to_gpt2(config)


def same_model(ours: TransformerConfig, theirs: TransformerConfig) -> str | None:
    """Describe the settings with which two configurations compute different functions, or return None.

    Example: ``"rms_norm_eps is 1e-05 here, 1e-06 there"``.
    """
    if type(ours) is not type(theirs):
        return f"it is a {type(ours).__name__} here, a {type(theirs).__name__} there"
    # Fields that do not change the function that a model computes from its weights.
    free = {"dropout", "initializer_range", "router_aux_loss_coef", "aux_loss_alpha"}
    if not isinstance(ours, GPTConfig):
        free.add("max_position_embeddings")  # GPT-2 has a weight for each position
    differing = [
        f"{field.name} is {getattr(ours, field.name)} here, {getattr(theirs, field.name)} there"
        for field in fields(ours)
        if field.name not in free and getattr(ours, field.name) != getattr(theirs, field.name)
    ]
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
            f"n_inner={hidden} is not a multiple of n_embd={width}, as triax's GPT needs (mlp_ratio x n_embd). "
            "triax.parallelize shards the Hugging Face model itself."
        )
    return GPTConfig(
        **{ours: config[theirs] for ours, theirs in _GPT2.items()},
        **{ours: config.get(theirs, default) for ours, (theirs, default) in _GPT2_OPTIONS.items()},
        mlp_ratio=hidden // width,
    )


def _llama(config: Mapping[str, Any], family: str) -> LlamaConfig:
    _require(config, use_sliding_window=(False,))
    qkv_bias, qk_norm = _LLAMA_FAMILIES[family]
    return LlamaConfig(**_llama_fields(config), qkv_bias=qkv_bias, qk_norm=qk_norm)


def _llama_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that Llama and its relatives with experts have."""
    _require(config, hidden_act=("silu",), mlp_bias=(False,), attention_bias=(False,))
    rope = _rope(config)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(f"rope_type={kind!r} is not implemented, only 'default' and 'llama3' are")
    scaling = None
    if kind == "llama3":
        scaling = RopeScaling(**{field.name: rope[field.name] for field in fields(RopeScaling)})
    return {
        **{name: config[name] for name in _LLAMA},
        **{name: config.get(name, default) for name, default in _LLAMA_OPTIONS.items()},
        "num_key_value_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "head_dim": config.get("head_dim") or 0,
        "rope_theta": float(rope.get("rope_theta") or config.get("rope_theta") or 1e4),
        "rope_scaling": scaling,
    }


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the rotary positions: Transformers 5 has all in rope_parameters, 4 beside each other."""
    return dict(config.get("rope_parameters") or config.get("rope_scaling") or {})


def _mixtral(config: Mapping[str, Any], family: str) -> MixtralConfig:
    _require(config, attention_dropout=(0.0,), router_jitter_noise=(0.0,))
    window = config.get("sliding_window")
    if family == "qwen3_moe" and not config.get("use_sliding_window", False):
        window = None
    if family == "olmoe":
        _require(config, sliding_window=(None,))
    return MixtralConfig(
        **_llama_fields(config),
        sliding_window=window,
        num_experts=expert_count(config),
        num_experts_per_tok=config["num_experts_per_tok"],
        moe_intermediate_size=config["moe_intermediate_size"] if family == "qwen3_moe" else 0,
        norm_topk_prob=family == "mixtral" or bool(config.get("norm_topk_prob", False)),
        decoder_sparse_step=int(config.get("decoder_sparse_step", 1)),
        mlp_only_layers=tuple(config.get("mlp_only_layers") or ()),
        router_aux_loss_coef=config.get("router_aux_loss_coef", 0.01 if family == "olmoe" else 0.001),
        qk_norm=family == "qwen3_moe",
        qk_norm_all_heads=family == "olmoe",
        clip_qkv=config.get("clip_qkv"),
    )


def _deepseek(config: Mapping[str, Any], family: str) -> DeepseekConfig:
    scores = _DEEPSEEK_FAMILIES[family][1]
    _require(
        config,
        hidden_act=("silu",),
        mlp_bias=(False,),
        attention_bias=(False,),
        attention_dropout=(0.0,),
        scoring_func=(scores,),
        seq_aux=(True,),
        moe_layer_freq=(1,),
        quantization_config=(None,),
        num_key_value_heads=(config["num_attention_heads"], None),
        topk_method=("greedy", "group_limited_greedy") if family == "deepseek_v2" else ("noaux_tc",),
    )
    grouped = family == "deepseek_v3" or config.get("topk_method") == "group_limited_greedy"
    if family == "deepseek_v2":
        _require(config, norm_topk_prob=(False, None))  # transformers takes no notice of it
    rope = _rope(config)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "yarn"):
        raise ValueError(f"rope_type={kind!r} is not implemented for {family}, only 'default' and 'yarn' are")
    scaling = None
    if kind == "yarn":
        known = {field.name for field in fields(YarnScaling)}
        scaling = YarnScaling(**{name: value for name, value in rope.items() if name in known and value is not None})
    return DeepseekConfig(
        **{name: config[name] for name in _DEEPSEEK},
        **{name: config.get(name, default) for name, default in _LLAMA_OPTIONS.items()},
        scoring_func=scores,
        norm_topk_prob=family == "deepseek_v3" and bool(config.get("norm_topk_prob", True)),
        n_group=(config.get("n_group") or 1) if grouped else 1,
        topk_group=(config.get("topk_group") or 1) if grouped else 1,
        aux_loss_alpha=config.get("aux_loss_alpha", 0.0),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 1e4),
        rope_scaling=scaling,
        rope_interleave=config.get("rope_interleave", True) is not False,
    )


def _require(config: Mapping[str, Any], **allowed: tuple[Any, ...]) -> None:
    for key, values in allowed.items():
        value = config.get(key, values[0])
        if value not in values:
            family = config["model_type"]
            raise ValueError(
                f"{family} with {key}={value!r} is not implemented, only with "
                f"{key}={' or '.join(map(repr, values))}."
                + " triax.parallelize shards the Hugging Face model itself."
                * (family in _SHARDED)
            )


def _to_gpt2(config: GPTConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        **{theirs: getattr(config, ours) for ours, theirs in _GPT2.items()},
        **{theirs: getattr(config, ours) for ours, (theirs, _) in _GPT2_OPTIONS.items()},
        "n_inner": config.mlp_ratio * config.hidden_size,
        "embd_pdrop": config.dropout,
        "attn_pdrop": 0.0,
        # The defaults are GPT-2's own tokens, which another vocabulary need not have.
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _to_llama(config: LlamaConfig) -> dict[str, Any]:
    options = config.qkv_bias, config.qk_norm
    family = next((name for name, has in _LLAMA_FAMILIES.items() if has == options), None)
    if family is None:
        raise ValueError("no Hugging Face family has both qkv_bias (Qwen2) and qk_norm (Qwen3). Leave out one of them.")
    if family == "llama" and config.hidden_size % config.num_attention_heads:
        raise ValueError(
            f"num_attention_heads={config.num_attention_heads} does not divide hidden_size={config.hidden_size}, as "
            "Hugging Face's Llama needs. Change one of them."
        )
    return _to_llama_fields(config, family, family.capitalize())


def _to_llama_fields(config: LlamaConfig, family: str, prefix: str) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= {"rope_type": "llama3", **asdict(config.rope_scaling)}
    return {
        "architectures": [f"{prefix}ForCausalLM"],
        "model_type": family,
        "hidden_act": "silu",
        **{name: getattr(config, name) for name in (*_LLAMA, *_LLAMA_OPTIONS, "num_key_value_heads", "head_dim")},
        "rope_parameters": rope,
        "rope_theta": config.rope_theta,  # with rope_scaling, where Transformers 4 looks
        "rope_scaling": rope if config.rope_scaling is not None else None,
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _to_mixtral(config: MixtralConfig) -> dict[str, Any]:
    family = "olmoe" if config.qk_norm_all_heads else "qwen3_moe" if config.qk_norm else "mixtral"
    prefix, experts = _MIXTRAL_FAMILIES[family]
    dense = len(config.moe_layers) < config.num_hidden_layers
    has = {
        "qkv_bias": config.qkv_bias,
        "mlp_only_layers and decoder_sparse_step": dense and family != "qwen3_moe",
        "moe_intermediate_size unlike intermediate_size": config.moe_intermediate_size != config.intermediate_size
        and family != "qwen3_moe",
        "norm_topk_prob=False": not config.norm_topk_prob and family == "mixtral",
        "clip_qkv": config.clip_qkv is not None and family != "olmoe",
        "sliding_window": config.sliding_window is not None and family == "olmoe",
        "head_dim unlike hidden_size / num_attention_heads": family == "olmoe"
        and config.head_dim * config.num_attention_heads != config.hidden_size,
    }
    if refused := [name for name, present in has.items() if present]:
        raise ValueError(
            f"Hugging Face's {prefix} has no {', '.join(refused)}. Of Mixtral, Qwen3-MoE (qk_norm=True) and OLMoE "
            "(qk_norm_all_heads=True), give the settings of one."
        )
    found = _to_llama_fields(config, family, prefix)
    found |= {
        experts: config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "router_aux_loss_coef": config.router_aux_loss_coef,
    }
    if family != "mixtral":
        found["norm_topk_prob"] = config.norm_topk_prob
    if family == "mixtral":
        found["sliding_window"] = config.sliding_window
    elif family == "qwen3_moe":
        found |= {
            "moe_intermediate_size": config.moe_intermediate_size,
            "decoder_sparse_step": config.decoder_sparse_step,
            "mlp_only_layers": list(config.mlp_only_layers),
            "use_sliding_window": config.sliding_window is not None,
            "sliding_window": config.sliding_window,
        }
    else:
        del found["head_dim"]
        found |= {"clip_qkv": config.clip_qkv, "pad_token_id": None}
    return found


def _to_deepseek(config: DeepseekConfig) -> dict[str, Any]:
    family = "deepseek_v3" if config.scoring_func == "sigmoid" else "deepseek_v2"
    if family == "deepseek_v2" and (config.norm_topk_prob or not config.rope_interleave):
        raise ValueError(
            "Hugging Face's DeepseekV2 has no norm_topk_prob=True and no rope_interleave=False. Leave them out, or "
            "give scoring_func='sigmoid' (DeepseekV3)."
        )
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= {"rope_type": "yarn", **asdict(config.rope_scaling)}
    found = {
        "architectures": [f"{_DEEPSEEK_FAMILIES[family][0]}ForCausalLM"],
        "model_type": family,
        "hidden_act": "silu",
        **{name: getattr(config, name) for name in (*_DEEPSEEK, *_LLAMA_OPTIONS)},
        "num_key_value_heads": config.num_attention_heads,
        "scoring_func": config.scoring_func,
        "norm_topk_prob": config.norm_topk_prob,
        "n_group": config.n_group,
        "topk_group": config.topk_group,
        "aux_loss_alpha": config.aux_loss_alpha,
        "rope_parameters": rope,
        "rope_theta": config.rope_theta,  # with rope_scaling, where Transformers 4 looks
        "rope_scaling": rope if config.rope_scaling is not None else None,
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if family == "deepseek_v2":
        return {**found, "topk_method": "group_limited_greedy" if config.n_group > 1 else "greedy"}
    return {
        **found,
        "topk_method": "noaux_tc",
        "rope_interleave": config.rope_interleave,
        "num_nextn_predict_layers": 0,
    }
