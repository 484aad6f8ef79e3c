"""``layers_of`` against the modules: names and shapes; numbers of parameters against transformers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from triax.grid import Axis, layout_of
from triax.models.config import DecoderConfig, DeepseekConfig, GPTConfig, LlamaConfig, MixtralConfig, TransformerConfig
from triax.models.decoder import decoder_layers
from triax.models.deepseek import deepseek_layers
from triax.models.gpt import gpt_layers
from triax.models.huggingface.load import config_from_hf
from triax.models.llama import llama_layers
from triax.models.mixtral import mixtral_layers
from triax.plugins.plan.layer_shapes import layers_of

from support.toy_families import COMMON, DENSE, MIXTURES

_LLAMA = LlamaConfig.preset("llama-tiny")
_SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 44,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
CONFIGS: dict[str, TransformerConfig] = {
    "gpt": GPTConfig.preset("bytes-tiny"),
    "gpt-untied": GPTConfig.preset("bytes-tiny", tie_word_embeddings=False, dropout=0.1, vocab_size=61),
    "llama": _LLAMA,
    "llama-qwen2": replace(_LLAMA, qkv_bias=True, tie_word_embeddings=True),
    "llama-qwen3": replace(_LLAMA, qk_norm=True, head_dim=6),
    "llama-biases": replace(_LLAMA, qkv_bias=True, out_bias=True, mlp_bias=True, num_key_value_heads=4),
    "llama-windows": replace(_LLAMA, sliding_window=4, layer_types=("sliding_attention", "full_attention")),
    "decoder": DecoderConfig(**_SIZES),
    "gemma2": DecoderConfig(
        **_SIZES | {"head_dim": 6},
        norm="rms_offset",
        norm_place="both",
        final_logit_softcapping=3.0,
        hidden_act="gelu",
        qk_norm=True,
    ),
    "phi": DecoderConfig(
        **_SIZES, norm="layer", parallel_residual=True, shared_norm=True, gated=False, mlp_bias=True, head_bias=True
    ),
    "neox": DecoderConfig(**_SIZES, norm="layer", parallel_residual=True, gated=False, qkv_bias=True, out_bias=True),
    "opt": DecoderConfig(
        **_SIZES, norm="layer", learned_positions=True, position_offset=2, gated=False, tie_word_embeddings=True
    ),
    "opt-350m": DecoderConfig(
        **_SIZES,
        norm="layer",
        norm_place="sum",
        learned_positions=True,
        position_offset=2,
        gated=False,
        embedding_size=16,
        tie_word_embeddings=True,
    ),
    "olmoe": replace(MixtralConfig.preset("mixtral-tiny"), qk_norm_all_heads=True, num_key_value_heads=4),
    "granite": DecoderConfig(**_SIZES, logit_scale=2.0, residual_multiplier=0.5, embedding_multiplier=3.0),
    "cohere": DecoderConfig(
        **_SIZES, norm="layer_weight", parallel_residual=True, shared_norm=True, qk_norm_per_head=True
    ),
    "nemotron": DecoderConfig(**_SIZES, norm="layer_offset", hidden_act="relu2", gated=False),
    "olmo": DecoderConfig(**_SIZES, norm="layer_plain", clip_qkv=0.5),
    "nanochat": DecoderConfig(**_SIZES, norm="rms_plain", qk_norm=True),
    "olmo2": DecoderConfig(**_SIZES, norm_place="after"),
    "mixtral": MixtralConfig.preset("mixtral-tiny"),
    "mixtral-dense": MixtralConfig.preset("mixtral-tiny", decoder_sparse_step=2, intermediate_size=88, qk_norm=True),
    "qwen2_moe": MixtralConfig.preset(
        "mixtral-tiny", shared_expert_intermediate_size=20, shared_expert_gate=True, mlp_only_layers=(0,)
    ),
    "gpt_oss": MixtralConfig.preset(
        "mixtral-tiny", attention_sinks=True, moe_bias=True, swiglu_limit=7.0, qkv_bias=True, out_bias=True
    ),
    "llama4": MixtralConfig.preset(
        "mixtral-tiny", scoring_func="sigmoid", weigh_expert_inputs=True, attention_chunk_size=4, qk_l2_norm=True
    ),
    "ernie4_5_moe": MixtralConfig.preset("mixtral-tiny", selection_bias=True, shared_expert_intermediate_size=20),
    "deepseek": DeepseekConfig.preset("deepseek-tiny"),
    "deepseek-v2": DeepseekConfig.preset("deepseek-tiny", q_lora_rank=None, scoring_func="softmax"),
}
_MAKERS: dict[type[TransformerConfig], Any] = {
    GPTConfig: gpt_layers,
    LlamaConfig: llama_layers,
    DecoderConfig: decoder_layers,
    MixtralConfig: mixtral_layers,
    DeepseekConfig: deepseek_layers,
}
_EXPERTS = (MixtralConfig, DeepseekConfig)


def grid_of(tensor: tuple[int, int], expert: tuple[int, int]) -> Any:
    """The axes that layers ask for, (rank, size) each, without processes."""
    sizes = {"tensor": tensor, "expert": expert, "pipe": (0, 1), "data": (0, 1), "context": (0, 1)}
    axes = {name: Axis(name, range(size), rank, None) for name, (rank, size) in sizes.items()}
    return SimpleNamespace(**axes, data_context=axes["data"], device=torch.device("meta"))


def built(config: TransformerConfig, tensor: tuple[int, int], expert: tuple[int, int], **options: Any) -> list[Any]:
    """The modules of a model's list, on the meta device."""
    grid = grid_of(tensor, expert)
    with torch.device("meta"):
        return [(spec.typename, spec.build(grid)) for spec in _MAKERS[type(config)](config, **options)]


