"""Families of mixtures of experts: their keys, names and settings, and their entries in ``FAMILIES``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..config import DecoderConfig, DeepseekConfig, MixtralConfig
from .dense_families import (
    MULTIPLIERS,
    OLMO2_NAMES,
    exaone4_read,
    exaone4_slides,
    exaone4_write,
    number_of,
    smollm3_read,
    smollm3_write,
)
from .family import (
    AT,
    ATTENTION,
    ATTENTION_BIAS,
    COMMON,
    LLAMA,
    LLAMA_ENDS,
    LLAMA_NAMES,
    NORMS,
    ROPE,
    SILU,
    TIED,
    Config,
    Family,
    Key,
    block_names,
    like,
)
from .names import Names, OneRow, PerExpert, Repeated, Transposed

# -------------------------------------------------------------------------------------------------- keys of config.json

_NO_BIASES: dict[str, tuple[Any, ...]] = {"attention_bias": (False,)}

# -------------------------------------------------------------------------------------------------- names of parameters


def _with_experts(mlp: str, first: tuple[str, ...], last: str) -> Names:
    """Return Llama's table with the names of a mixture of experts.

    Files have a tensor for each expert. The models of Transformers 5 have one tensor for all experts.
    """
    block, fused = f"{AT}.{mlp}", f"{AT}.mlp.experts"
    return {
        **LLAMA_NAMES,
        "layers.{i+1}.mlp.router.weight": [f"{block}.gate.weight", f"{AT}.mlp.gate.weight"],
        "layers.{i+1}.mlp.routed.gate_up": [
            PerExpert(tuple(f"{block}.experts.{{e}}.{name}.weight" for name in first)),
            f"{fused}.gate_up_proj",
        ],
        "layers.{i+1}.mlp.routed.down": [
            PerExpert((f"{block}.experts.{{e}}.{last}.weight",)),
            f"{fused}.down_proj",
        ],
        "layers.{i+1}.mlp.past_loads": (),  # the loads of the step before, which only training needs
    }


_MIXTRAL_NAMES = _with_experts("block_sparse_moe", ("w1", "w3"), "w2")
_EXPERT_NAMES = _with_experts("mlp", ("gate_proj", "up_proj"), "down_proj")
QWEN2_MOE_NAMES: Names = {
    **_EXPERT_NAMES,
    "layers.{i+1}.mlp.shared.gate_up": tuple(f"{AT}.mlp.shared_expert.{name}_proj.weight" for name in ("gate", "up")),
    "layers.{i+1}.mlp.shared.down": f"{AT}.mlp.shared_expert.down_proj.weight",
    "layers.{i+1}.mlp.shared_gate": f"{AT}.mlp.shared_expert_gate.weight",
}
_GPT_OSS_NAMES: Names = {
    **LLAMA_ENDS,
    **ATTENTION,
    **NORMS,
    "layers.{i+1}.attention.sinks": f"{AT}.self_attn.sinks",
    "layers.{i+1}.mlp.router.*": f"{AT}.mlp.router.*",
    "layers.{i+1}.mlp.routed.gate_up": Transposed(f"{AT}.mlp.experts.gate_up_proj"),
    "layers.{i+1}.mlp.routed.gate_up_bias": f"{AT}.mlp.experts.gate_up_proj_bias",
    "layers.{i+1}.mlp.routed.down": Transposed(f"{AT}.mlp.experts.down_proj"),
    "layers.{i+1}.mlp.routed.down_bias": f"{AT}.mlp.experts.down_proj_bias",
    "layers.{i+1}.mlp.past_loads": (),
}
_GRANITE_MOE = f"{AT}.block_sparse_moe"
_GRANITE_MOE_NAMES: Names = {  # names in files, then those of models of Transformers 5
    **LLAMA_ENDS,
    **ATTENTION,
    **NORMS,
    "layers.{i+1}.mlp.router.weight": [f"{_GRANITE_MOE}.router.layer.weight", f"{_GRANITE_MOE}.router.weight"],
    "layers.{i+1}.mlp.routed.gate_up": [f"{_GRANITE_MOE}.input_linear.weight", f"{_GRANITE_MOE}.experts.gate_up_proj"],
    "layers.{i+1}.mlp.routed.down": [f"{_GRANITE_MOE}.output_linear.weight", f"{_GRANITE_MOE}.experts.down_proj"],
    "layers.{i+1}.mlp.past_loads": (),
}
_DEEPSEEK_NAMES: Names = {
    **_EXPERT_NAMES,
    **block_names(
        1,
        attention__q=f"{AT}.self_attn.q_proj.*",
        attention__q_a=f"{AT}.self_attn.q_a_proj.*",
        attention__q_a_norm=f"{AT}.self_attn.q_a_layernorm.*",
        attention__q_b=f"{AT}.self_attn.q_b_proj.*",
        attention__kv_a=f"{AT}.self_attn.kv_a_proj_with_mqa.*",
        attention__kv_a_norm=f"{AT}.self_attn.kv_a_layernorm.*",
        attention__kv_b=f"{AT}.self_attn.kv_b_proj.*",
    ),
    "layers.{i+1}.mlp.shared.gate_up": (
        f"{AT}.mlp.shared_experts.gate_proj.weight",
        f"{AT}.mlp.shared_experts.up_proj.weight",
    ),
    "layers.{i+1}.mlp.shared.down": f"{AT}.mlp.shared_experts.down_proj.weight",
}
_DEEPSEEK_V3_NAMES: Names = {
    **_DEEPSEEK_NAMES,
    "layers.{i+1}.mlp.router.correction_bias": f"{AT}.mlp.gate.e_score_correction_bias",
}
_FEED = f"{AT}.feed_forward"
_LLAMA4_NAMES: Names = {
    **LLAMA_ENDS,
    **ATTENTION,
    **NORMS,
    **block_names(1, mlp__gate_up=(f"{_FEED}.gate_proj.*", f"{_FEED}.up_proj.*"), mlp__down=f"{_FEED}.down_proj.*"),
    "layers.{i+1}.mlp.router.weight": f"{_FEED}.router.weight",
    "layers.{i+1}.mlp.routed.gate_up": Transposed(f"{_FEED}.experts.gate_up_proj"),
    "layers.{i+1}.mlp.routed.down": Transposed(f"{_FEED}.experts.down_proj"),
    "layers.{i+1}.mlp.shared.gate_up": tuple(f"{_FEED}.shared_expert.{name}_proj.weight" for name in ("gate", "up")),
    "layers.{i+1}.mlp.shared.down": f"{_FEED}.shared_expert.down_proj.weight",
    "layers.{i+1}.mlp.past_loads": (),
}
_SHARED_NAMES: Names = {ours: form for ours, form in _DEEPSEEK_NAMES.items() if ".mlp.shared." in ours}
_GLM4_MOE_NAMES: Names = {
    **_EXPERT_NAMES,
    **_SHARED_NAMES,
    "layers.{i+1}.mlp.router.correction_bias": f"{AT}.mlp.gate.e_score_correction_bias",
}
_ERNIE_MOE_NAMES: Names = {
    **_EXPERT_NAMES,
    **_SHARED_NAMES,
    "layers.{i+1}.mlp.router.correction_bias": [
        OneRow(f"{AT}.mlp.moe_statics.e_score_correction_bias"),
        OneRow(f"{AT}.mlp.gate.moe_statics.e_score_correction_bias"),
    ],
}
_EXAONE_MOE_NAMES: Names = {
    **_GLM4_MOE_NAMES,
    "layers.{i+1}.mlp.router.correction_bias": [
        f"{AT}.mlp.e_score_correction_bias",
        f"{AT}.mlp.gate.e_score_correction_bias",
    ],
}
_MINIMAX_NAMES: Names = {
    **_MIXTRAL_NAMES,
    "layers.{i+1}.mlp.router.correction_bias": [
        f"{AT}.block_sparse_moe.e_score_correction_bias",
        f"{AT}.mlp.e_score_correction_bias",
    ],
}


def _deepseek_v3_names(config: Config) -> Names:
    """Return DeepSeek-V3's table, with the modules of multi-token prediction behind the blocks.

    The embedding is in triax's list a second time, in front of the modules. Each module has a copy of the embedding and
    of the head.
    """
    modules = int(config.get("num_nextn_predict_layers") or 0)
    if not modules:
        return _DEEPSEEK_V3_NAMES
    blocks = {ours: form for ours, form in _DEEPSEEK_V3_NAMES.items() if ours.startswith("layers.{i+1}.")}
    entries = {ours: form for ours, form in _DEEPSEEK_V3_NAMES.items() if not ours.startswith("layers.{")}
    copies = [f"model.layers.{{n+{k}}}." for k in range(modules)]
    tokens, heads = ([copy + name for copy in copies] for name in ("embed_tokens.weight", "shared_head.head.weight"))
    tied = bool(config.get("tie_word_embeddings"))
    entries |= blocks
    entries["layers.0.weight"] = Repeated("model.embed_tokens.weight", (*tokens, *(heads if tied else ())))
    entries["layers.{n+1}.*"] = "model.norm.*"
    for k, theirs in enumerate(copies):
        module = f"layers.{{n+{k + 3}}}."
        for ours, form in blocks.items():
            entries[ours.replace("layers.{i+1}.", f"{module}block.")] = _moved(form, theirs)
        entries |= {f"{module}{name}.weight": f"{theirs}{name}.weight" for name in ("enorm", "hnorm", "eh_proj")}
        entries[f"{module}norm.weight"] = f"{theirs}shared_head.norm.weight"
    if not tied:
        entries[f"layers.{{n+{modules + 3}}}.weight"] = Repeated("lm_head.weight", tuple(heads))
    return entries


def _moved(form: Any, place: str) -> Any:
    """Return a block's name, or several, as those of the block at another place."""
    if isinstance(form, str):
        return form.replace(f"{AT}.", place)
    if isinstance(form, PerExpert):
        return PerExpert(_moved(form.names, place))
    return type(form)(_moved(inner, place) for inner in form)


