"""ALiBi against the paper's formula in plain PyTorch, and positions that depend on a row's length, on every axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import triax
from triax.grid import Grid
from triax.grid.randomness.random import Normal
from triax.models.alibi import Alibi, slopes
from triax.models.attention import SelfAttention
from triax.models.config import DecoderConfig
from triax.models.decoder import decoder_layers
from triax.models.rope_scaling import DynamicScaling, LongRopeScaling

from support.decoder_runs import VOCABULARY, Job, Place, assert_equal_to_one_process

WIDTH, DIM, LENGTH = 12, 4, 9
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [4, 4, 4, 4, 4, 4, 4, 9, 9]])


def paper(q: Tensor, k: Tensor, v: Tensor, steep: list[float], documents: Tensor | None, window: int | None) -> Tensor:
    """softmax(q k / sqrt(dim) - slope (i - j)) v over earlier tokens of the document (Press et al. 2022, section 3)."""
    behind = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)  # i - j
    scores = q @ k.transpose(2, 3) / DIM**0.5 - torch.tensor(steep).double()[:, None, None] * behind
    unseen = (behind < 0) if window is None else (behind < 0) | (behind >= window)
    if documents is not None:
        unseen = unseen | (documents[:, None, :, None] != documents[:, None, None])
    return scores.masked_fill(unseen, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "packed"])
@pytest.mark.parametrize("window", [None, 3])
def test_attention_with_alibi_equals_the_papers_formula(
    heads: int, kv_heads: int, documents: Tensor | None, window: int | None
) -> None:
    torch.manual_seed(3)
    scale = DIM**-0.5
    rope = Alibi(heads, kv_heads, (0, heads), scale)
    common: dict[str, Any] = {"init": Normal(0.4), "out_init": Normal(0.4), "scale": scale, "window": window}
    layer = SelfAttention(WIDTH, heads, grid=Grid(), head_dim=DIM, kv_heads=kv_heads, rope=rope, **common).double()
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    y = layer(x, documents)
    found = torch.autograd.grad(y, [x, *layer.parameters()], dy)

    k, v = F.linear(x, layer.kv.weight).chunk(2, dim=-1)
    q, k, v = (t.unflatten(-1, (-1, DIM)).transpose(1, 2) for t in (F.linear(x, layer.q.weight), k, v))
    k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
    attended = paper(q, k, v, slopes(heads), documents, window)
    right = F.linear(attended.transpose(1, 2).flatten(2), layer.out.weight)  # type: ignore[arg-type]
    torch.testing.assert_close(y, right, rtol=1e-10, atol=1e-12)
    for mine, theirs in zip(found, torch.autograd.grad(right, [x, *layer.parameters()], dy), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_alibi_slopes_equal_those_of_the_paper() -> None:
    """Those of the paper for 8 and 16 heads, and the authors' rule for other numbers."""
    assert slopes(8) == [2.0**-h for h in range(1, 9)]
    assert slopes(16) == [2.0 ** (-h / 2) for h in range(1, 17)]
    assert slopes(12) == [2.0**-h for h in range(1, 9)] + [2.0 ** (-h / 2) for h in (1, 3, 5, 7)]


# -------------------------------------------------------------------------------------------------- on the axes

_BASE = DecoderConfig(VOCABULARY, 32, 24, 2, 6, num_key_value_heads=2, intermediate_size=20)
_FACTORS = LongRopeScaling((1.0, 1.2), (1.0, 3.0), 8, attention_factor=1.2)
CONFIGS = {
    "added": replace(_BASE, alibi="added", embedding_norm=True, norm="layer"),
    "rounded": replace(_BASE, alibi="rounded"),
    "longrope": replace(_BASE, rope_scaling=_FACTORS),
    "dynamic": replace(_BASE, rope_scaling=DynamicScaling(2.0, 8), max_position_embeddings=8),
    "norms": replace(_BASE, qk_norm_per_head=True, norm="layer_weight", logit_scale=0.3, residual_multiplier=0.4),
    "offsets": replace(_BASE, norm="layer_offset", qk_norm=True, qk_norm_after=True, embedding_multiplier=2.0),
    "plain": replace(_BASE, norm="rms_plain", qk_norm=True, rope_reversed=True, rope_interleave=True),
}


@pytest.mark.parametrize(
    ("place", "packed", "names"),
    [
        (Place((1, 1, 2, 1)), False, ("added", "rounded", "longrope", "dynamic")),
        (Place((1, 1, 1, 2), sequence_parallel=True), True, ("added", "norms", "offsets", "plain")),
        *(
            pytest.param(place, packed, [*CONFIGS], marks=pytest.mark.exhaustive)
            for place, packed in (
                (Place((1, 1, 2, 1)), False),
                (Place((1, 1, 1, 2), sequence_parallel=True), True),
                (Place((1, 1, 2, 1)), True),
                (Place((1, 1, 2, 1), "ulysses"), True),
                (Place((1, 1, 2, 1), "gather"), False),
                (Place((1, 1, 1, 3)), False),
                (Place((1, 1, 2, 2), "gather", sequence_parallel=True), False),
            )
        ),
    ],
    ids=str,
)
def test_alibi_on_every_axis_equals_one_process(ranks: Any, place: Place, packed: bool, names: Sequence[str]) -> None:
    assert_equal_to_one_process(ranks, [(Job(CONFIGS[name], packed=packed, scale=4.0), place) for name in names])


def test_contradicting_settings_of_a_decoder_are_refused() -> None:
    for changes, said in (
        ({"alibi": "bloom"}, "alibi = 'bloom'"),
        ({"alibi": "added", "attn_logit_softcapping": 2.0}, "the cap would act on the biases too"),
        ({"qk_norm_after": True}, "needs qk_norm=True"),
        ({"qk_norm": True, "qk_norm_per_head": True}, "qk_norm is True and qk_norm_per_head is True"),
        ({"query_pre_attn_scalar": 3.0, "attention_multiplier": 0.2}, "both are factors of the scores"),
        ({"head_bias": True, "logit_scale": 0.5}, "which a head with a bias lacks"),
        ({"norm": "layernorm"}, "norm = 'layernorm'"),
    ):
        with pytest.raises(ValueError, match=said):
            replace(_BASE, **changes)
    with pytest.raises(ValueError, match="one above 0 for each pair"):
        LongRopeScaling((1.0,), (1.0, 2.0), 8)
    with pytest.raises(ValueError, match="but 4 channels are rotated"):
        triax.PipelineModule(
            decoder_layers(replace(_BASE, rope_scaling=LongRopeScaling((1.0,), (2.0,), 8))), grid=Grid()
        )
    with pytest.raises(ValueError, match="Give at least 1 for each"):
        DynamicScaling(0.5)
