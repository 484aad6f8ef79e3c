"""``layers_of`` against the modules: names and shapes; numbers of parameters against transformers."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from triax.grid import Axis, layout_of
from triax.models.config import DeepseekConfig, MixtralConfig, TransformerConfig
from triax.models.huggingface.load import config_from_hf
from triax.plugins.plan.layer_shapes import layers_of

from support.toy_families import COMMON, DENSE, MIXTURES

FAMILIES = DENSE | {name: (family, COMMON | options) for name, (family, options) in MIXTURES.items()}
CASES = [name for name in FAMILIES if not name.startswith("qwen3_next")]  # whose recurrent blocks are not counted
NORM_OF_FOUR_HEADS = ("olmo2", "olmo3", "olmoe", "flex_olmo", "minimax_m2")  # over all of them: 3 ranks are refused


@cache
def theirs(case: str) -> Any:
    """transformers' model, on the meta device."""
    import transformers

    family, options = FAMILIES[case]
    if case in MIXTURES:
        about = getattr(transformers, f"{family}ForCausalLM").config_class(**options)
    else:
        about = transformers.AutoConfig.for_model(family, **options)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(about)


def grid_of(tensor: tuple[int, int], expert: tuple[int, int]) -> Any:
    """The axes that layers ask for, (rank, size) each, without processes."""
    sizes = {"tensor": tensor, "expert": expert, "pipe": (0, 1), "data": (0, 1), "context": (0, 1)}
    axes = {name: Axis(name, range(size), rank, None) for name, (rank, size) in sizes.items()}
    return SimpleNamespace(**axes, data_context=axes["data"], device=torch.device("meta"))


@pytest.mark.parametrize(
    ("case", "tensor"),
    [
        # By default each case on two ranks, and on one or three of them every third case.
        pytest.param(case, t, marks=() if t == 2 or number % 3 == t // 2 else pytest.mark.exhaustive)
        for number, case in enumerate(CASES)
        for t in (1, 2, 3)
        if t < 3 or not case.startswith(NORM_OF_FOUR_HEADS)
    ],
)
def test_layers_of_lists_names_and_shapes_of_module_weights(case: str, tensor: int) -> None:
    config: Any = config_from_hf(theirs(case))
    moe = isinstance(config, MixtralConfig | DeepseekConfig)
    splits = [(False, 1), (False, 2), *([(True, 2)] if tensor == 2 else [])] if moe else [(False, 1)]
    for shard_tensor, expert in splits:
        layers = layers_of(config, shard_tensor)
        for rank in range(tensor):
            at = (expert - 1, expert)
            grid = grid_of(tensor=(rank, tensor), expert=at)
            with torch.device("meta"):
                specs = config.layers(**({"shard_tensor": shard_tensor} if moe else {}))
                modules = [(spec.typename, spec.build(grid)) for spec in specs]
            assert [layer.name for layer in layers] == [name for name, _ in modules]
            assert len(layers) == config.layer_count
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


@pytest.mark.parametrize("case", CASES)
def test_layers_have_as_many_parameters_as_transformers_model(case: str) -> None:
    config = config_from_hf(theirs(case))
    wanted = sum(parameter.numel() for parameter in theirs(case).parameters() if parameter.requires_grad)
    assert number_of_parameters(config) == config.parameter_count == wanted


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


def test_layers_of_refuses_a_configuration_of_another_class() -> None:
    with pytest.raises(TypeError, match=r"the layers of a TransformerConfig are unknown. Give one of Decoder"):
        layers_of(TransformerConfig(*[4] * 5))
