"""Hybrids of attention and recurrent layers: their names, and their entries in ``FAMILIES``.

``hybrids.py`` reads the settings of the recurrent layers.
"""

from __future__ import annotations

from typing import Any

from ..config import DecoderConfig
from . import hybrids
from .dense_families import OLMO2
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
    Config,
    Family,
    block_names,
    end_names,
    like,
)
from .mixture_families import MIXTRAL, QWEN2_MOE_NAMES, QWEN_MOE_KEYS, mixtral_read, qwen3_moe_write
from .names import Names

# -------------------------------------------------------------------------------------------------- names of parameters

_BAMBA_NAMES: Names = {
    **end_names("model.embed_tokens", "model.final_layernorm"),
    **ATTENTION,
    **block_names(
        1,
        norm1=f"{AT}.input_layernorm.*",
        norm2=f"{AT}.pre_ff_layernorm.*",
        mlp__gate_up=(f"{AT}.feed_forward.gate_proj.*", f"{AT}.feed_forward.up_proj.*"),
        mlp__down=f"{AT}.feed_forward.down_proj.*",
    ),
}

# -------------------------------------------------------------------------------------- settings that are no single key


def _qwen3_next_read(config: Config) -> dict[str, Any]:
    return {**hybrids.qwen_read(config), **mixtral_read(config)}


def _qwen3_next_write(config: DecoderConfig) -> dict[str, Any]:
    return {**hybrids.qwen_write(config), **qwen3_moe_write(config)}


# --------------------------------------------------------------------------------------------------------- the families


HYBRIDS: dict[str, Family] = {
    "qwen3_next": like(
        MIXTRAL,
        "Qwen3Next",
        names=hybrids.qwen_names(QWEN2_MOE_NAMES, fused=True),
        keys={
            **QWEN_MOE_KEYS,
            **ATTENTION_BIAS,
            "norm_topk_prob": True,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        flags={"norm": "rms_offset", "qk_norm": True, "attn_output_gate": True, "shared_expert_gate": True},
        only={"attention_bias": None, "router_jitter_noise": None},
        rope={"partial_rotary_factor": 0.25},
        scalings=(),
        window="",
        read=_qwen3_next_read,
        write=_qwen3_next_write,
        blocks=False,
    ),
    "qwen3_5_text": like(
        LLAMA,
        "Qwen3_5",
        plan=None,
        blocks=False,
        config=DecoderConfig,
        names=hybrids.qwen_names(LLAMA_NAMES, fused=False),
        keys={**ATTENTION_BIAS, "num_key_value_heads": 4, "head_dim": 256},
        flags={"norm": "rms_offset", "qk_norm": True, "attn_output_gate": True},
        rope={"partial_rotary_factor": 0.25},
        scalings=(),
        read=hybrids.qwen_read,
        write=hybrids.qwen_write,
    ),
    "olmo_hybrid": like(
        OLMO2,
        "OlmoHybrid",
        plan=None,
        blocks=False,
        names=hybrids.olmo_names({**LLAMA_ENDS, **ATTENTION, **GATED}),
        keys={"rms_norm_eps": 1e-6},
        flags={"norm_place": "after_attention"},
        read=hybrids.olmo_read,
        write=hybrids.olmo_write,
    ),
    "nemotron_h": Family(
        "NemotronH",
        config=DecoderConfig,
        names=hybrids.nemotron_names,
        keys={
            **{ours: key for ours, key in COMMON.items() if ours != "num_hidden_layers"},
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": ("layer_norm_epsilon", 1e-5),
            "hidden_act": ("mlp_hidden_act", "relu2"),
            "mlp_bias": False,
        },
        flags={"gated": False, "one_branch": True},
        only={
            **NO_DROPOUT,
            "mamba_hidden_act": ("silu",),
            "num_nextn_predict_layers": (0,),
        },
        read=hybrids.nemotron_read,
        write=hybrids.nemotron_write,
        blocks=False,
    ),
    "bamba": like(
        LLAMA,
        "Bamba",
        plan=None,
        blocks=False,
        config=DecoderConfig,
        names=hybrids.bamba_names(_BAMBA_NAMES),
        keys={**BIASES, "num_key_value_heads": 8, "head_dim": None, "rms_norm_eps": 1e-5},
        rope={"partial_rotary_factor": 0.5},
        scalings=(),
        read=hybrids.bamba_read,
        write=hybrids.bamba_write,
    ),
    "mamba2": Family(
        "Mamba2",
        config=DecoderConfig,
        names=hybrids.mamba2_names,
        keys={
            **{name: name for name in ("vocab_size", "hidden_size", "num_hidden_layers")},
            "tie_word_embeddings": False,
            "initializer_range": 0.1,
            "rms_norm_eps": ("layer_norm_epsilon", 1e-5),
        },
        flags={"one_branch": True},
        only={"hidden_act": ("silu",)},
        read=hybrids.mamba2_read,
        write=hybrids.mamba2_write,
        blocks=False,
    ),
}
