"""Presets and fields of GPT and Llama: numbers of parameters, initial values, and what is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from triax.grid import Grid
from triax.models.config import DeepseekConfig, GPTConfig, LlamaConfig, MixtralConfig, RopeScaling
from triax.pipe.module import PipelineModule
from triax.plugins.plan.layer_shapes import layers_of

# As transformers counts the released weights.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "olmoe-1b-7b": 6_919_161_856,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_404_352,
}
PRESETS: dict[str, Any] = {
    name: kind.preset(name)
    for kind in (GPTConfig, LlamaConfig, MixtralConfig, DeepseekConfig)
    for name in kind.presets()
}


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items())
def test_a_preset_has_its_published_number_of_parameters(name: str, published: int) -> None:
    """Both the configuration and the layers of triax plan count them, a tied weight once."""
    counts = {layer.tie or i: layer.parameters for i, layer in enumerate(layers_of(PRESETS[name]))}
    assert PRESETS[name].parameter_count == sum(counts.values()) == published


def test_the_largest_preset_has_its_published_size() -> None:
    assert 174e9 < PRESETS["gpt3-175b"].parameter_count < 176e9


@pytest.mark.parametrize(
    "config",
    [
        GPTConfig.preset("bytes-small", hidden_size=256),
        LlamaConfig.preset("llama-small", hidden_size=256, qkv_bias=True, qk_norm=True),
    ],
    ids=["GPT", "Llama"],
)
def test_initial_values_have_gpt2s_distributions(config: Any) -> None:
    """Biases are 0, norms 1; matrices behind a residual branch are smaller by its number of branches."""
    final_norm = f"layers.{len(config.layers()) - 2}.weight"
    for placed in PipelineModule(config.layers(), grid=Grid()).local_parameters():
        name, value = placed.layout.name, placed.parameter.detach()
        if name.endswith("bias"):
            assert not value.any(), name
        elif "norm" in name or name == final_norm:
            assert bool((value == 1).all()), name
        else:
            branches = 2 * config.num_hidden_layers if name.endswith(("out.weight", "down.weight")) else 1
            std = 0.02 / math.sqrt(branches)
            assert abs(float(value.std()) / std - 1) < 0.03, name
            assert abs(float(value.mean())) < 0.03 * std, name


@pytest.mark.parametrize("kind", [GPTConfig, LlamaConfig])
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0: give 1 or more"),
        (
            {"hidden_size": 100, "num_attention_heads": 16},
            "=16 does not divide hidden_size=100. Give, for example, hid",
        ),
        ({"dropout": 1.0}, "dropout = 1.0: give a number below 1"),
    ],
)
def test_wrong_fields_of_gpt_and_llama_are_refused(kind: Any, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kind(**fields)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: LlamaConfig(num_attention_heads=32, num_key_value_heads=5),
        "num_key_value_heads=5 does not divide num_attention_heads=32. Give one of 1, 2, 4, 8, 16, 32",
    ),
    (
        lambda: LlamaConfig(hidden_size=24, num_attention_heads=8),
        "head_dim is 3, but rotary positions need pairs. Give an even number",
    ),
    (
        lambda: RopeScaling(low_freq_factor=4.0, high_freq_factor=4.0),
        "Give 0 < low_freq_factor < high_freq_factor, such as 1 and 4",
    ),
    (
        lambda: RopeScaling(factor=0.5),
        "factor is 0.5 and original_max_position_embeddings is 8192. Give at least 1 for each",
    ),
    (
        lambda: LlamaConfig(hidden_size=32, num_attention_heads=4, intermediate_size=3).check_tensor(4),
        "intermediate_size is 3, but tensor=4 needs at least 4",
    ),
    (lambda: GPTConfig.preset("gpt5"), "no preset 'gpt5'; known are gpt2"),
    (lambda: LlamaConfig.preset("llama9"), "no preset 'llama9'; known are "),
    (
        lambda: GPTConfig.preset("gpt2", num_layers=3),
        "GPTConfig has no field 'num_layers'; did you mean 'num_hidden_layers'?",
    ),
    (lambda: LlamaConfig.preset("llama2-7b", depth=3), "LlamaConfig has no field 'depth'; known are vocab_size"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_impossible_configurations_and_presets_are_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(words)):
        call()


def test_check_tensor_refuses_more_ranks_than_heads() -> None:
    config = LlamaConfig.preset("qwen2.5-0.5b")
    config.check_tensor(14)
    with pytest.raises(ValueError, match="num_attention_heads is 14, but tensor=15 needs at least 15"):
        config.check_tensor(15)