# -------------------------------------------------------------------------------------- settings that are no single key


def mixtral_read(config: Config) -> dict[str, Any]:
    return {"mlp_only_layers": tuple(config.get("mlp_only_layers") or ())}


def qwen3_moe_write(config: DecoderConfig) -> dict[str, Any]:
    return {"mlp_only_layers": list(config.mlp_only_layers)}


def _gpt_oss_read(config: Config) -> dict[str, Any]:
    kind = config.get("quantization_config") or {"quant_method": "mxfp4"}
    if not isinstance(kind, Mapping) or kind.get("quant_method") != "mxfp4":
        raise ValueError("gpt_oss with quantization_config of another quant_method than 'mxfp4' is not implemented.")
    return {}


def _dense_before(config: Config, first: int) -> tuple[int, ...]:
    """Return the blocks in front of number ``first``. They have no experts."""
    return tuple(range(min(first, config["num_hidden_layers"])))


def _glm4_moe_read(first: int, shared: int | None, width: int | None) -> Callable[[Config], dict[str, Any]]:
    """Return a function that reads the shared experts and the first blocks, which have no experts.

    Args:
        first, shared, width: defaults of the number of these blocks, of the number of shared experts, and of their
            width; None: the key must be there.
    """

    def read(config: Config) -> dict[str, Any]:
        experts = number_of(config, "n_shared_experts", shared, 1) * number_of(config, "moe_intermediate_size", width)
        dense = _dense_before(config, number_of(config, "first_k_dense_replace", first))
        return {"shared_expert_intermediate_size": experts, "mlp_only_layers": dense}

    return read


