"""Keys that a ``config.json`` leaves out: the values of transformers' own configuration classes, or an error."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from triax.models.huggingface.config import from_hf
from triax.models.huggingface.families import FAMILIES
from triax.models.huggingface.load import config_from_hf

# Values that no class has as its default, so that a key that is left out shows.
VALUES: dict[str, Any] = {
    "hidden_size": 64,
    "n_embd": 64,
    "intermediate_size": 60,
    "n_inner": 128,
    "ffn_dim": 60,
    "ffn_hidden_size": 60,
    "num_hidden_layers": 4,
    "n_layer": 4,
    "num_attention_heads": 4,
    "n_head": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 12,
    "vocab_size": 77,
    "max_position_embeddings": 96,
    "n_positions": 96,
    "word_embed_proj_dim": 64,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "n_shared_experts": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 6,
    "q_lora_rank": 6,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.7,
    "rms_norm_eps": 3e-4,
    "layer_norm_eps": 3e-4,
    "layer_norm_epsilon": 3e-4,
    "norm_epsilon": 3e-4,
    "norm_eps": 3e-4,
    "embedding_multiplier": 2.5,
    "attention_multiplier": 0.5,
    "residual_multiplier": 0.7,
    "logits_scaling": 3.0,
    "logit_scale": 0.3,
    "hidden_act": "gelu",
    "activation_function": "gelu",
    "num_layers": 4,
    "num_heads": 4,
    "window_size": 5,
    "attention_types": [[["local", "global"], 2]],
    "rotary_dim": 8,
    "resid_dropout": 0.3,
    "n_embed": 64,
    "initializer_range": 0.03,
    "init_std": 0.03,
    "clip_qkv": 2.0,
    "router_aux_loss_coef": 0.5,
    "resid_pdrop": 0.3,
    "hidden_dropout": 0.3,
    "dropout": 0.3,
    "residual_dropout": 0.3,
    "query_pre_attn_scalar": 64,
    "final_logit_softcapping": 6.0,
    "sliding_window": 5,
    "max_window_layers": 1,
    "pad_token_id": 0,
    "shared_expert_intermediate_size": 12,
    "swiglu_limit": 5.0,
    "swiglu_alpha": 1.5,
    "num_shared_experts": 2,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_num_shared_experts": 1,
    "moe_layer_start_index": 2,
    "moe_layer_interval": 2,
    "intermediate_size_mlp": 36,
    "no_rope_layer_interval": 2,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 6,
    "floor_scale": 7,
    "attn_scale": 0.3,
}
_T5: dict[str, Any] = {"d_model": 40, "d_kv": 6, "d_ff": 60, "num_decoder_layers": 3, "feed_forward_proj": "silu"}
_T5 |= {"relative_attention_num_buckets": 12, "relative_attention_max_distance": 50, "dropout_rate": 0.3}
_T5 |= {"initializer_factor": 0.5, "decoder_start_token_id": 3, "pad_token_id": 2}
_DELTA: dict[str, Any] = {"head_dim": 16, "linear_num_value_heads": 6, "linear_num_key_heads": 3}
_DELTA |= {"linear_key_head_dim": 7, "linear_value_head_dim": 9, "linear_conv_kernel_dim": 3}
_DELTA |= {"layer_types": ["full_attention", *["linear_attention"] * 3]}
MORE: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": True},
    "smollm3": {"use_sliding_window": True, "no_rope_layer_interval": 2},
    "gemma2": {"attn_logit_softcapping": 5.0},
    "falcon": {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, "bias": True},
    "starcoder2": {"use_bias": False},
    "helium": {"head_dim": 16, "mlp_bias": True},
    "seed_oss": {"attention_out_bias": True, "mlp_bias": True},
    "hyperclovax": {"use_post_norm": False},
    "bloom": {"hidden_size": 80},
    "internlm3": {"attention_bias": True, "mlp_bias": True},
    "cohere": {"use_qk_norm": True},
    "ernie4_5": {"use_bias": True},
    "stablelm": {"qk_layernorm": True, "use_qkv_bias": True, "use_parallel_residual": True},
    "opt": {"enable_bias": False, "do_layer_norm_before": False, "word_embed_proj_dim": 24},
    "gpt_neox": {"use_parallel_residual": False, "attention_bias": False},
    **{kind: {"norm_topk_prob": False, "rope_interleave": False} for kind in ("deepseek_v3", "kimi_k2")},
    "qwen2_moe": {"qkv_bias": False, "use_sliding_window": True, "norm_topk_prob": True, "decoder_sparse_step": 2},
    "glm4_moe": {"use_qk_norm": True, "norm_topk_prob": False},
    "dots1": {"norm_topk_prob": True},
    "solar_open": {"norm_topk_prob": False},
    "exaone_moe": {"norm_topk_prob": False},
    "llama4_text": {"use_qk_norm": False},
    "flex_olmo": {"norm_topk_prob": True},
    "qwen3_moe": {"norm_topk_prob": True, "decoder_sparse_step": 2},
    "olmo_hybrid": _DELTA | {"linear_num_value_heads": 3, "linear_num_key_heads": 3, "linear_allow_neg_eigval": False},
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA | {"norm_topk_prob": False, "decoder_sparse_step": 2, "shared_expert_intermediate_size": 28},
    "nemotron_h": {"mamba_num_heads": 6, "mamba_head_dim": 7, "ssm_state_size": 9, "n_groups": 2, "conv_kernel": 3}
    | {"use_bias": True, "use_conv_bias": False, "time_step_min": 0.2, "mlp_bias": True, "mlp_hidden_act": "silu"}
    | {"layers_block_type": ["mlp", "linear_attention", "full_attention"]},
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 7, "mamba_n_groups": 2, "mamba_d_conv": 3}
    | {"mamba_proj_bias": True, "mamba_conv_bias": False, "attn_layer_indices": [1], "mlp_bias": True},
    "bert": {"architectures": ["BertForSequenceClassification"], "num_labels": 3, "layer_norm_eps": 1e-3},
    "roberta": {"architectures": ["RobertaForMaskedLM"], "pad_token_id": 4, "layer_norm_eps": 1e-3},
    "modernbert": {"architectures": ["ModernBertForMaskedLM"], "norm_bias": True, "classifier_pooling": "mean"}
    | {"local_attention": 7, "classifier_bias": True, "mlp_bias": True},
    "vit": {"architectures": ["ViTForImageClassification"], "num_labels": 3, "image_size": 12, "patch_size": 3},
    "dinov2": {"architectures": ["Dinov2ForImageClassification"], "num_labels": 3, "image_size": 12, "patch_size": 3}
    | {"mlp_ratio": 3, "layerscale_value": 0.5},
    "siglip_vision_model": {"architectures": ["SiglipVisionModel"], "image_size": 12, "patch_size": 3},
    "t5": _T5 | {"architectures": ["T5ForConditionalGeneration"]},
    "mt5": _T5 | {"architectures": ["MT5ForConditionalGeneration"]},
    "whisper": {"architectures": ["WhisperForConditionalGeneration"], "d_model": 40, "encoder_ffn_dim": 60}
    | {"decoder_ffn_dim": 60, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_layers": 3}
    | {"decoder_layers": 2, "max_source_positions": 9, "max_target_positions": 8, "num_mel_bins": 7, "dropout": 0.3}
    | {"init_std": 0.5, "decoder_start_token_id": 3, "pad_token_id": 2, "activation_function": "relu"},
    "mamba2": {"num_heads": 2, "state_size": 7, "n_groups": 2, "conv_kernel": 3, "use_bias": True}
    | {"use_conv_bias": False, "time_step_limit": [0.2, float("inf")]},
}
KNOWN = [name for name, family in FAMILIES.items() if family.config is not None]


@functools.cache
def class_of(family: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[{"kimi_k2": "deepseek_v3"}.get(family, family)]


def content(config: Any) -> dict[str, Any]:
    """All keys, as transformers writes them."""
    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return found


def whole(family: str) -> dict[str, Any]:
    """A ``config.json`` of a family with all keys, each with another value than the class's."""
    defaults = content(class_of(family)())
    ours = FAMILIES[family]
    values = {key: value for key, value in (VALUES | MORE.get(family, {})).items() if key in defaults}
    if "head_dim" not in ours.keys:
        values.pop("head_dim", None)
    for key in ("hidden_act", "activation_function"):
        if key in ours.only and values.get(key) not in ours.only[key]:
            values.pop(key, None)
    if family not in ("phi", "gptj") and "tie_word_embeddings" in defaults.keys() - ours.only.keys():
        values["tie_word_embeddings"] = not defaults["tie_word_embeddings"]
    if isinstance(defaults.get("attention_bias"), bool) and "attention_bias" not in ours.only:
        values.setdefault("attention_bias", not defaults["attention_bias"])
    return content(class_of(family)(**values)) | {"model_type": family}


