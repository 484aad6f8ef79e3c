"""Families without experts: their keys, names and settings, and their entries in ``FAMILIES``."""

from __future__ import annotations

import math
from typing import Any

from ..config import DecoderConfig, GPTConfig
from .family import (
    AT,
    ATTENTION,
    ATTENTION_BIAS,
    BIASES,
    COMMON,
    GATED,
    LLAMA,
    LLAMA_ENDS,
    LLAMA_NAMES,
    NO_DROPOUT,
    NORMS,
    ROPE,
    SIZES,
    TIED,
    Config,
    Family,
    Key,
    block_names,
    end_names,
    like,
)
from .names import Fused, Names, PerHead, Transposed
from .sharding_plans import (
    cohere_plan,
    falcon_plan,
    gemma_plan,
    gpt2_plan,
    gptj_plan,
    llama_plan,
    neox_plan,
    olmo2_plan,
    opt_plan,
    phi3_plan,
    stablelm_plan,
)

# -------------------------------------------------------------------------------------------------- keys of config.json

_GPT2_SIZES: dict[str, Key] = dict(
    zip(SIZES, ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"), strict=True)
)
_GPT2_ALIASES = {name: str(_GPT2_SIZES[name]) for name in SIZES[1:]}
_ACTS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2")  # of ``models/layers.ACTIVATIONS``
_ANY_ACT: dict[str, tuple[Any, ...]] = {"hidden_act": _ACTS, **NO_DROPOUT}
_HIDDEN_ACT: dict[str, Key] = {"hidden_act": ("hidden_act", "silu")}
_LAYER_NORM = {"norm": "layer", "gated": False}

# -------------------------------------------------------------------------------------------------- names of parameters

_GPT2_NAMES: Names = {
    "layers.0.weight": "transformer.wte.weight",
    "layers.1.weight": "transformer.wpe.weight",
    "layers.{i+2}.norm1.*": "transformer.h.{i}.ln_1.*",
    "layers.{i+2}.attention.qkv.*": Transposed("transformer.h.{i}.attn.c_attn.*"),
    "layers.{i+2}.attention.out.*": Transposed("transformer.h.{i}.attn.c_proj.*"),
    "layers.{i+2}.norm2.*": "transformer.h.{i}.ln_2.*",
    "layers.{i+2}.mlp.up.*": Transposed("transformer.h.{i}.mlp.c_fc.*"),
    "layers.{i+2}.mlp.down.*": Transposed("transformer.h.{i}.mlp.c_proj.*"),
    "layers.{n+2}.*": "transformer.ln_f.*",
    "layers.{n+3}.weight": "lm_head.weight",
}
_SANDWICH = block_names(  # norms before and behind each branch
    1,
    norm1=f"{AT}.input_layernorm.*",
    post_norm1=f"{AT}.post_attention_layernorm.*",
    norm2=f"{AT}.pre_feedforward_layernorm.*",
    post_norm2=f"{AT}.post_feedforward_layernorm.*",
)
_PHI3_NAMES: Names = {
    **LLAMA_NAMES,
    **block_names(
        1,
        attention__q=Fused(f"{AT}.self_attn.qkv_proj.*", "q", grouped=False),
        attention__kv=Fused(f"{AT}.self_attn.qkv_proj.*", "kv", grouped=False),
        mlp__gate_up=f"{AT}.mlp.gate_up_proj.*",
    ),
}
OLMO2_NAMES: Names = {
    **LLAMA_ENDS,
    **ATTENTION,
    **GATED,
    **block_names(1, post_norm1=f"{AT}.post_attention_layernorm.*", post_norm2=f"{AT}.post_feedforward_layernorm.*"),
}
_ARCEE_NAMES: Names = {
    **LLAMA_ENDS,
    **ATTENTION,
    **NORMS,
    **block_names(1, mlp__up=f"{AT}.mlp.up_proj.*", mlp__down=f"{AT}.mlp.down_proj.*"),
}
_STARCODER2_NAMES: Names = {
    **LLAMA_ENDS,
    **ATTENTION,
    **NORMS,
    **block_names(1, mlp__up=f"{AT}.mlp.c_fc.*", mlp__down=f"{AT}.mlp.c_proj.*"),
}
_GLM_NAMES: Names = {**LLAMA_NAMES, **block_names(1, mlp__gate_up=f"{AT}.mlp.gate_up_proj.*")}
_GLM4_NAMES: Names = {
    **_GLM_NAMES,
    **block_names(1, post_norm1=f"{AT}.post_self_attn_layernorm.*", post_norm2=f"{AT}.post_mlp_layernorm.*"),
}
_STABLELM_NAMES: Names = {
    **LLAMA_NAMES,
    **{
        f"layers.{{i+1}}.attention.{part}_norm.weight": PerHead(
            f"{AT}.self_attn.{part}_layernorm.norms.{{h}}.weight", part
        )
        for part in "qk"
    },
}
_HYPERCLOVA_NAMES: Names = {
    **LLAMA_NAMES,
    **block_names(1, post_norm1=f"{AT}.post_norm1.*", post_norm2=f"{AT}.post_norm2.*"),
}
_HUNYUAN_NAMES: Names = {
    **LLAMA_NAMES,
    **block_names(
        1,
        attention__q_norm=f"{AT}.self_attn.query_layernorm.*",
        attention__k_norm=f"{AT}.self_attn.key_layernorm.*",
    ),
}
_VAULTGEMMA_NAMES: Names = {**LLAMA_NAMES, **block_names(1, norm2=f"{AT}.pre_feedforward_layernorm.*")}
_GEMMA2_NAMES: Names = {**LLAMA_ENDS, **ATTENTION, **_SANDWICH, **GATED}
_NEOX = "gpt_neox.layers.{i}"
_NEOX_NAMES: Names = {
    **end_names("gpt_neox.embed_in", "gpt_neox.final_layer_norm"),
    **block_names(
        1,
        norm1=f"{_NEOX}.input_layernorm.*",
        norm2=f"{_NEOX}.post_attention_layernorm.*",
        attention__q=Fused(f"{_NEOX}.attention.query_key_value.*", "q"),
        attention__kv=Fused(f"{_NEOX}.attention.query_key_value.*", "kv"),
        attention__out=f"{_NEOX}.attention.dense.*",
        mlp__up=f"{_NEOX}.mlp.dense_h_to_4h.*",
        mlp__down=f"{_NEOX}.mlp.dense_4h_to_h.*",
    ),
    "layers.{n+2}.*": ["lm_head.*", "embed_out.*"],  # the second name before Transformers 5
}
_PHI_NAMES: Names = {
    **end_names("model.embed_tokens", "model.final_layernorm"),
    **ATTENTION,
    **block_names(
        1,
        norm1=f"{AT}.input_layernorm.*",
        attention__out=f"{AT}.self_attn.dense.*",
        mlp__up=f"{AT}.mlp.fc1.*",
        mlp__down=f"{AT}.mlp.fc2.*",
    ),
}
_H = "transformer.h.{i}"
_BLOOM_NAMES: Names = {
    **end_names("transformer.word_embeddings", "transformer.ln_f", 2),
    "layers.1.norm.*": "transformer.word_embeddings_layernorm.*",
    **block_names(
        2,
        norm1=f"{_H}.input_layernorm.*",
        norm2=f"{_H}.post_attention_layernorm.*",
        attention__q=Fused(f"{_H}.self_attention.query_key_value.*", "q"),
        attention__kv=Fused(f"{_H}.self_attention.query_key_value.*", "kv"),
        attention__out=f"{_H}.self_attention.dense.*",
        mlp__up=f"{_H}.mlp.dense_h_to_4h.*",
        mlp__down=f"{_H}.mlp.dense_4h_to_h.*",
    ),
}
_GPTJ_NAMES: Names = {
    **end_names("transformer.wte", "transformer.ln_f"),
    **block_names(
        1,
        norm1=f"{_H}.ln_1.*",
        attention__q=f"{_H}.attn.q_proj.*",
        attention__kv=(f"{_H}.attn.k_proj.*", f"{_H}.attn.v_proj.*"),
        attention__out=f"{_H}.attn.out_proj.*",
        mlp__up=f"{_H}.mlp.fc_in.*",
        mlp__down=f"{_H}.mlp.fc_out.*",
    ),
}
_GPT_NEO_NAMES: Names = {
    **end_names("transformer.wte", "transformer.ln_f", 2),
    "layers.1.weight": "transformer.wpe.weight",
    **block_names(
        2,
        norm1=f"{_H}.ln_1.*",
        norm2=f"{_H}.ln_2.*",
        attention__q=f"{_H}.attn.attention.q_proj.*",
        attention__kv=(f"{_H}.attn.attention.k_proj.*", f"{_H}.attn.attention.v_proj.*"),
        attention__out=f"{_H}.attn.attention.out_proj.*",
        mlp__up=f"{_H}.mlp.c_fc.*",
        mlp__down=f"{_H}.mlp.c_proj.*",
    ),
}
_NANOCHAT_NAMES: Names = {
    **end_names("model.embed_tokens", "model.norm", 2),
    "layers.1.norm.*": "model.norm.*",  # without parameters, and used twice
    **{ours.replace("{i+1}", "{i+2}"): theirs for ours, theirs in ATTENTION.items()},
    **block_names(2, mlp__up=f"{AT}.mlp.fc1.*", mlp__down=f"{AT}.mlp.fc2.*"),
}
_OPT = "model.decoder.layers.{i}"


def _opt_names(config: Config) -> Names:
    """Return OPT's table. OPT-350m has its norms behind the sums, no last norm, and narrower embeddings."""
    before, narrow = config.get("do_layer_norm_before", True), bool(_opt_width(config))
    first, norms = 2 + narrow, ("norm1", "norm2") if before else ("post_norm1", "post_norm2")
    ends = dict(end_names("model.decoder.embed_tokens", "model.decoder.final_layer_norm", first))
    last = f"layers.{{n+{first}}}.*"
    if not before:
        del ends[last]
    if narrow:
        ends[f"layers.{{n+{first + 2}}}.*"] = ends.pop(f"layers.{{n+{first + 1}}}.*")
        ends |= {
            "layers.1.linear.weight": "model.decoder.project_in.weight",
            f"layers.{{n+{first + 1}}}.linear.weight": "model.decoder.project_out.weight",
        }
    names = dict(zip(norms, (f"{_OPT}.self_attn_layer_norm.*", f"{_OPT}.final_layer_norm.*"), strict=True))
    return {
        **ends,
        f"layers.{first - 1}.weight": "model.decoder.embed_positions.weight",
        **block_names(
            first,
            **names,
            attention__q=f"{_OPT}.self_attn.q_proj.*",
            attention__kv=(f"{_OPT}.self_attn.k_proj.*", f"{_OPT}.self_attn.v_proj.*"),
            attention__out=f"{_OPT}.self_attn.out_proj.*",
            mlp__up=f"{_OPT}.fc1.*",
            mlp__down=f"{_OPT}.fc2.*",
        ),
    }


def _falcon_names(config: Config) -> Names:
    at, two = "transformer.h.{i}", config.get("new_decoder_architecture") and _falcon_norms(config) == 2
    return {
        **end_names("transformer.word_embeddings", "transformer.ln_f"),
        **block_names(
            1,
            norm1=f"{at}.ln_attn.*" if two else f"{at}.input_layernorm.*",
            norm2=f"{at}.ln_mlp.*" if two else f"{at}.post_attention_layernorm.*",
            attention__q=Fused(f"{at}.self_attention.query_key_value.*", "q"),
            attention__kv=Fused(f"{at}.self_attention.query_key_value.*", "kv"),
            attention__out=f"{at}.self_attention.dense.*",
            mlp__up=f"{at}.mlp.dense_h_to_4h.*",
            mlp__down=f"{at}.mlp.dense_4h_to_h.*",
        ),
    }


# -------------------------------------------------------------------------------------- settings that are no single key


def _whole(config: Config, key: str, default: int) -> int:
    """Return a whole number that may be null."""
    value = config.get(key) or default
    if type(value) is not int:
        raise ValueError(f"{key} is {value!r}, but must be a whole number, or null.")
    return value


def _gpt2_read(config: Config) -> dict[str, Any]:
    width = config["n_embd"]
    hidden = config.get("n_inner") or 4 * width
    if hidden % width:
        raise ValueError(
            f"n_inner={hidden} is not a multiple of n_embd={width}, as triax's GPT needs (mlp_ratio x n_embd). "
            "triax.parallelize shards the Hugging Face model itself."
        )
    return {"mlp_ratio": hidden // width}


def _gpt2_write(config: DecoderConfig) -> dict[str, Any]:
    return {"n_inner": config.intermediate_size, "embd_pdrop": config.dropout, "attn_pdrop": 0.0}


def number_of(config: Config, key: str, default: int | None, least: int = 0) -> int:
    """Return the whole number that a key has as its value; the default if it is missing."""
    value = config.get(key, default)
    if type(value) is not int or not least <= value <= 2**40:
        raise ValueError(f"{key} is {repr(value)[:60]}, but must be a whole number, {least} or more.")
    return value


def smollm3_read(config: Config) -> dict[str, Any]:
    depth, interval = config["num_hidden_layers"], number_of(config, "no_rope_layer_interval", 4, 1)
    kept = config.get("no_rope_layers")
    return {"no_rope_layers": (kept or [int((i + 1) % interval != 0) for i in range(depth)])[:depth]}


def smollm3_write(config: DecoderConfig) -> dict[str, Any]:
    return {"no_rope_layers": list(config.no_rope_layers) or [1] * config.num_hidden_layers}


def exaone4_slides(config: Config, block: int) -> bool:
    return (block + 1) % number_of(config, "sliding_window_pattern", 4, 1) != 0


def exaone4_read(config: Config) -> dict[str, Any]:
    """Blocks without a window have no rotary positions, in a model that has windows."""
    depth, types = config["num_hidden_layers"], config.get("layer_types")
    if config.get("sliding_window", 4096) is None:
        return {}
    slides = [exaone4_slides(config, i) for i in range(depth)] if types is None else ["sliding" in t for t in types]
    return {"no_rope_layers": [int(slide) for slide in slides]}


def exaone4_write(config: DecoderConfig) -> dict[str, Any]:
    """Write a window where every block is without rotary positions: a model without windows rotates in all blocks."""
    return {"sliding_window": 4096} if config.no_rope_layers and config.sliding_window is None else {}


def _cohere2_read(config: Config) -> dict[str, Any]:
    """Blocks without a window have no rotary positions."""
    depth, types = config["num_hidden_layers"], config.get("layer_types")
    slides = [_cohere2_slides(config, i) for i in range(depth)] if types is None else ["sliding" in t for t in types]
    return {"no_rope_layers": [int(slide) for slide in slides][:depth]}


def _cohere2_slides(config: Config, block: int) -> bool:
    return (block + 1) % number_of(config, "sliding_window_pattern", 4, 1) != 0


def _stablelm_read(config: Config) -> dict[str, Any]:
    return {"shared_norm": bool(config.get("use_parallel_residual", False))}


def _gemma_read(config: Config) -> dict[str, Any]:
    act = config.get("hidden_act", "gelu_pytorch_tanh")
    return {"hidden_act": "gelu_pytorch_tanh" if act == "gelu" else act}  # as transformers reads the first files


def _gemma_write(config: DecoderConfig) -> dict[str, Any]:
    return {"hidden_act": config.hidden_act}


def _opt_width(config: Config) -> int:
    """Return the width of the embeddings; 0: the model's width."""
    width = (
        config["hidden_size"]
        if config.get("word_embed_proj_dim") is None
        else number_of(config, "word_embed_proj_dim", None, 1)
    )
    return 0 if width == config["hidden_size"] else width


def _opt_read(config: Config) -> dict[str, Any]:
    before = config.get("do_layer_norm_before", True)
    if not isinstance(before, bool):
        raise ValueError(f"do_layer_norm_before is {str(before)[:60]}, but must be true or false.")
    return {"embedding_size": _opt_width(config), "norm_place": "before" if before else "sum"}


def _opt_write(config: DecoderConfig) -> dict[str, Any]:
    width = config.embedding_size or config.hidden_size
    return {"word_embed_proj_dim": width, "do_layer_norm_before": config.norm_place == "before"}


def _bloom_read(config: Config) -> dict[str, Any]:
    return {"intermediate_size": 4 * config.get("hidden_size", 64)}


def _gptj_read(config: Config) -> dict[str, Any]:
    rotated, width = config.get("rotary_dim", 64), config["n_embd"] // max(config["n_head"], 1)
    if type(rotated) is not int or not 0 < rotated <= width:
        raise ValueError(f"rotary_dim is {rotated!r}, but must be from 2 to n_embd / n_head = {width}.")
    factor = rotated / width
    while int(width * factor) < rotated:  # the quotient was rounded down
        factor = math.nextafter(factor, 2.0)
    return {"partial_rotary_factor": factor, "intermediate_size": _whole(config, "n_inner", 4 * config["n_embd"])}


def _gptj_write(config: DecoderConfig) -> dict[str, Any]:
    return {"rotary_dim": config.rotary_dim, "n_inner": config.intermediate_size, "embd_pdrop": config.dropout}


def _gpt_neo_read(config: Config) -> dict[str, Any]:
    """``attention_types`` are pairs of a list of ``global`` and ``local``, and a number of repetitions."""
    types, depth = config.get("attention_types") or [[["global", "local"], 12]], config["num_layers"]
    names = {"global": "full_attention", "local": "sliding_attention"}
    words: list[str] = []
    for pair in types if isinstance(types, (list, tuple)) else ():
        kinds, count = pair if isinstance(pair, (list, tuple)) and len(pair) == 2 else ((), 0)
        if isinstance(kinds, (list, tuple)) and type(count) is int:
            words += list(kinds) * min(count, depth)
    if len(words) != depth or not all(isinstance(kind, str) and kind in names for kind in words):
        raise ValueError(
            f"attention_types has {len(words)} blocks, but num_layers is {depth}. Give pairs of a list of 'global' and "
            "'local' and a number of its repetitions, in all one word for each block."
        )
    return {
        "layer_types": [names[kind] for kind in words],
        "intermediate_size": _whole(config, "intermediate_size", 4 * config["hidden_size"]),
    }


def _gpt_neo_write(config: DecoderConfig) -> dict[str, Any]:
    kinds = ["global" if config.window_of(i) is None else "local" for i in range(config.num_hidden_layers)]
    return {
        "attention_types": [[kinds, 1]],
        "window_size": config.sliding_window or 256,
        "intermediate_size": config.intermediate_size,
        "embed_dropout": config.dropout,
    }


def _helium_read(config: Config) -> dict[str, Any]:
    heads, dim, width = config["num_attention_heads"], config.get("head_dim", 128), config["hidden_size"]
    if dim and heads * dim != width:
        raise ValueError(
            f"helium with num_attention_heads={heads} of head_dim={dim} is not implemented for hidden_size={width}, "
            "which transformers' output projection takes. Give head_dim = hidden_size / num_attention_heads."
        )
    return {}


def _hunyuan_read(config: Config) -> dict[str, Any]:
    """Scaling with a fixed ``alpha`` is a larger base of the rotary wavelengths."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    alpha, dim = rope.get("alpha"), _head_dim(config)
    if rope.get("rope_type", rope.get("type")) != "dynamic" or not alpha:
        return {}
    if type(alpha) not in (int, float) or not 0 < alpha < math.inf or dim <= 2:
        raise ValueError(f"alpha is {alpha!r}, but must be a number above 0, for heads of more than 2 channels.")
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 1e4)
    return {"rope_theta": theta * alpha ** (dim / (dim - 2)), "rope_scaling": None}


def _seed_oss_write(config: DecoderConfig) -> dict[str, Any]:
    return {"attention_dropout": 0.0}


def _hyperclova_read(config: Config) -> dict[str, Any]:
    behind = config.get("use_post_norm", True)
    if type(behind) is not bool:
        raise ValueError(f"use_post_norm is {behind!r}, but must be true or false.")
    options: dict[str, Any] = {"norm_place": "both" if behind else "before"}
    if config.get("attention_multiplier") is None:
        options["attention_multiplier"] = _head_dim(config) ** -0.5
    return options


def _head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // max(config["num_attention_heads"], 1))


def _hyperclova_write(config: DecoderConfig) -> dict[str, Any]:
    return {"use_post_norm": config.norm_place == "both"}


def _internlm3_read(config: Config) -> dict[str, Any]:
    """Published files have ``qkv_bias`` and ``bias`` for ``attention_bias`` and ``mlp_bias``, which must be equal."""
    attention, mlp = (config.get(new, config.get(old, False)) for new, old in _INTERNLM3_BIASES)
    if type(attention) is not bool or attention != mlp:
        raise ValueError(
            f"qkv_bias is {attention!r} and bias is {mlp!r}, but InternLM3 has one setting for all biases. Write "
            "true or false for both."
        )
    return dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), attention)


_INTERNLM3_BIASES = (("attention_bias", "qkv_bias"), ("mlp_bias", "bias"))


def _internlm3_write(config: DecoderConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}


def _falcon_norms(config: Config) -> int:
    """Return the number of norms of a block with the new architecture."""
    return _whole(config, "num_ln_in_parallel_attn", 2)


def _falcon_read(config: Config) -> dict[str, Any]:
    heads, new = config["num_attention_heads"], bool(config.get("new_decoder_architecture", False))
    parallel = new or bool(config.get("parallel_attn", True))
    return {
        "alibi": "rounded" if config.get("alibi") else "",
        "num_key_value_heads": _whole(config, "num_kv_heads", heads)
        if new
        else (1 if config.get("multi_query", True) else heads),
        "intermediate_size": _whole(config, "ffn_hidden_size", 4 * config["hidden_size"]),
        "parallel_residual": parallel,
        "shared_norm": parallel and (not new or _falcon_norms(config) == 1),
    }


def _falcon_write(config: DecoderConfig) -> dict[str, Any]:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    new = config.parallel_residual and (not config.shared_norm or kv_heads not in (1, heads))
    return {
        "alibi": config.alibi == "rounded",
        "num_kv_heads": kv_heads,
        "new_decoder_architecture": new,
        "num_ln_in_parallel_attn": (1 if config.shared_norm else 2) if new else None,
        "multi_query": kv_heads == 1,
        "parallel_attn": config.parallel_residual,
        "ffn_hidden_size": config.intermediate_size,
    }


# --------------------------------------------------------------------------------------------------------- the families

_USE_BIAS: dict[str, Key] = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), ("use_bias", True))
_GEMMA = like(
    LLAMA,
    "Gemma",
    plan=gemma_plan,
    config=DecoderConfig,
    keys={**TIED, **ATTENTION_BIAS, "num_key_value_heads": 16, "head_dim": 256},
    flags={"norm": "rms_offset", "scale_embedding": True},
    only={"hidden_act": ("gelu_pytorch_tanh", "gelu_new", "gelu", "silu", "relu")},
    read=_gemma_read,
    write=_gemma_write,
)
_CAPS: dict[str, Key] = {"hidden_act": ("hidden_activation", "gelu_pytorch_tanh"), "query_pre_attn_scalar": 256}
_NEOX_KEYS: dict[str, Key] = COMMON | {
    "hidden_act": ("hidden_act", "gelu"),
    "rms_norm_eps": ("layer_norm_eps", 1e-5),
}
MULTIPLIERS: dict[str, Key] = {
    name: (name, 1.0) for name in ("embedding_multiplier", "attention_multiplier", "residual_multiplier")
}
_QWEN2 = like(
    LLAMA,
    "Qwen2",
    keys={"num_key_value_heads": 32},
    flags={"qkv_bias": True},
    window="flag types",
    window_size=4096,
    slides=lambda config, block: block >= config.get("max_window_layers", 28),
)
OLMO2 = like(
    LLAMA,
    "Olmo2",
    plan=olmo2_plan,
    config=DecoderConfig,
    names=OLMO2_NAMES,
    keys={"rms_norm_eps": 1e-5, **ATTENTION_BIAS},
    flags={"norm_place": "after", "qk_norm_all_heads": True},
)
_GLM = like(
    LLAMA,
    "Glm",
    config=DecoderConfig,
    names=_GLM_NAMES,
    keys={
        **_HIDDEN_ACT,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-7,
        "qkv_bias": ("attention_bias", True),
    },
    flags={"rope_interleave": True},
    only=_ANY_ACT,
    rope={"partial_rotary_factor": 0.5},
)
_LAYER_NORM_EPS: dict[str, Key] = {"rms_norm_eps": ("layer_norm_eps", 1e-5)}
_COHERE = like(
    LLAMA,
    "Cohere",
    plan=cohere_plan,
    config=DecoderConfig,
    keys={
        **TIED,
        **_HIDDEN_ACT,
        **_LAYER_NORM_EPS,
        **ATTENTION_BIAS,
        "logit_scale": 0.0625,
        "qk_norm_per_head": ("use_qk_norm", False),
    },
    flags={"norm": "layer_weight", "parallel_residual": True, "shared_norm": True, "rope_interleave": True},
    only=_ANY_ACT,
    rope={"rope_theta": 5e5},
)

DENSE: dict[str, Family] = {
    "gpt2": Family(
        "GPT2",
        gpt2_plan,
        GPTConfig,
        _GPT2_NAMES,
        {
            **_GPT2_SIZES,
            "dropout": ("resid_pdrop", 0.1),
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-5,
        },
        only={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        read=_gpt2_read,
        write=_gpt2_write,
        aliases=_GPT2_ALIASES,
        embedding_dropout="embd_pdrop",
    ),
    "llama": like(LLAMA, "Llama", keys=BIASES),
    "mistral": like(LLAMA, "Mistral", keys={"num_key_value_heads": 8}, window="all", window_size=4096),
    "ministral": like(
        LLAMA,
        "Ministral",
        keys={"num_key_value_heads": 8},
        window="types",
        window_size=4096,
    ),
    "ministral3": like(
        LLAMA,
        "Ministral3",
        keys={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
        rope={"llama_4_scaling_beta": 0.0},
        scalings=("yarn",),
        default_rope={"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0}
        | {"original_max_position_embeddings": 16384, "mscale": 1.0, "mscale_all_dim": 1.0}
        | {"llama_4_scaling_beta": 0.1},
        window="all",
    ),
    "internlm3": like(
        LLAMA,
        "Llama",  # transformers' Llama runs it
        keys={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5},
        read=_internlm3_read,
        write=_internlm3_write,
    ),
    "qwen2": _QWEN2,
    "qwen3": like(
        _QWEN2,
        "Qwen3",
        keys={**ATTENTION_BIAS, "head_dim": 128},
        flags={"qkv_bias": None, "qk_norm": True},
    ),
    "smollm3": like(
        LLAMA,
        "SmolLM3",
        keys={**BIASES, **TIED, "num_key_value_heads": 4},
        rope={"rope_theta": 2e6},
        window="flag types",
        slides=lambda config, block: not smollm3_read(config)["no_rope_layers"][block],
        read=smollm3_read,
        write=smollm3_write,
    ),
    "phi3": like(
        LLAMA,
        "Phi3",
        plan=phi3_plan,
        config=DecoderConfig,
        names=_PHI3_NAMES,
        keys={"rms_norm_eps": 1e-5, "dropout": ("resid_pdrop", 0.0)},
        rope={"partial_rotary_factor": 1.0, "original_max_position_embeddings": 4096},
        scalings=("longrope",),
        window="all",
    ),
    "olmo2": OLMO2,
    "olmo3": like(
        OLMO2,
        "Olmo3",
        rope={"rope_theta": 5e5, "rope_local_base_freq": 5e5},
        window="types",
        window_size=4096,
        slides=lambda config, block: (block + 1) % 4 != 0,
    ),
    "exaone4": like(
        OLMO2,
        "Exaone4",
        plan=llama_plan,
        keys={"num_key_value_heads": 32, "qkv_bias": None, "out_bias": None},
        flags={"qk_norm_all_heads": None, "qk_norm": True},
        window="types",
        window_size=4096,
        slides=exaone4_slides,
        read=exaone4_read,
        write=exaone4_write,
    ),
    "arcee": like(
        LLAMA,
        "Arcee",
        config=DecoderConfig,
        names=_ARCEE_NAMES,
        keys={**BIASES, "rms_norm_eps": 1e-5, "hidden_act": ("hidden_act", "relu2")},
        flags={"gated": False},
        only={"hidden_act": ("relu2", "relu", "silu", "gelu", "gelu_new", "gelu_pytorch_tanh")},
    ),
    "starcoder2": like(
        LLAMA,
        "Starcoder2",
        config=DecoderConfig,
        names=_STARCODER2_NAMES,
        keys={
            **TIED,
            **_USE_BIAS,
            "rms_norm_eps": ("norm_epsilon", 1e-5),
            "initializer_range": 0.018042,
            "num_key_value_heads": 2,
            "hidden_act": ("hidden_act", "gelu_pytorch_tanh"),
            "dropout": ("residual_dropout", 0.0),
        },
        flags=_LAYER_NORM,
        only={"hidden_act": ("gelu_pytorch_tanh", "gelu_new", "gelu", "silu", "relu")},
        window="all",
        embedding_dropout="embedding_dropout",
    ),
    "granite": like(
        LLAMA,
        "Granite",
        config=DecoderConfig,
        keys={
            **BIASES,
            **_HIDDEN_ACT,
            **MULTIPLIERS,
            "logit_scale": ("logits_scaling", 1.0),
        },
        only=_ANY_ACT,
        inverse=("logit_scale",),
    ),
    "hyperclovax": like(
        LLAMA,
        "HyperCLOVAX",
        config=DecoderConfig,
        names=_HYPERCLOVA_NAMES,
        keys={
            **BIASES,
            **_HIDDEN_ACT,
            **{f"{name}_multiplier": (f"{name}_multiplier", 1.0) for name in ("embedding", "residual")},
            "attention_multiplier": ("attention_multiplier", None),
            "logit_scale": ("logits_scaling", 1.0),
        },
        only=_ANY_ACT,
        read=_hyperclova_read,
        write=_hyperclova_write,
    ),
    "cohere": _COHERE,
    "cohere2": like(
        _COHERE,
        "Cohere2",
        plan=llama_plan,
        keys={"qk_norm_per_head": None},
        rope=ROPE,
        window="types",
        window_size=4096,
        slides=_cohere2_slides,
        read=_cohere2_read,
    ),
    "glm": _GLM,
    "glm4": like(_GLM, "Glm4", names=_GLM4_NAMES, flags={"norm_place": "both"}),
    "ernie4_5": like(
        LLAMA,
        "Ernie4_5",
        config=DecoderConfig,
        keys={
            **TIED,
            **_HIDDEN_ACT,
            **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), ("use_bias", False)),
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
        },
        flags={"rope_interleave": True},
        only={"hidden_act": _ACTS, "attention_dropout": None},
        rope={"rope_theta": 5e5},
    ),
    "helium": like(
        LLAMA,
        "Helium",
        config=DecoderConfig,
        keys={
            **_HIDDEN_ACT,
            "num_key_value_heads": 20,
            "head_dim": 128,
            "rms_norm_eps": 1e-8,
            "qkv_bias": ("attention_bias", False),
            "mlp_bias": False,
        },
        flags={"rope_interleave": True},
        only=_ANY_ACT,
        rope={"rope_theta": 1e5},
        read=_helium_read,
    ),
    "seed_oss": like(
        LLAMA,
        "SeedOss",
        config=DecoderConfig,
        keys={
            **_HIDDEN_ACT,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "qkv_bias": ("attention_bias", True),
            "out_bias": ("attention_out_bias", False),
            "mlp_bias": False,
            "dropout": ("residual_dropout", 0.1),
        },
        only={"hidden_act": _ACTS, "attention_dropout": None},
        write=_seed_oss_write,
    ),
    "stablelm": like(
        LLAMA,
        "StableLm",
        plan=stablelm_plan,
        config=DecoderConfig,
        names=_STABLELM_NAMES,
        keys={
            **_HIDDEN_ACT,
            **_LAYER_NORM_EPS,
            "num_key_value_heads": 32,
            "head_dim": None,
            "qkv_bias": ("use_qkv_bias", False),
            "qk_norm_per_head": ("qk_layernorm", False),
            "parallel_residual": ("use_parallel_residual", False),
            "dropout": ("hidden_dropout", 0.0),
        },
        flags={"norm": "layer"},
        only=_ANY_ACT,
        rope={"partial_rotary_factor": 0.25},
        read=_stablelm_read,
    ),
    "nemotron": like(
        LLAMA,
        "Nemotron",
        config=DecoderConfig,
        names=_ARCEE_NAMES,
        keys={
            **BIASES,
            "hidden_act": ("hidden_act", "relu2"),
            "rms_norm_eps": ("norm_eps", 1e-5),
            "initializer_range": 0.0134,
        },
        flags={"norm": "layer_offset", "gated": False},
        only={"hidden_act": ("relu2", *_ACTS[:-1])},
        rope={"partial_rotary_factor": 0.5},
    ),
    "jais2": like(
        LLAMA,
        "Jais2",
        config=DecoderConfig,
        names=_ARCEE_NAMES,
        keys={
            **_LAYER_NORM_EPS,
            **dict.fromkeys(("qkv_bias", "out_bias"), ("attention_bias", True)),
            "mlp_bias": True,
            "hidden_act": ("hidden_act", "relu2"),
        },
        flags=_LAYER_NORM,
        only={"hidden_act": ("relu2", *_ACTS[:-1])},
    ),
    "nanochat": like(
        LLAMA,
        "NanoChat",
        config=DecoderConfig,
        names=_NANOCHAT_NAMES,
        keys={**ATTENTION_BIAS, "hidden_act": ("hidden_act", "relu2"), "final_logit_softcapping": 15.0},
        flags={"norm": "rms_plain", "qk_norm": True, "qk_norm_after": True, "gated": False}
        | {"embedding_norm": True, "rope_reversed": True},
        only={"hidden_act": ("relu2", *_ACTS[:-1])},
    ),
    "hunyuan_v1_dense": like(
        LLAMA,
        "HunYuanDenseV1",
        config=DecoderConfig,
        names=_HUNYUAN_NAMES,
        keys={**ATTENTION_BIAS, **_HIDDEN_ACT, "rms_norm_eps": 1e-5},
        flags={"qk_norm": True, "qk_norm_after": True},
        only=_ANY_ACT,
        read=_hunyuan_read,
    ),
    "olmo": like(
        LLAMA,
        "Olmo",
        config=DecoderConfig,
        keys={
            **ATTENTION_BIAS,
            **_HIDDEN_ACT,
            "rms_norm_eps": None,
            "clip_qkv": ("clip_qkv", None),
        },
        flags={"norm": "layer_plain", "rms_norm_eps": 1e-5},
        only=_ANY_ACT,
    ),
    "gemma": _GEMMA,
    "gemma2": like(
        _GEMMA,
        "Gemma2",
        names=_GEMMA2_NAMES,
        keys={**_CAPS, "num_key_value_heads": 4, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        flags={"norm_place": "both"},
        window="types",
        window_size=4096,
        slides=lambda config, block: bool((block + 1) % 2),
        read=None,
        write=None,
    ),
    "vaultgemma": like(
        _GEMMA,
        "VaultGemma",
        names=_VAULTGEMMA_NAMES,
        keys={**_CAPS, "num_key_value_heads": 4, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        window="types",
        window_size=4096,
        slides=lambda config, block: bool((block + 1) % 2),
        read=None,
        write=None,
    ),
    "gemma3_text": like(
        _GEMMA,
        "Gemma3",
        names=_GEMMA2_NAMES,
        keys={
            **_CAPS,
            "vocab_size": 262_208,
            "max_position_embeddings": 131_072,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "final_logit_softcapping": ("final_logit_softcapping", None),
        },
        flags={"norm_place": "both", "qk_norm": True},
        only={"use_bidirectional_attention": (False, None), "attn_logit_softcapping": (None,)},
        rope={"rope_theta": 1e6, "rope_local_base_freq": 1e4},
        window="types",
        window_size=4096,
        slides=lambda config, block: bool((block + 1) % number_of(config, "sliding_window_pattern", 6, 1)),
        read=None,
        write=None,
    ),
    "gpt_neox": Family(
        "GPTNeoX",
        neox_plan,
        DecoderConfig,
        _NEOX_NAMES,
        {
            **_NEOX_KEYS,
            "dropout": ("hidden_dropout", 0.0),
            "parallel_residual": ("use_parallel_residual", True),
            "qkv_bias": ("attention_bias", True),
            "out_bias": ("attention_bias", True),
        },
        {**_LAYER_NORM, "mlp_bias": True},
        NO_DROPOUT,
        {**ROPE, "partial_rotary_factor": 0.25, "rotary_emb_base": 1e4, "rotary_pct": 0.25},
        embedding_dropout="hidden_dropout",
    ),
    "gptj": Family(
        "GPTJ",
        gptj_plan,
        DecoderConfig,
        _GPTJ_NAMES,
        {
            **_GPT2_SIZES,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
            "rms_norm_eps": ("layer_norm_epsilon", 1e-5),
            "hidden_act": ("activation_function", "gelu_new"),
            "dropout": ("resid_pdrop", 0.0),
        },
        {**_LAYER_NORM, "parallel_residual": True, "shared_norm": True, "head_bias": True, "mlp_bias": True}
        | {"rope_interleave": True},
        {"attn_pdrop": (0.0, None)},
        aliases=_GPT2_ALIASES,
        read=_gptj_read,
        write=_gptj_write,
        embedding_dropout="embd_pdrop",
    ),
    "gpt_neo": Family(
        "GPTNeo",
        gptj_plan,
        DecoderConfig,
        _GPT_NEO_NAMES,
        {
            **{name: name for name in ("vocab_size", "max_position_embeddings", "hidden_size")},
            **TIED,
            "num_hidden_layers": "num_layers",
            "num_attention_heads": "num_heads",
            "initializer_range": 0.02,
            "rms_norm_eps": ("layer_norm_epsilon", 1e-5),
            "hidden_act": ("activation_function", "gelu_new"),
            "dropout": ("resid_dropout", 0.0),
            "sliding_window": ("window_size", 256),
        },
        {**_LAYER_NORM, "learned_positions": True, "out_bias": True, "mlp_bias": True, "attention_multiplier": 1.0},
        NO_DROPOUT,
        aliases={"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
        read=_gpt_neo_read,
        write=_gpt_neo_write,
        embedding_dropout="embed_dropout",
    ),
    "bloom": Family(
        "Bloom",
        None,
        DecoderConfig,
        _BLOOM_NAMES,
        {
            **TIED,
            "vocab_size": "vocab_size",
            "hidden_size": 64,
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": ("seq_length", 2048),
            "initializer_range": 0.02,
            "rms_norm_eps": ("layer_norm_epsilon", 1e-5),
            "dropout": ("hidden_dropout", 0.0),
        },
        {**_LAYER_NORM, "embedding_norm": True, "alibi": "added", "hidden_act": "gelu_bloom"}
        | {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
        {**NO_DROPOUT, "apply_residual_connection_post_layernorm": (False,)},
        aliases={"num_attention_heads": "n_head", "num_hidden_layers": "n_layer", "n_embed": "hidden_size"},
        read=_bloom_read,
    ),
    "phi": Family(
        "Phi",
        llama_plan,
        DecoderConfig,
        _PHI_NAMES,
        {
            **_NEOX_KEYS,
            "num_key_value_heads": 0,
            "hidden_act": ("hidden_act", "gelu_new"),
            "dropout": ("resid_pdrop", 0.0),
        },
        {**_LAYER_NORM, "parallel_residual": True, "shared_norm": True, "head_bias": True}
        | {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
        {**NO_DROPOUT, "qk_layernorm": (False,)},
        {**ROPE, "partial_rotary_factor": 0.5},
        embedding_dropout="embd_pdrop",
    ),
    "opt": Family(
        "OPT",
        opt_plan,
        DecoderConfig,
        _opt_names,
        {
            **{name: name for name in SIZES},
            **TIED,
            **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), ("enable_bias", True)),
            "intermediate_size": "ffn_dim",
            "hidden_act": ("activation_function", "relu"),
            "initializer_range": ("init_std", 0.02),
            "dropout": 0.1,
        },
        {**_LAYER_NORM, "learned_positions": True, "position_offset": 2, "rms_norm_eps": 1e-5},
        {
            **NO_DROPOUT,
            "_remove_final_layer_norm": (False,),
            "layer_norm_elementwise_affine": (True,),
            "layerdrop": (0.0,),
        },
        read=_opt_read,
        write=_opt_write,
    ),
    "falcon": Family(
        "Falcon",
        falcon_plan,
        DecoderConfig,
        _falcon_names,
        {
            **{name: name for name in SIZES if name != "max_position_embeddings"},
            **TIED,
            **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), ("bias", False)),
            "max_position_embeddings": 2048,
            "initializer_range": 0.02,
            "rms_norm_eps": ("layer_norm_epsilon", 1e-5),
            "hidden_act": ("activation", "gelu"),
            "dropout": ("hidden_dropout", 0.0),
        },
        _LAYER_NORM,
        {**NO_DROPOUT, "alibi": (False, None, True)},
        ROPE,
        read=_falcon_read,
        write=_falcon_write,
    ),
}