def _glm4_moe_write(config: DecoderConfig) -> dict[str, Any]:
    experts = config.shared_expert_intermediate_size // config.moe_intermediate_size
    return {"n_shared_experts": experts, "first_k_dense_replace": len(config.mlp_only_layers)}


def _solar_read(config: Config) -> dict[str, Any]:
    """Read the shared experts. transformers' model cannot run with heads that are rotated in part."""
    if (factor := {**config, **(config.get("rope_parameters") or {})}.get("partial_rotary_factor")) not in (None, 1.0):
        raise ValueError(f"solar_open with partial_rotary_factor={factor!r} is not implemented. Leave it out.")
    experts = number_of(config, "n_shared_experts", 1, 1) * number_of(config, "moe_intermediate_size", 1280)
    return {"shared_expert_intermediate_size": experts}


def _exaone_moe_read(config: Config) -> dict[str, Any]:
    types, depth = config.get("mlp_layer_types"), config["num_hidden_layers"]
    if types is None:
        dense = _dense_before(config, number_of(config, "first_k_dense_replace", 1))
    elif not isinstance(types, list) or len(types) < depth or set(types) - {"dense", "sparse"}:
        raise ValueError(f"mlp_layer_types must be a list of 'dense' and 'sparse', one for each of {depth} blocks.")
    else:
        dense = tuple(block for block in range(depth) if types[block] == "dense")
    experts = number_of(config, "num_shared_experts", 1, 1) * number_of(config, "moe_intermediate_size", 1024)
    return {**exaone4_read(config), "shared_expert_intermediate_size": experts, "mlp_only_layers": dense}


