"""The one block of all decoders: settings of several families in one model, which no published family has."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest
import torch

import triax
from triax import Grid
from triax.models import DecoderConfig, decoder_layers
from triax.models.attention import SelfAttention
from triax.models.config import CONFIGS, AnyDecoderConfig, GPTConfig, LlamaConfig, config_from_fields
from triax.models.layers import ResidualBlock
from triax.models.mlp import GatedMLP
from triax.tensor_parallel.norm import RMSNorm

from support.decoder_runs import VOCABULARY, Job, Place, assert_equal_to_one_process

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 12, "mlp_only_layers": (1,)}
MODELS: dict[str, AnyDecoderConfig] = {
    "a GPT with experts and a window": GPTConfig(**_SIZES, **_EXPERTS, gated=True, hidden_act="silu", sliding_window=3),
    "norms on both sides of experts": DecoderConfig(
        **_SIZES, **_EXPERTS, intermediate_size=24, norm="rms_offset", norm_place="both", scale_embedding=True
    ),
    "parallel branches with experts": DecoderConfig(
        **_SIZES, **_EXPERTS, intermediate_size=24, norm="layer", parallel_residual=True, shared_norm=True, qk_norm=True
    ),
    "one weight of queries, keys and values, rotated": DecoderConfig(
        **_SIZES, intermediate_size=24, fused_qkv=True, qkv_bias=True, norm_place="after", partial_rotary_factor=0.5
    ),
}
# Experts on the expert axis; a window, rotations and fused weights on the context axis.
SHARDED, EXPERT, CONTEXT, STAGES = (
    Place((2, 1, 1, 2), sequence_parallel=True),
    Place((1, 4, 1, 1), expert=2),
    Place((1, 2, 2, 1)),
    Place((4, 1, 1, 1)),
)
JOBS = [Job(config, length=8, scale=4.0) for config in MODELS.values()]
CELLS = [
    *((job, SHARDED) for job in JOBS[1:]),
    *((job, EXPERT) for job in JOBS[1:2]),
    *((job, CONTEXT) for job in JOBS[::3]),
]
MORE_CELLS = [cell for cell in itertools.product(JOBS, (SHARDED, EXPERT, CONTEXT, STAGES)) if cell not in CELLS]


@pytest.mark.parametrize("cells", [CELLS, pytest.param(MORE_CELLS, marks=pytest.mark.exhaustive)], ids=len)
def test_decoders_of_mixed_settings_equal_one_process(ranks: Any, cells: list[tuple[Job, Place]]) -> None:
    assert_equal_to_one_process(ranks, cells)


@pytest.mark.parametrize("shared_norm", [False, True])
@pytest.mark.parametrize("branch", ["attention", "mlp"])
def test_a_parallel_block_with_one_branch_adds_its_output(branch: str, shared_norm: bool) -> None:
    """The output and all gradients are those of x + branch(norm(x))."""
    config = LlamaConfig(**_SIZES, intermediate_size=24)
    block = ResidualBlock(
        config,
        grid=Grid(),
        make_norm=RMSNorm,
        make_attention=partial(SelfAttention, 16, 4) if branch == "attention" else None,
        make_mlp=GatedMLP if branch == "mlp" else None,
        parallel=True,
        shared_norm=shared_norm,
    ).double()
    norm = block.norm1 if branch == "attention" else block.norm2
    assert norm is not None
    x = torch.randn(2, 8, 16, dtype=torch.float64, requires_grad=True)
    taken = [x, *block.parameters()]
    only: Any = block.attention if branch == "attention" else block.mlp
    plain = x + (only(norm(x), None) if branch == "attention" else only(norm(x)))
    wanted = torch.autograd.grad(plain.square().sum(), taken)
    got = torch.autograd.grad(block(x).square().sum(), taken)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_configurations_are_rebuilt_from_their_repr_and_fields() -> None:
    scope = {cls.__name__: cls for cls in (*CONFIGS.values(), triax.models.RopeScaling, triax.models.YarnScaling)}
    presets = [cls.preset(name) for cls in CONFIGS.values() for name in cls.PRESETS]
    for config in [*MODELS.values(), *presets]:
        assert eval(repr(config), scope) == config
        assert type(config)(**vars(config)) == config
        assert config_from_fields(type(config).__name__, asdict(config)) == config


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (lambda: LlamaConfig(fused_qkv=True, num_key_value_heads=8), ("num_key_value_heads is 8", "32")),
        (lambda: GPTConfig(num_experts=4), ("num_experts is 4", "gated=False", "'gelu_new'")),
        (lambda: GPTConfig(num_key_value_heads=4), ("num_key_value_heads",)),  # type: ignore[call-arg]
        (lambda: LlamaConfig(num_experts=2, num_experts_per_tok=3), ("num_experts_per_tok is 3", "2 experts")),
        (lambda: decoder_layers(LlamaConfig(), capacity=1.0), ("capacity", "experts")),
    ],
)
def test_settings_that_contradict_each_other_are_refused(make: Any, facts: tuple[str, ...]) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        make()
    assert all(fact in str(caught.value) for fact in facts)
