"""Presets and fields of GPT and Llama: numbers of parameters, initial values, and what is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from triax.grid import Grid
from triax.models.config import GPTConfig, LlamaConfig, RopeScaling
from triax.models.gpt import gpt_layers
from triax.models.llama import llama_layers
from triax.pipe.module import PipelineModule

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
}
CLASSES: dict[str, Any] = {name: kind for kind in (GPTConfig, LlamaConfig) for name in kind.presets()}


def layers_of(config: Any) -> list[Any]:
    return gpt_layers(config) if isinstance(config, GPTConfig) else llama_layers(config)


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_a_preset_has_its_published_number_of_parameters(name: str, count: int) -> None:
    assert CLASSES[name].preset(name).parameter_count == count


def test_the_largest_preset_has_its_published_size() -> None:
    assert 174e9 < GPTConfig.preset("gpt3-175b").parameter_count < 176e9


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("tied", [True, False])
def test_the_parameter_count_is_that_of_the_built_model(name: str, tied: bool) -> None:
    """2 layers show what any number would."""
    config = CLASSES[name].preset(name, tie_word_embeddings=tied, num_hidden_layers=2)
    model = PipelineModule(layers_of(config), grid=Grid(), device="meta")
    assert sum(p.numel() for p in model.parameters()) == config.parameter_count


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
    final_norm = f"layers.{len(layers_of(config)) - 2}.weight"
    for placed in PipelineModule(layers_of(config), grid=Grid()).local_parameters():
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
def test_fields_that_cannot_be_are_refused(kind: Any, fields: dict[str, Any], words: str) -> None:
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
def test_a_configuration_that_cannot_be_is_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(words)):
        call()


def test_as_many_ranks_as_heads_are_taken_and_no_more() -> None:
    config = LlamaConfig.preset("qwen2.5-0.5b")
    config.check_tensor(14)
    with pytest.raises(ValueError, match="num_attention_heads is 14, but tensor=15 needs at least 15"):
        config.check_tensor(15)