def result(config: dict[str, Any], ours: bool) -> Any:
    """The configuration, or the reason for which there is none."""
    if ours:
        try:
            return from_hf(config, "model/config.json")
        except ValueError as error:
            return str(error)
    try:
        kind = class_of(config["model_type"])
        theirs = content(kind.from_dict(kind._decode_special_floats(config)))
        return from_hf(theirs | {"model_type": config["model_type"]})
    except Exception as error:  # of many classes
        return str(error)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["", "all"])
@pytest.mark.parametrize("family", KNOWN)
def test_a_key_that_is_missing_has_the_value_of_transformers_class(family: str, every: bool) -> None:
    """Each key in turn; in the form of Transformers 5, and with the rotary positions as Transformers 4 wrote them.

    In the older form the keys of positions alone are left out; in the sweep each key.
    """
    full = whole(family)
    assert not isinstance(result(full, ours=True), str), result(full, ours=True)
    old = {key: value for key, value in full.items() if key != "rope_parameters"} | {"rope_theta": 7e3}
    if family == "gpt_neox":
        old |= {"rotary_emb_base": 6e3, "rotary_pct": 0.5}
    forms = [full, old] if FAMILIES[family].rope else [full]
    for form in forms:
        for key in form:
            if key == "model_type" or (
                form is old and not every and not re.search("rope|rot|position|head|hidden", key)
            ):
                continue
            left = {name: value for name, value in form.items() if name != key}
            found, right = result(left, ours=True), result(left, ours=False)
            if isinstance(found, str):
                experts = {"num_local_experts": "num_experts"}
                assert found.startswith("model/config.json: ") and len(found) < 400 and "\n" not in found
                assert key in found or experts.get(key, key) in found or isinstance(right, str), (key, found)
            else:
                assert found == right, (key, found, right)


