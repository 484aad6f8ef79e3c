"""Hybrids of attention and recurrent layers: loss, gradients and stepped weights on every axis are one process's; and
generation from the states of the cache is the forward pass of the whole sequence."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import triax
from triax.inference.decode_loop import layers_with_cache
from triax.inference.kv_cache import KVCache
from triax.models.config import DecoderConfig, config_from_fields
from triax.models.decoder import decoder_layers
from triax.models.recurrent.sizes import DeltaNetSizes, Mamba2Sizes
from triax.plugins.plan.layer_shapes import layers_of

from support.decoder_runs import VOCABULARY, Job, Place, assert_equal_to_one_process

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 20,
    "head_dim": 6,
}
LINEAR, FULL = "linear_attention", "full_attention"
MAMBA = DecoderConfig(
    **_COMMON,
    num_hidden_layers=4,
    layer_types=(LINEAR, "mlp", FULL, LINEAR),
    one_branch=True,
    no_rope_layers=(0, 0, 0, 0),
    hidden_act="relu2",
    gated=False,
    dropout=0.1,
    linear_attention=Mamba2Sizes(6, 4, 5, n_groups=2, time_step_min=0.01),
)
DELTA = DecoderConfig(
    **_COMMON,
    num_hidden_layers=3,
    layer_types=(LINEAR, FULL, LINEAR),
    norm="rms_offset",
    qk_norm=True,
    attn_output_gate=True,
    partial_rotary_factor=0.34,
    linear_attention=DeltaNetSizes(4, 5, 2, 6),
)
CONFIGS = {
    "mamba": MAMBA,
    "delta": DELTA,
    # Heads that the ranks do not share evenly, and fewer groups than ranks.
    "mamba-one-group": replace(MAMBA, linear_attention=Mamba2Sizes(5, 4, 3, use_conv_bias=False, use_bias=True)),
    "mamba-three-groups": replace(MAMBA, linear_attention=Mamba2Sizes(9, 2, 3, n_groups=3, conv_kernel=1)),
    "delta-one-key": replace(DELTA, linear_attention=DeltaNetSizes(3, 4, 1, 5, conv_kernel=3)),
}


def job(name: str, **options: Any) -> Job:
    return Job(CONFIGS[name], scale=4.0, **options)


@pytest.mark.parametrize(
    "cells",
    [
        [
            (job("delta", packed=True), Place((1, 1, 2, 1), stage=2)),
            (job("mamba-one-group", packed=True), Place((1, 1, 1, 2), sequence_parallel=True)),
            (job("mamba-three-groups", length=13, packed=True), Place((1, 1, 2, 1), stage=1)),
            (job("delta-one-key", length=11), Place((1, 1, 2, 2), recompute="selective")),
        ],
        pytest.param(
            [
                (job("mamba", length=13, packed=True), Place((2, 1, 2, 1), schedule="zb-h1", stage=1)),
                (job("mamba-three-groups", length=20, packed=True), Place((1, 1, 4, 1))),
            ],
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=len,
)
def test_hybrids_train_on_grids_as_on_one_process(ranks: Any, cells: list[tuple[Job, Place]]) -> None:
    assert_equal_to_one_process(ranks, cells)


@pytest.mark.exhaustive
def test_more_hybrids_train_on_grids_as_on_one_process(ranks: Any) -> None:
    assert_equal_to_one_process(
        ranks,
        [
            (job("mamba"), Place((1, 1, 2, 1))),
            (job("delta"), Place((1, 1, 1, 2), sequence_parallel=True)),
            (job("mamba"), Place((1, 2, 1, 1), stage=3)),
            (job("delta", length=26, packed=True), Place((1, 1, 4, 1), recompute="full")),
            (job("delta", packed=True), Place((1, 2, 2, 1), stage=3)),
        ],
    )


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("grid", [(2, 1, 2, 2), (1, 2, 2, 2), (1, 1, 4, 2), (2, 1, 4, 1), (1, 1, 1, 4)], ids=str)
def test_every_hybrid_trains_on_larger_grids_as_on_one_process(ranks: Any, grid: tuple[int, int, int, int]) -> None:
    cells = [
        (job(config, length=length, packed=packed), Place(grid, sequence_parallel=length == 24, stage=1))
        for config in CONFIGS
        for length, packed in ((24, False), (21, True))
        if CONFIGS[config].linear_attention.heads >= grid[3]  # type: ignore[union-attr]
    ]
    assert_equal_to_one_process(ranks, cells)


# -------------------------------------------------------------------------------------------------- generation


def model(config: DecoderConfig, grid: triax.Grid | None = None) -> triax.PipelineModule:
    module = triax.PipelineModule(decoder_layers(config), grid=grid or triax.Grid(), dtype=torch.float64, seed=3)
    for parameter in module.parameters():
        if parameter.dim() == 2:
            parameter.data *= 5  # at their initial size, all logits are nearly equal
    return module.eval()


def tokens(rows: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_cached_hybrids_have_the_logits_of_the_whole_sequence(name: str) -> None:
    module, x = model(CONFIGS[name]), tokens(4, 13)
    whole, cache = module(x), KVCache(torch.device("cpu"))
    cache.reserve(6, 16)
    for layer in layers_with_cache(module):
        layer.cache = cache
    places = {0: 4, 1: 5, 2: 0, 3: 2}  # row -> slot
    seen = dict.fromkeys(places, 0)

    def go_on(rows: list[int], count: int) -> None:
        """Run the next ``count`` tokens of some rows, and compare their logits."""
        starts = [seen[row] for row in rows]
        cache.begin(0, [places[row] for row in rows], starts, count)
        ids = torch.stack([x[row, start : start + count] for row, start in zip(rows, starts, strict=True)])
        for row, start, logits in zip(rows, starts, module.run_stage(0, ids), strict=True):
            torch.testing.assert_close(logits, whole[row, start : start + count], rtol=1e-10, atol=1e-10)
            seen[row] += count

    for row, length in ((0, 3), (1, 7), (2, 1), (3, 5)):
        go_on([row], length)
    for rows in ([0, 1, 2, 3], [2, 3], [0, 1], [1], [3, 0]):
        go_on(rows, 1)
    go_on([2, 3], 3)  # several tokens onto different beginnings
    for row in (1, 2):  # a slot used again, with a state of another sequence in it
        seen[row] = 0
    go_on([1], 2)
    go_on([2], 1)
    go_on([1, 2, 0], 1)
    seen[2], places[2] = 0, 3
    go_on([2], 1)
    seen[1] = 0
    go_on([2], 1)


@torch.no_grad()
def test_bytes_of_recurrent_states_equal_the_formula() -> None:
    for config in (MAMBA, DELTA):
        module, cache = model(config), KVCache(torch.device("cpu"))
        cache.reserve(6, 16)
        for layer in layers_with_cache(module):
            layer.cache = cache
        cache.begin(0, [0], [0], 2)
        module.run_stage(0, tokens(1, 2))
        sizes: Any = config.linear_attention
        mamba = isinstance(sizes, Mamba2Sizes)
        value, key = (sizes.head_dim, sizes.state_size) if mamba else (sizes.value_head_dim, sizes.key_head_dim)
        state = sizes.heads * key * value + (sizes.conv_kernel - 1) * (sizes.heads * value + 2 * sizes.groups * key)
        keys = 2 * 2 * 6 * 16  # of the one block with attention: two heads of six channels, for 16 tokens
        assert cache.bytes == 8 * 6 * (2 * state + keys)


PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7, 9, 3], [2]]
NEW = 5


def generated(name: str, grid: tuple[int, int, int, int], beams: int) -> list[list[int]]:
    pipe, data, context, tensor = grid
    module = model(CONFIGS[name], triax.Grid(pipe, data, tensor, context=context))
    options: dict[str, Any] = {"num_beams": beams} if beams > 1 else {"temperature": 0}
    found = triax.init_inference(module, max_length=24).generate(PROMPTS, max_new_tokens=NEW, **options)
    return [list(each) for each in found]


@torch.no_grad()
def greedy(name: str) -> list[list[int]]:
    """Without a cache."""
    module, found = model(CONFIGS[name]), []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(NEW):
            ids.append(int(module(torch.tensor([ids]))[0, -1].argmax()))
        found.append(ids)
    return found


@torch.no_grad()
def searched(name: str, beams: int) -> list[list[int]]:
    """Beam search without a cache: there is no end before the last token."""
    module, found = model(CONFIGS[name]), []
    for prompt in PROMPTS:
        kept = [(0.0, list(prompt))]
        for _ in range(NEW):
            logits = module(torch.tensor([ids for _, ids in kept]))[:, -1].log_softmax(-1)
            every = [
                (score + float(logit), [*ids, token])
                for (score, ids), row in zip(kept, logits, strict=True)
                for token, logit in enumerate(row)
            ]
            kept = sorted(every, reverse=True)[:beams]
        found.append(kept[0][1])
    return found


def test_hybrids_on_grids_generate_as_without_a_cache(ranks: Any) -> None:
    assert generated("delta", (1, 1, 1, 1), 1) == greedy("delta")
    assert generated("mamba", (1, 1, 1, 1), 3) == searched("mamba", 3)  # states are copied from slot to slot
    for found in ranks(2, generated, "mamba", (1, 1, 2, 1), 1):  # prompts in parts
        assert found == greedy("mamba")
    for found in ranks(2, generated, "delta", (1, 1, 2, 1), 3):
        assert found == searched("delta", 3)


# ----------------------------------------------------------------------------------------------- configurations


@pytest.mark.parametrize("name", CONFIGS)
def test_hybrid_configurations_count_parameters_and_are_rebuilt(name: str) -> None:
    config = CONFIGS[name]
    assert config.parameter_count == sum(parameter.numel() for parameter in model(config).parameters())
    assert config_from_fields("DecoderConfig", asdict(config)) == config


def test_impossible_hybrid_configurations_are_refused() -> None:
    with pytest.raises(ValueError, match="linear_attention is None, but layer_types has 2 blocks"):
        replace(DELTA, linear_attention=None)
    with pytest.raises(ValueError, match="but layer_types has 0 blocks"):
        replace(DELTA, layer_types=())
    with pytest.raises(ValueError, match=r"layer_types has 'mlp'\. Give one of"):
        replace(DELTA, layer_types=("mlp", FULL, LINEAR))
    with pytest.raises(ValueError, match="one_branch is True with layer_types"):
        replace(MAMBA, norm_place="after")
    with pytest.raises(ValueError, match="a block with experts has two branches"):
        replace(MAMBA, num_experts=4)
    with pytest.raises(ValueError, match="has 6 heads, which 4 does not divide"):
        Mamba2Sizes(6, 4, 5, n_groups=4)
    with pytest.raises(ValueError, match="conv_kernel of DeltaNetSizes is 0"):
        DeltaNetSizes(4, 4, 2, 4, conv_kernel=0)
    with pytest.raises(ValueError, match="heads of linear_attention"):
        replace(MAMBA, linear_attention=Mamba2Sizes(2, 4, 4)).check_tensor(4)
    for config in (MAMBA, DELTA):
        with pytest.raises(ValueError, match="triax plan does not count blocks of 'linear_attention', of which"):
            layers_of(config)