# A norm of all heads needs a tensor axis that divides them.
@pytest.mark.parametrize(
    ("name", "tensor"), [(name, t) for name in CONFIGS for t in (1, 2, 3) if (name, t) != ("olmoe", 3)]
)
def test_weights_of_layers_have_the_modules_names_and_shapes(name: str, tensor: int) -> None:
    config = CONFIGS[name]
    moe = isinstance(config, _EXPERTS)
    splits = [(False, 1), (False, 2), *([(True, 2)] if tensor == 2 else [])] if moe else [(False, 1)]
    for shard_tensor, expert in splits:
        layers = layers_of(config, shard_tensor)
        options = {"shard_tensor": shard_tensor} if moe else {}
        for rank in range(tensor):
            at = (expert - 1, expert)
            modules = built(config, (rank, tensor), at, **options)
            assert [layer.name for layer in layers] == [name for name, _ in modules]
            for layer, (_, module) in zip(layers, modules, strict=True):
                found = [(name, tuple(p.shape), layout_of(p)) for name, p in module.named_parameters()]
                told = [(each.name, each.local_shape(rank, tensor, at)) for each in layer.weights]
                assert told == [(name, shape) for name, shape, _ in found], layer.name
                for each, (_, _, layout) in zip(layer.weights, found, strict=True):
                    assert each.shape == layout.shape and each.shards_over(tensor) == layout.sharded, each
                    assert each.expert_dim == layout.expert_dim and (each.expert_dim is None or moe)
                assert layer.buffers == sum(buffer.nbytes for buffer in module.buffers())


def number_of_parameters(config: TransformerConfig) -> int:
    """The number of parameters of all layers, of those with a common tied weight once."""
    return sum({layer.tie or i: layer.parameters for i, layer in enumerate(layers_of(config))}.values())


FAMILIES = DENSE | {name: (family, COMMON | options) for name, (family, options) in MIXTURES.items()}


@pytest.mark.parametrize("case", [name for name in FAMILIES if not name.startswith("qwen3_next")])  # not counted yet
def test_layers_have_as_many_parameters_as_transformers_model(case: str) -> None:
    import transformers

    family, options = FAMILIES[case]
    if case in MIXTURES:
        about = getattr(transformers, f"{family}ForCausalLM").config_class(**options)
    else:
        about = transformers.AutoConfig.for_model(family, **options)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(about)
    wanted = sum(p.numel() for p in model.parameters() if p.requires_grad)  # without a router's correction bias
    assert number_of_parameters(config_from_hf(model)) == wanted


@pytest.mark.parametrize(
    ("cls", "name", "published"),
    [  # as transformers counts the released weights
        (GPTConfig, "gpt2", 124_439_808),
        (LlamaConfig, "llama3-8b", 8_030_261_248),
        (LlamaConfig, "qwen2.5-0.5b", 494_032_768),
        (MixtralConfig, "mixtral-8x7b", 46_702_792_704),
        (MixtralConfig, "olmoe-1b-7b", 6_919_161_856),
        (DeepseekConfig, "deepseek-v3", 671_026_404_352),
    ],
)
def test_layers_of_presets_have_the_published_parameters(cls: Any, name: str, published: int) -> None:
    assert number_of_parameters(cls.preset(name)) == published


def test_products_multiply_the_parameters_that_a_token_meets() -> None:
    """Two FLOPs a parameter and token, as in Kaplan et al. 2020, of the experts of a token only."""
    config = MixtralConfig.preset("mixtral-8x7b")
    used = sum(p.inputs * p.outputs * p.times for layer in layers_of(config) for p in layer.products)
    norms = (2 * config.num_hidden_layers + 1) * config.hidden_size
    embedding = config.vocab_size * config.hidden_size
    idle = 6 * 3 * config.hidden_size * config.moe_intermediate_size * config.num_hidden_layers
    assert used == config.parameter_count - norms - embedding - idle
    assert round(used / 1e9, 1) == 12.7  # the paper's 12.9 billion active parameters, without the embedding
    experts = [p for p in layers_of(config)[1].products if p.times > 1]
    assert [p.weight for p in experts] == ["mlp.routed.gate_up", "mlp.routed.down"]


def test_a_configuration_of_another_class_is_refused() -> None:
    with pytest.raises(TypeError, match=r"the layers of a TransformerConfig are unknown. Give one of Decoder"):
        layers_of(TransformerConfig(*[4] * 5))