def _exaone_moe_write(config: DecoderConfig) -> dict[str, Any]:
    experts = config.shared_expert_intermediate_size // config.moe_intermediate_size
    sparse = [block in config.moe_layers for block in range(config.num_hidden_layers)]
    types = [("dense", "sparse")[is_sparse] for is_sparse in sparse]
    return {**exaone4_write(config), "num_shared_experts": experts, "mlp_layer_types": types}


def _ernie_moe_read(config: Config) -> dict[str, Any]:
    depth, step = config["num_hidden_layers"], number_of(config, "moe_layer_interval", 1, 1)
    end = depth - 1 if config.get("moe_layer_end_index", -1) == -1 else number_of(config, "moe_layer_end_index", None)
    start = number_of(config, "moe_layer_start_index", 1)
    sparse = [block for block in range(depth) if (block + 1) % step == 0 and start <= block <= end]
    experts = number_of(config, "moe_num_shared_experts", 2) * number_of(config, "moe_intermediate_size", 1536)
    dense = tuple(block for block in range(depth) if block not in sparse)
    return {"shared_expert_intermediate_size": experts, "mlp_only_layers": dense}


def _ernie_moe_write(config: DecoderConfig) -> dict[str, Any]:
    sparse = config.moe_layers
    return {
        "moe_num_shared_experts": config.shared_expert_intermediate_size // config.moe_intermediate_size,
        "moe_layer_start_index": sparse[0],
        "moe_layer_end_index": sparse[-1],
        "moe_layer_interval": sparse[1] - sparse[0] if len(sparse) > 1 else sparse[0] + 1,
    }


def _minimax_read(config: Config) -> dict[str, Any]:
    """Read the number of rotated channels, as the published files have it."""
    rope = config.get("rope_parameters") or {}
    if config.get("rotary_dim") is None or {**config, **rope}.get("partial_rotary_factor") is not None:
        return {}
    return {"partial_rotary_factor": number_of(config, "rotary_dim", None, 1) / number_of(config, "head_dim", 128, 1)}


def _llama4_read(config: Config) -> dict[str, Any]:
    depth, sparse = config["num_hidden_layers"], config.get("moe_layers")
    if sparse is None:
        step = number_of(config, "interleave_moe_layer_step", 1, 1)
        sparse = range(step - 1, depth, step)
    elif not isinstance(sparse, list) or any(type(layer) is not int for layer in sparse):
        raise ValueError(f"moe_layers is {str(sparse)[:60]}, but must be a list of numbers of blocks.")
    rotated = smollm3_read(config)["no_rope_layers"]
    types = config.get("layer_types") or [("full_attention", "chunked_attention")[bool(flag)] for flag in rotated]
    tuned = config.get("attn_temperature_tuning", True)
    return {
        "mlp_only_layers": tuple(block for block in range(depth) if block not in sparse),
        "no_rope_layers": tuple(rotated),
        "layer_types": tuple(types)[:depth],
        "attn_scale": config.get("attn_scale", 0.1) if tuned else 0.0,
    }


