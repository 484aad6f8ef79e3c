"""Settings of hybrids in ``config.json``: the forms that are read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from triax.models.huggingface.config import from_hf
from triax.models.recurrent.sizes import DeltaNetSizes, Mamba2Sizes

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
NEMOTRON = _SIZES | {"model_type": "nemotron_h", "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2}
BAMBA = _SIZES | {"model_type": "bamba", "num_hidden_layers": 3, "mamba_n_heads": 4, "attn_layer_indices": [1]}
QWEN = _SIZES | {"model_type": "qwen3_5_text", "num_hidden_layers": 5}


def read(config: dict[str, Any], **changes: Any) -> Any:
    return from_hf(config | changes)


def test_the_blocks_of_nemotron_h_are_a_list_or_a_pattern() -> None:
    kinds = ("linear_attention", "mlp", "full_attention", "linear_attention")
    listed = read(NEMOTRON, layers_block_type=list(kinds))
    assert listed.layer_types == kinds and listed.num_hidden_layers == 4 and not any(listed.no_rope_layers)
    assert listed.linear_attention == Mamba2Sizes(4, 8, 128, n_groups=2, time_step_min=0.001)
    assert read(NEMOTRON, hybrid_override_pattern="M-*M", num_hidden_layers=9) == listed
    assert read(NEMOTRON, layers_block_type=["mamba", "mlp", "attention", "mamba"]) == listed
    former = {"mamba_n_groups": 4, "mamba_d_conv": 3, "mamba_dt_min": 0.5, "mamba_conv_bias": False}
    sizes = read(NEMOTRON, hybrid_override_pattern="M-*M", **former).linear_attention
    assert sizes == Mamba2Sizes(4, 8, 128, n_groups=4, conv_kernel=3, use_conv_bias=False, time_step_min=0.5)


def test_hybrid_layer_types_are_read_from_intervals_or_lists() -> None:
    found = read(QWEN)
    assert [kind[0] for kind in found.layer_types] == list("lllfl")
    assert found.linear_attention == DeltaNetSizes(32, 128, 16, 128)
    assert [kind[0] for kind in read(QWEN, full_attention_interval=2).layer_types] == list("lflfl")
    assert read(QWEN, layer_types=["full_attention"] * 5).linear_attention is None
    found = read(BAMBA)
    assert [kind[0] for kind in found.layer_types] == list("lfl")
    assert found.linear_attention == Mamba2Sizes(4, 16, 256)  # mamba_expand x hidden_size / mamba_n_heads


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (NEMOTRON, {"hybrid_override_pattern": "ME*-"}, r"has 'moe', but nemotron_h is implemented only with 'linear_"),
        (NEMOTRON, {"hybrid_override_pattern": "M?"}, r"layers_block_type has '\?'"),
        (NEMOTRON, {"hybrid_override_pattern": "M-", "time_step_min": "x"}, "time_step_min is 'x', but must be a numb"),
        (NEMOTRON, {"hybrid_override_pattern": "M-", "n_groups": 3}, "has 4 heads, which 3 does not divide"),
        (NEMOTRON, {"hybrid_override_pattern": "M-", "use_bias": 1}, "use_bias is 1, but must be true or false"),
        (NEMOTRON, {"layers_block_type": [1]}, r"layers_block_type is \[1\], but must be a list of words"),
        (BAMBA, {"time_step_limit": [0.0, 1.0]}, r"time_step_limit is \[0.0, 1.0\], but only \[0 or more, Infinity\]"),
        (BAMBA, {"attn_layer_indices": "1"}, "attn_layer_indices is '1', but must be a list of numbers"),
        (BAMBA, {"mamba_d_head": 7}, r"mamba_n_heads=4 heads of mamba_d_head=7 channels are 28, but hidden_size=32"),
        (QWEN, {"layer_types": ["full_attention"]}, "layer_types has 1 entries, but num_hidden_layers is 5"),
        (QWEN, {"linear_num_key_heads": 0}, "linear_num_key_heads is 0, but must be a whole number from 1"),
        (QWEN, {"linear_num_key_heads": 5}, "has 32 heads, which 5 does not divide"),
    ],
)
def test_settings_of_hybrids_that_triax_lacks_are_refused(
    config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"config.json: .*{message}"):
        read(config, **changes)