YARN = {"rope_type": "yarn", "rope_theta": 7e3, "factor": 4.0, "original_max_position_embeddings": 24}
YARN |= {"beta_fast": 20.0, "beta_slow": 2.0, "mscale": 0.5, "mscale_all_dim": 0.4, "attention_factor": 1.2}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 7e3, "factor": 4.0, "original_max_position_embeddings": 24}
LLAMA3 |= {"low_freq_factor": 1.5, "high_freq_factor": 3.0}


@pytest.mark.parametrize("rope", [YARN, LLAMA3, {"rope_type": "linear", "rope_theta": 7e3, "factor": 2.0}], ids=str)
def test_a_missing_rope_key_has_transformers_value_or_an_error(rope: dict[str, Any]) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from triax.models.rope import Rope

    for key in (None, *rope):
        left = {name: value for name, value in rope.items() if name != key}
        config = whole("llama") | {"rope_parameters": left}
        found = result(config, ours=True)
        if isinstance(found, str):
            assert f"there is no {key} for rope_type" in found
            continue
        theirs = class_of("llama").from_dict(config)
        kind = theirs.rope_parameters["rope_type"]
        if kind == "default":
            assert found.rope_scaling is None
            continue
        frequencies, magnitude = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu")
        mine = Rope(found.head_dim, found.rope_theta, found.rope_scaling)
        torch.testing.assert_close(mine.frequencies(), frequencies, msg=str(key))
        assert mine.magnitude == pytest.approx(magnitude), key


