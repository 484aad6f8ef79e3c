"""DeepSeek-V2 and DeepSeek-V3 as lists of layers: multi-head latent attention, and mixtures of experts.

DeepSeek-V2: arXiv:2405.04434. DeepSeek-V3: arXiv:2412.19437. Heads are sharded over the tensor axis, experts over the
expert axis (``moe/``).

Shapes: B sequences of T tokens, D the width, H the number of heads, V the vocabulary, t the tensor axis's size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from ..grid import Grid
from ..grid.comm.regions import copy_all_reduce, gather_reduce_scatter
from ..grid.randomness.random import Distribution
from ..options.base import REQUIRED, option
from ..pipe.spec import LayerSpec
from ..tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from ..tensor_parallel.norm import RMSNorm
from .attention import ShardedAttention
from .attention_options import ScoreOptions
from .config import DeepseekConfig
from .layers import FinalRMSNorm, ResidualBlock, first_and_last
from .mlp import GatedMLP, check_moe_options, make_moe
from .mtp import CarriesIds, mtp_layers
from .replicated_linear import ReplicatedLinear
from .rope import Rope
from .rope_scaling import YarnScaling

_LATENT_EPSILON = 1e-6  # of the norms of latent vectors, whatever the configuration says of the others


def deepseek_layers(
    config: DeepseekConfig, sequence_parallel: bool = False, attention: str = "ring", **moe: Any
) -> list[LayerSpec]:
    """List the specs of a DeepSeek's layers in order, for a ``PipelineModule``: ids (B, T) -> logits (B, T, V / t).

    The list is ``[embedding, block 0, ..., block L - 1, norm, head]``, as that of ``decoder_layers``. With
    ``num_nextn_predict_layers`` it has modules that predict further tokens, and returns several logits (``mtp.py``).

    Args:
        config: the model's configuration.
        sequence_parallel, attention: as for ``decoder_layers``.
        moe: options of ``triax.moe.MoE`` for every block with experts, as for ``decoder_layers``. By default
            ``balance`` is ``"bias"`` with ``scoring_func="sigmoid"``, and ``"sequence"`` with a positive
            ``aux_loss_alpha``.

    Raises:
        TypeError: an option has another name.
        ValueError: ``sequence_parallel`` together with ``num_nextn_predict_layers``.
    """
    check_moe_options("deepseek_layers", moe)
    if config.num_nextn_predict_layers:
        return mtp_layers(config, DeepseekBlock, DeepseekBlockWithIds, sequence_parallel, attention=attention, **moe)
    first, head = first_and_last(config, sequence_parallel)
    return [
        first,
        *(
            LayerSpec(DeepseekBlock, config, i, sequence_parallel=sequence_parallel, attention=attention, **moe)
            for i in range(config.num_hidden_layers)
        ),
        LayerSpec(FinalRMSNorm, config.hidden_size, config.rms_norm_eps, sequence_parallel=sequence_parallel),
        head,
    ]


@dataclass(frozen=True, kw_only=True)
class LatentOptions(ScoreOptions):
    """Options of ``LatentAttention``."""

    rope: Rope = option(REQUIRED, "Rotary embedding, which gives the number of rotated channels.")
    q_rank: int | None = option(
        REQUIRED, "Width of the latent vector of the queries; None: queries are projected from the input."
    )
    kv_rank: int = option(REQUIRED, "Width of the latent vector of keys and values.")
    nope_dim: int = option(REQUIRED, "Width of a head of the keys, without the rotated channels.")
    value_dim: int = option(REQUIRED, "Width of a head of the values.")


class LatentAttention(ShardedAttention):
    """Multi-head latent attention: keys and values are projected from a vector of low rank (arXiv:2405.04434).

        latent (kv_rank), rotated (rope_dim) = W_a x        key head h    = [W_k,h norm(latent), rope(rotated)]
                                                            value head h  = W_v,h norm(latent)

    The rotated channels of a key are the same for all heads. The projections to the latent vectors are replicated over
    the tensor axis; those from them to the heads are sharded by heads.

    Args:
        width: D, the width of the residual stream.
        heads: H, at least the number of tensor-parallel ranks.
        options: the other sizes, positions and scores.
        init, out_init: distributions of the initial weights, and of those of the output projection.
        grid, sequence_parallel, kind: as for ``ShardedAttention``.

    Attributes:
        q: projection to queries, (H (nope_dim + rope_dim), D), sharded by heads; only without ``q_rank``.
        q_a, q_a_norm, q_b: projection to the latent vector of the queries, its norm, and the projection from it.
        kv_a, kv_a_norm, kv_b: these of keys and values. The rows of ``kv_b`` are, head by head, the keys' and the
            values'.
        out: output projection, (D, H value_dim), sharded by heads.

    Shape:
        (B, T, D) -> (B, T, D), as for ``SelfAttention``.
    """

    options: LatentOptions

    def __init__(
        self,
        width: int,
        heads: int,
        options: LatentOptions,
        *,
        grid: Grid,
        init: Distribution,
        out_init: Distribution,
        sequence_parallel: bool = False,
        kind: str = "ring",
    ) -> None:
        common: dict[str, Any] = {"grid": grid, "sequence_parallel": sequence_parallel}
        super().__init__(heads, options, kind=kind, **common)
        column: dict[str, Any] = {**common, "bias": False, "init": init}
        q_rank, kv_rank, value_dim, rope_dim = options.q_rank, options.kv_rank, options.value_dim, options.rope.head_dim
        query, pair = options.nope_dim + rope_dim, options.nope_dim + value_dim
        self.q = ColumnParallelLinear(width, heads * query, unit=query, **column) if q_rank is None else None
        if q_rank is not None:
            self.q_a = ReplicatedLinear(width, q_rank, init=init, **common)
            self.q_a_norm = RMSNorm(q_rank, _LATENT_EPSILON, **common)
            self.q_b = ColumnParallelLinear(q_rank, heads * query, unit=query, **column)
        self.kv_a = ReplicatedLinear(width, kv_rank + rope_dim, init=init, **common)
        self.kv_a_norm = RMSNorm(kv_rank, _LATENT_EPSILON, **common)
        self.kv_b = ColumnParallelLinear(kv_rank, heads * pair, unit=pair, **column)
        self.out = RowParallelLinear(heads * value_dim, width, bias=False, unit=value_dim, init=out_init, **common)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        options = self.options
        latent, rotated = self.kv_a(x).split([options.kv_rank, options.rope.head_dim], dim=-1)
        queries = self.q(x) if self.q is not None else self.q_b(self.q_a_norm(self.q_a(x)))
        q = rearrange(queries, "b t (heads dim) -> b heads t dim", heads=self.heads)
        pairs = rearrange(self.kv_b(self.kv_a_norm(latent)), "b t (heads dim) -> b heads t dim", heads=self.heads)
        k, v = pairs.split([options.nope_dim, options.value_dim], dim=-1)
        if self.axis.size > 1:  # each rank's heads give a part of the gradient
            enter = partial(gather_reduce_scatter, dim=1) if self.sequence_parallel else copy_all_reduce
            rotated = enter(rotated, self.axis)
        shared = rotated[:, None].expand(-1, self.heads, -1, -1)  # (B, heads, T, rope_dim)
        return q, torch.cat([k, shared], dim=-1), v


class DeepseekBlock(ResidualBlock):
    """``ResidualBlock`` of DeepSeek, with RMSNorm, latent attention, and a gated MLP or a mixture of experts.

    Args:
        config: the model's configuration.
        layer: number of the block, counted from 0.
        grid, sequence_parallel, attention: as for ``DecoderBlock``.
        moe: further arguments of ``MoE``.
    """

    def __init__(
        self,
        config: DeepseekConfig,
        layer: int,
        *,
        grid: Grid,
        sequence_parallel: bool = False,
        attention: str = "ring",
        **moe: Any,
    ) -> None:
        scale = float(config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
        if isinstance(config.rope_scaling, YarnScaling):
            scale *= config.rope_scaling.score_factor()
        options = LatentOptions(
            rope=Rope(config.qk_rope_head_dim, config.rope_theta, config.rope_scaling, config.rope_interleave),
            scale=scale,
            q_rank=config.q_lora_rank,
            kv_rank=config.kv_lora_rank,
            nope_dim=config.qk_nope_head_dim,
            value_dim=config.v_head_dim,
        )
        latent = partial(LatentAttention, config.hidden_size, config.num_attention_heads, options, kind=attention)
        super().__init__(
            config,
            grid=grid,
            sequence_parallel=sequence_parallel,
            make_norm=RMSNorm,
            make_attention=latent,
            make_mlp=partial(make_moe, **moe) if layer in config.moe_layers else GatedMLP,
        )
        self.max_position_embeddings = config.max_position_embeddings  # the most that generation asks for


class DeepseekBlockWithIds(CarriesIds, DeepseekBlock):
    """``DeepseekBlock`` of a model with multi-token prediction."""