def _llama4_write(config: DecoderConfig) -> dict[str, Any]:
    chunks = map(config.chunk_of, range(config.num_hidden_layers))
    return {
        **smollm3_write(config),
        "moe_layers": list(config.moe_layers),
        "layer_types": ["full_attention" if chunk is None else "chunked_attention" for chunk in chunks],
        "attn_temperature_tuning": config.attn_scale != 0,
    }


def _deepseek_v2_read(config: Config) -> dict[str, Any]:
    grouped = config.get("topk_method") == "group_limited_greedy"
    return {name: (config.get(name) or 1) if grouped else 1 for name in ("n_group", "topk_group")}


def _deepseek_v2_write(config: DeepseekConfig) -> dict[str, Any]:
    method = "group_limited_greedy" if config.n_group > 1 else "greedy"
    groups = {"n_group": config.n_group, "topk_group": config.topk_group}
    return {"topk_method": method, "num_key_value_heads": config.num_attention_heads, **groups}


def _deepseek_v3_write(config: DeepseekConfig) -> dict[str, Any]:
    return {"num_key_value_heads": config.num_attention_heads}


# --------------------------------------------------------------------------------------------------------- the families

MIXTRAL = like(
    LLAMA,
    "Mixtral",
    plan=None,
    config=MixtralConfig,
    names=_MIXTRAL_NAMES,
    keys={
        "num_experts": "num_local_experts",
        "num_experts_per_tok": "num_experts_per_tok",
        "router_aux_loss_coef": 0.001,
    },
    only={"router_jitter_noise": (0.0,), **_NO_BIASES},
    window="all",
)
_EXPERT_KEYS: dict[str, Key] = {"num_experts": "num_experts", "norm_topk_prob": False}
QWEN_MOE_KEYS: dict[str, Key] = _EXPERT_KEYS | {"decoder_sparse_step": 1}
_GLM4_MOE = like(
    MIXTRAL,
    "Glm4Moe",
    names=_GLM4_MOE_NAMES,
    keys={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "num_experts": "n_routed_experts",
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "qkv_bias": ("attention_bias", False),
        "qk_norm": ("use_qk_norm", False),
        "router_aux_loss_coef": None,
    },
    flags={"scoring_func": "sigmoid", "selection_bias": True, "router_aux_loss_coef": 0.0},
    only={"router_jitter_noise": None, "attention_bias": None},
    rope={"partial_rotary_factor": 0.5},
    window="",
    read=_glm4_moe_read(1, 1, 1408),
    write=lambda config: {**_glm4_moe_write(config), "num_nextn_predict_layers": 0},
)
_DEEPSEEK_SIZES = (
    *("moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "routed_scaling_factor"),
    *("first_k_dense_replace", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)
_DEEPSEEK_KEYS: dict[str, Key] = {"q_lora_rank": 1536, **{name: name for name in _DEEPSEEK_SIZES}}
_DEEPSEEK = Family(
    "DeepseekV2",
    None,
    DeepseekConfig,
    _DEEPSEEK_NAMES,
    COMMON | _DEEPSEEK_KEYS | {"rms_norm_eps": 1e-6, "aux_loss_alpha": 0.0},
    {"scoring_func": "softmax", "norm_topk_prob": False, "rope_interleave": True},
    {
        **SILU,
        **_NO_BIASES,
        "mlp_bias": (False,),
        "scoring_func": ("softmax",),
        "seq_aux": (True,),
        "moe_layer_freq": (1,),
        "quantization_config": (None,),
        "topk_method": ("greedy", "group_limited_greedy"),
        "norm_topk_prob": (False, None),  # transformers takes no notice of it
    },
    ROPE,
    ("yarn",),
    read=_deepseek_v2_read,
    write=_deepseek_v2_write,
)
_DEEPSEEK_V3 = like(
    _DEEPSEEK,
    "DeepseekV3",
    names=_deepseek_v3_names,
    keys={
        "norm_topk_prob": True,
        "n_group": 8,
        "topk_group": 4,
        "rope_interleave": True,
        "num_nextn_predict_layers": 0,
    },
    flags={"scoring_func": "sigmoid"},
    only={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "norm_topk_prob": (True, False)},
    read=None,
    write=_deepseek_v3_write,
)

MIXTURES: dict[str, Family] = {
    "mixtral": like(
        MIXTRAL,
        "Mixtral",
        keys={"rms_norm_eps": 1e-5, "num_key_value_heads": 8},
        rope={"rope_theta": 1e6},
        flags={"norm_topk_prob": True},
    ),
    "qwen2_moe": like(
        MIXTRAL,
        "Qwen2Moe",
        names=QWEN2_MOE_NAMES,
        keys={
            **QWEN_MOE_KEYS,
            "num_key_value_heads": 16,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "qkv_bias": True,
        },
        flags={"shared_expert_gate": True},
        window="flag types",
        window_size=4096,
        slides=lambda config, block: block % 2 == 0 and block < config.get("max_window_layers", 28),
        only={"attention_bias": None},
        read=mixtral_read,
        write=qwen3_moe_write,
    ),
    "qwen3_moe": like(
        MIXTRAL,
        "Qwen3Moe",
        names=_EXPERT_NAMES,
        keys={**QWEN_MOE_KEYS, "num_key_value_heads": 4, "moe_intermediate_size": 768},
        flags={"qk_norm": True},
        window="all flag",
        read=mixtral_read,
        write=qwen3_moe_write,
    ),
    "olmoe": like(
        MIXTRAL,
        "Olmoe",
        names=_EXPERT_NAMES,
        keys={
            **_EXPERT_KEYS,
            "head_dim": None,
            "rms_norm_eps": 1e-5,
            "router_aux_loss_coef": 0.01,
            "clip_qkv": ("clip_qkv", None),
        },
        flags={"qk_norm_all_heads": True},
        only={"sliding_window": (None,)},
        window="",
    ),
    "gpt_oss": like(
        MIXTRAL,
        "GptOss",
        names=_GPT_OSS_NAMES,
        keys={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "qkv_bias": ("attention_bias", True),
            "out_bias": ("attention_bias", True),
            "swiglu_limit": 7.0,
            "swiglu_alpha": 1.702,
        },
        flags={"attention_sinks": True, "moe_bias": True, "norm_topk_prob": True},
        only={"attention_bias": None, "router_jitter_noise": None},
        rope={"rope_theta": 1.5e5},
        scaled={"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
        window="types",
        window_size=128,
        slides=lambda config, block: block % 2 == 0,
        read=_gpt_oss_read,
    ),
    "glm4_moe": _GLM4_MOE,
    "dots1": like(
        _GLM4_MOE,
        "Dots1",
        keys={
            **ATTENTION_BIAS,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-6,
            "num_experts_per_tok": "num_experts_per_tok",
            "norm_topk_prob": False,
            "qk_norm": None,
        },
        flags={"qk_norm": True},
        rope={"partial_rotary_factor": None},
        window="types",
        window_size=4096,
        slides=lambda config, block: block >= number_of(config, "max_window_layers", 62),
        read=_glm4_moe_read(0, None, 1408),
        write=_glm4_moe_write,
    ),
    "solar_open": like(
        _GLM4_MOE,
        "SolarOpen",
        keys={
            **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), ("moe_intermediate_size", 1280)),
            "head_dim": 128,
            "qk_norm": None,
        },
        rope={"rope_theta": 1e6, "partial_rotary_factor": None},
        read=_solar_read,
        write=lambda config: {
            "n_shared_experts": config.shared_expert_intermediate_size // config.moe_intermediate_size
        },
    ),
    "exaone_moe": like(
        _GLM4_MOE,
        "ExaoneMoe",
        names=_EXAONE_MOE_NAMES,
        keys={
            "num_key_value_heads": 32,
            "num_experts": "num_experts",
            "moe_intermediate_size": 1024,
            "routed_scaling_factor": 2.5,
            "qkv_bias": None,
            "qk_norm": None,
        },
        flags={"qk_norm": True},
        rope={"partial_rotary_factor": None},
        window="types",
        window_size=4096,
        slides=exaone4_slides,
        read=_exaone_moe_read,
        write=_exaone_moe_write,
    ),
    "minimax_m2": like(
        MIXTRAL,
        "MiniMaxM2",
        names=_MINIMAX_NAMES,
        keys={"num_key_value_heads": 8, "head_dim": 128, "num_experts_per_tok": 8, "router_aux_loss_coef": None},
        # transformers' loss, which only output_router_logits switches on, takes the softmax beside the sigmoids.
        flags={"scoring_func": "sigmoid", "selection_bias": True, "router_aux_loss_coef": 0.0}
        | {"qk_norm_all_heads": True},
        only={"attention_bias": None, "output_router_logits": (False, None)},
        rope={"rope_theta": 5e6, "partial_rotary_factor": 1.0},
        window="",
        read=_minimax_read,
    ),
    "ernie4_5_moe": like(
        MIXTRAL,
        "Ernie4_5_Moe",
        names=_ERNIE_MOE_NAMES,
        keys={
            **TIED,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "num_experts": "moe_num_experts",
            "num_experts_per_tok": ("moe_k", 6),
            "moe_intermediate_size": 1536,
            "router_aux_loss_coef": None,
        },
        # transformers' loss, which only output_router_logits switches on, is that of a choice without the bias.
        flags={"selection_bias": True, "rope_interleave": True, "router_aux_loss_coef": 0.0},
        only={"router_jitter_noise": None, "attention_bias": None, "output_router_logits": (False, None)}
        | {"use_bias": (False, None), "moe_norm_min": (1e-12,)},
        rope={"rope_theta": 5e5},
        window="",
        read=_ernie_moe_read,
        write=_ernie_moe_write,
    ),
    "llama4_text": like(
        MIXTRAL,
        "Llama4",
        names=_LLAMA4_NAMES,
        keys={
            **ATTENTION_BIAS,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "intermediate_size": ("intermediate_size_mlp", 16384),
            **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), ("intermediate_size", 8192)),
            "num_experts_per_tok": 1,
            "attention_chunk_size": 8192,
            "qk_l2_norm": ("use_qk_norm", True),
            "attn_scale": 0.1,
            "floor_scale": 8192,
            "router_aux_loss_coef": None,
        },
        flags={"scoring_func": "sigmoid", "norm_topk_prob": False, "weigh_expert_inputs": True}
        | {"rope_interleave": True, "router_aux_loss_coef": 0.0},  # transformers' model adds no such loss
        only={"attention_bias": None},
        rope={"rope_theta": 5e5},
        window="",
        read=_llama4_read,
        write=_llama4_write,
    ),
    "flex_olmo": like(
        MIXTRAL,
        "FlexOlmo",
        names={ours: form for ours, form in {**_EXPERT_NAMES, **OLMO2_NAMES}.items() if ".norm" not in ours},
        keys={**_EXPERT_KEYS, **ATTENTION_BIAS, "router_aux_loss_coef": 0.01} | {"num_experts_per_tok": 5},
        flags={"norm_place": "after", "qk_norm_all_heads": True},
        only={"router_jitter_noise": None, "attention_bias": None},
        rope={"rope_theta": 5e5},
        window="",
    ),
    "granitemoe": like(
        MIXTRAL,
        "GraniteMoe",
        names=_GRANITE_MOE_NAMES,
        keys={**ATTENTION_BIAS, **MULTIPLIERS, "logit_scale": ("logits_scaling", 1.0)},
        flags={"norm_topk_prob": True},
        only={"router_jitter_noise": None, "attention_bias": None},
        window="",
        inverse=("logit_scale",),
    ),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": like(_DEEPSEEK_V3, "DeepseekV3", blocks=False),  # no model of transformers has the name,
}