def test_a_size_that_is_missing_is_named_with_its_file(tmp_path: Path) -> None:
    for family, key in (("deepseek_v2", "num_experts_per_tok"), ("gpt2", "n_embd"), ("mixtral", "num_local_experts")):
        config = whole(family)
        del config[key]
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file({str(number): torch.ones(1) for number in range(4)}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=rf"{tmp_path}/config.json: there is no {key}, which a {family} must have"):
            config_from_hf(tmp_path)


@pytest.mark.parametrize("family", ["gpt_neox", "phi", "falcon", "opt", "olmoe", "gpt2"])
def test_an_unsupported_head_dim_of_a_family_is_refused(family: str) -> None:
    config = whole(family)
    assert from_hf(config | {"head_dim": 16}) == from_hf(config)  # hidden_size / num_attention_heads
    with pytest.raises(ValueError, match="head_dim=8 is not implemented"):
        from_hf(config | {"head_dim": 8})


def test_a_window_that_is_asked_for_and_switched_off_is_refused() -> None:
    """transformers has such a window in its mask and none in its kernels; triax computed without one."""
    for family, key in (
        ("smollm3", "use_sliding_window"),
        ("qwen3", "use_sliding_window"),
        ("gemma2", "sliding_window"),
    ):
        config = whole(family) | {"layer_types": ["sliding_attention"] * 4, "sliding_window": 5}
        config |= {key: False if key == "use_sliding_window" else None}
        with pytest.raises(ValueError, match=rf"config.json: layer_types have sliding_attention, but {key} is "):
            from_hf(config)
        assert from_hf(config | {"layer_types": ["full_attention"] * 4}).sliding_window is None


def test_a_divisor_of_the_scores_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ValueError, match=r"config.json: query_pre_attn_scalar = -1: give a number above 0"):
        from_hf(whole("gemma3_text") | {"query_pre_attn_scalar": -1})


LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    "family",
    [
        name
        for name in KNOWN
        if "linear" in FAMILIES[name].scalings and FAMILIES[name].rope and "rope_scaling" not in FAMILIES[name].only
    ],
)
def test_rope_scaling_wins_over_rope_parameters_as_in_transformers(family: str) -> None:
    """transformers takes rope_scaling where both are there; triax took rope_parameters."""
    plain = {"rope_type": "default", "rope_theta": 5e3}
    nested = "rope_local_base_freq" in FAMILIES[family].rope
    both = whole(family) | {"rope_parameters": {"full_attention": plain} if nested else plain, "rope_scaling": LINEAR}
    theirs = class_of(family).from_dict(json.loads(json.dumps(both))).rope_parameters
    theirs = theirs["full_attention"] if nested else theirs
    found: Any = from_hf(both)
    assert found.rope_scaling.factor == theirs["factor"] == 2.0 and found.rope_theta == theirs["rope_theta"]


def test_rotary_options_that_transformers_ignores_are_refused() -> None:
    flat = whole("gemma3_text") | {"rope_parameters": {"rope_theta": 5e3}}
    with pytest.raises(
        ValueError, match=r"have 'rope_theta', but those of gemma3_text have full_attention and sliding"
    ):
        from_hf(flat)
    old = {key: value for key, value in flat.items() if key != "rope_parameters"}
    found: Any = from_hf(old | {"rope_scaling": LINEAR})
    assert found.rope_scaling.factor == 2.0
    with pytest.raises(ValueError, match="rope_scaling of gemma3_text has no rope_type"):
        from_hf(old | {"rope_scaling": {"type": "linear", "factor": 2.0}})


@pytest.mark.parametrize("family", [name for name in KNOWN if FAMILIES[name].aliases])
def test_aliases_of_config_keys_are_read_as_in_transformers(family: str) -> None:
    """transformers' ``attribute_map``: a key has two names, of which published files have either."""
    full = whole(family)
    for name, key in FAMILIES[family].aliases.items():
        renamed = {name if each == key else each: value for each, value in full.items()}
        assert from_hf(renamed) == from_hf(full) == from_hf(content(class_of(family).from_dict(renamed)))
        both = full | {name: {"n_layer": 2, "num_layers": 2}.get(key, 32)}
        found, theirs = result(both, ours=True), result(both, ours=False)
        if not isinstance(found, str) and not isinstance(theirs, str):  # else 32 heads of one channel
            assert found == theirs, name
