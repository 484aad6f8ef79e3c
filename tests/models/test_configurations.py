"""Configurations: each field declared once, with its meaning and limits; settings that exclude each other."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

import triax
from triax.grid import Grid
from triax.grid.randomness.random import Normal
from triax.models.attention import SelfAttention
from triax.models.attention_options import AttentionOptions
from triax.models.config import CONFIGS, AnyDecoderConfig, DecoderConfig, GPTConfig, MixtralConfig, TransformerConfig
from triax.models.rope import Rope
from triax.options.base import OptionError

# A value of a setting that is on, where True is none.
_ON: dict[str, Any] = {
    "sliding_window": 4,
    "attention_chunk_size": 4,
    "query_pre_attn_scalar": 3.0,
    "attention_multiplier": 0.2,
    "alibi": "added",
    "attn_logit_softcapping": 2.0,
    "num_experts": 4,
    "swiglu_limit": 7.0,
    "shared_expert_intermediate_size": 8,
}


@pytest.mark.parametrize("kind", CONFIGS.values())
def test_every_configuration_field_is_documented(kind: type[TransformerConfig]) -> None:
    for each in fields(kind):
        assert each.metadata["doc"] and f"    {each.name}: " in (kind.__doc__ or ""), each.name


@pytest.mark.parametrize(
    ("kind", "wrong", "said"),
    [
        (GPTConfig, {"vocab_size": 0}, "vocab_size = 0: give 1 or more"),  # of which the class changes the default
        (GPTConfig, {"mlp_ratio": 0}, "mlp_ratio = 0: give 1 or more"),
        (GPTConfig, {"norm": "layernorm"}, "norm = 'layernorm': give 'rms' or"),
        (MixtralConfig, {"num_experts": -1}, "num_experts = -1: give 0 or more"),
        (DecoderConfig, {"hidden_size": 64.0}, "hidden_size = 64.0: give a whole number"),
        (
            DecoderConfig,
            {"dropout": 1.0, "initializer_range": "a"},
            "dropout = 1.0: give a number below 1; initializer",
        ),
    ],
)
def test_a_value_out_of_its_limits_is_refused(kind: Any, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError) as caught:
        kind(**wrong)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(("one", "other", "why"), AnyDecoderConfig.EXCLUSIVE)
def test_settings_that_exclude_each_other_are_refused(one: str, other: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        DecoderConfig(**{name: _ON.get(name, True) for name in (one, other)})
    assert one in str(caught.value) and other in str(caught.value)


def test_derived_fields_follow_changes_of_other_fields() -> None:
    config = replace(GPTConfig.preset("gpt2"), hidden_size=1536, mlp_ratio=2)
    assert (config.intermediate_size, config.head_dim, config.num_key_value_heads) == (3072, 128, 12)
    assert config.rms_norm_eps == config.norm_epsilon == config.layer_norm_epsilon
    with pytest.raises(TypeError, match="rope_theta"):
        GPTConfig(rope_theta=1e6)  # type: ignore[call-arg]


def test_layers_of_a_configuration_have_its_parameter_count() -> None:
    for kind in CONFIGS.values():
        small = next((name for name in kind.presets() if "tiny" in name), None)
        config = kind.preset(small) if small else kind(8, 8, 8, 2, 2)
        module = triax.PipelineModule(config.layers(), grid=Grid(), device="meta")
        assert len(config.layers()) == config.layer_count
        assert sum(parameter.numel() for parameter in module.parameters()) == config.parameter_count


def test_attention_takes_options_as_keywords_or_an_object() -> None:
    options = AttentionOptions(kv_heads=2, rope=Rope(4), qk_norm=1e-6, window=3, bias=True)
    common: dict[str, Any] = {"grid": Grid(), "init": Normal(0.4), "out_init": Normal(0.4)}
    x, found = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0)), []
    for given in ({"options": options}, {"options": options, "window": 3}, dict(vars(options))):
        torch.manual_seed(1)
        found.append(SelfAttention(16, 4, **given, **common)(x))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    with pytest.raises(TypeError, match="windows"):
        SelfAttention(16, 4, windows=3, **common)
