"""Decoder-only transformers as lists of layers: GPT, Llama, Mixtral, Gemma, Phi, OPT, GPT-NeoX, Falcon and more.

One configuration, ``DecoderConfig``, and one block for all of them. Its settings say in what a model differs from a
Llama (Touvron et al. 2023, arXiv:2302.13971, section 2.2); ``models/huggingface/`` has those of each family.
Attention and MLP are each a column-parallel and a row-parallel layer over the tensor axis (Shoeybi et al. 2019,
arXiv:1909.08053, section 3), so a block costs two all-reduces forward and two backward. Dropout acts on the embeddings
and on the output of each residual branch, and not, as in GPT-2, on the attention probabilities.

Shapes: B sequences of T tokens, D the width, V the vocabulary, t the tensor axis's size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from ..grid import Grid
from ..grid.randomness.random import Normal
from ..grid.ranges import split
from ..pipe.spec import LayerSpec
from ..tensor_parallel.norm import LayerNorm, OffsetLayerNorm, OffsetRMSNorm, RMSNorm
from .alibi import Alibi
from .attention import SelfAttention
from .attention_options import AttentionOptions
from .config import AnyDecoderConfig, DecoderConfig
from .layers import (
    FinalLayerNorm,
    FinalOffsetLayerNorm,
    FinalOffsetRMSNorm,
    FinalRMSNorm,
    ResidualBlock,
    WithoutNorm,
    first_and_last,
)
from .mlp import MLP, GatedMLP, check_moe_options, make_moe
from .packed import attach, detach
from .positions import PositionEmbedding
from .recurrent.delta_net import GatedDeltaNet
from .recurrent.mamba2 import Mamba2
from .recurrent.sizes import Mamba2Sizes
from .replicated_linear import ReplicatedLinear
from .rope import Rope

# Norms by their names in ``DecoderConfig``: of blocks, before the head, and their arguments.
_NORMS: dict[str, tuple[Callable[..., nn.Module], Callable[..., nn.Module], dict[str, Any]]] = {
    "rms": (RMSNorm, FinalRMSNorm, {}),
    "rms_offset": (OffsetRMSNorm, FinalOffsetRMSNorm, {}),
    "rms_plain": (RMSNorm, FinalRMSNorm, {"affine": False}),
    "layer": (LayerNorm, FinalLayerNorm, {}),
    "layer_offset": (OffsetLayerNorm, FinalOffsetLayerNorm, {}),
    "layer_weight": (LayerNorm, FinalLayerNorm, {"bias": False}),
    "layer_plain": (LayerNorm, FinalLayerNorm, {"affine": False}),
}


def decoder_layers(
    config: AnyDecoderConfig, sequence_parallel: bool = False, attention: str = "ring", **moe: Any
) -> list[LayerSpec]:
    """List the specs of a decoder's layers in order, for a ``PipelineModule``: ids (B, T) -> logits (B, T, V / t).

    The list is ``[embedding, block 0, ..., block L - 1, norm, head]``, with a norm and learned positions, if the model
    has them, behind the embedding. The layers are built later, by the ``PipelineModule``, and the list does not depend
    on the grid. The input may be ``(ids, documents)`` for packed rows (see ``packed.py``).

    ``gpt_layers``, ``llama_layers`` and ``mixtral_layers`` are other names of this function.

    >>> config = triax.GPTConfig.preset("bytes-tiny")
    >>> layers = triax.gpt_layers(config)
    >>> model = triax.PipelineModule(layers, loss_fn=triax.NextTokenLoss(triax.Grid(), config.vocab_size))
    >>> len(layers), model(torch.tensor([[1, 2, 3]])).shape
    (6, torch.Size([1, 3, 256]))

    Args:
        config: the model's configuration.
        sequence_parallel: keep on each tensor-parallel rank, between the layers, only its shard (B, T / t, D) of the
            sequence. The tensor axis's size t must divide T (Korthikanti et al. 2022, arXiv:2205.05198).
        attention: how the ranks of the context axis compute attention: ``ring``, ``ulysses`` or ``gather``. It has no
            effect on a grid with context=1.
        moe: options of ``triax.moe.MoE`` for every block with experts: ``balance``, ``bias_rate``, ``z_loss``,
            ``capacity``, ``shard_tensor``, ``lend``. The coefficient of the load-balancing loss is the configuration's.

    Returns:
        The specs. With ``tie_word_embeddings`` the first and the last spec are tied with the key ``"embed"``.

    Raises:
        TypeError: an option of ``moe`` has another name, or the configuration has no experts.
    """
    check_moe_options("decoder_layers", moe)
    if moe and not config.moe_layers:
        raise TypeError(f"{next(iter(moe))} is an option of experts, but {config!r} has none. Leave it out.")
    first, head = first_and_last(
        config,
        sequence_parallel,
        scale=(config.hidden_size**0.5 if config.scale_embedding else 1.0) * config.embedding_multiplier,
        logit_scale=config.logit_scale,
        softcap=config.final_logit_softcapping,
        bias=config.head_bias,
        width=config.embedding_size,
    )
    common: dict[str, Any] = {"sequence_parallel": sequence_parallel}
    block = _BLOCKS[config.BLOCK]
    _, norm, how = _NORMS[config.norm]
    last = LayerSpec(norm, config.hidden_size, config.norm_epsilon, **common, **how)
    widths = [(config.embedding_size, config.hidden_size)] * bool(config.embedding_size)
    return [
        first,
        *(LayerSpec(Projection, config, *pair, **common) for pair in widths),
        *([LayerSpec(EmbeddingNorm, config, **common)] * config.embedding_norm),
        *([LayerSpec(PositionEmbedding, config, config.position_offset, **common)] * config.learned_positions),
        *(LayerSpec(block, config, i, attention=attention, **common, **moe) for i in range(config.num_hidden_layers)),
        LayerSpec(WithoutNorm) if config.norm_place == "sum" else last,
        *(LayerSpec(Projection, config, *pair[::-1], **common) for pair in widths),
        head,
    ]


class EmbeddingNorm(nn.Module):
    """Norm behind the token embeddings, of the model's kind: (B, T, D) -> (B, T, D)."""

    def __init__(self, config: AnyDecoderConfig, *, grid: Grid, sequence_parallel: bool = False) -> None:
        super().__init__()
        make, _, how = _NORMS[config.norm]
        common: dict[str, Any] = {"grid": grid, "sequence_parallel": sequence_parallel}
        self.norm = make(config.hidden_size, config.norm_epsilon, **common, **how)

    def forward(self, x: Any) -> Any:
        """Normalize x, or the first of ``(x, documents)`` for packed rows."""
        x, documents = detach(x)
        return attach(self.norm(x), documents)


class Projection(nn.Module):
    """Projection between the width of the token embeddings and that of the model: (B, T, K) -> (B, T, N)."""

    def __init__(
        self, config: AnyDecoderConfig, inputs: int, outputs: int, *, grid: Grid, sequence_parallel: bool = False
    ) -> None:
        super().__init__()
        init = Normal(config.initializer_range)
        self.linear = ReplicatedLinear(inputs, outputs, grid=grid, init=init, sequence_parallel=sequence_parallel)

    def forward(self, x: Any) -> Any:
        """Project x, or the first of ``(x, documents)`` for packed rows."""
        x, documents = detach(x)
        return attach(self.linear(x), documents)


class DecoderBlock(ResidualBlock):
    """``ResidualBlock`` with the norms, the branches, the MLP and the attention that a ``DecoderConfig`` names.

    Args:
        config: the model's configuration.
        layer: number of the block, counted from 0.
        grid, sequence_parallel: as for ``ResidualBlock``.
        attention: how the ranks of the context axis compute attention: ``ring``, ``ulysses`` or ``gather``.
        moe: further arguments of ``MoE``, of a block with experts.
    """

    def __init__(
        self,
        config: AnyDecoderConfig,
        layer: int = 0,
        *,
        grid: Grid,
        sequence_parallel: bool = False,
        attention: str = "ring",
        **moe: Any,
    ) -> None:
        norm, _, how = _NORMS[config.norm]
        kind, norm_place, width = config.type_of(layer), config.norm_place, config.hidden_size
        if norm_place == "after_attention":
            norm_place = "after" if kind == "attention" else "before"
        make_attention: Callable[..., nn.Module] | None = None
        if kind == "linear_attention":
            sizes = config.linear_attention
            recurrent: Any = Mamba2 if isinstance(sizes, Mamba2Sizes) else GatedDeltaNet
            make_attention = partial(recurrent, width, sizes, eps=config.norm_epsilon)
        elif kind == "attention":
            options = attention_options(config, layer, grid)
            make_attention = partial(SelfAttention, width, config.num_attention_heads, options, kind=attention)
        make_mlp: Callable[..., nn.Module] | None = None
        if layer in config.moe_layers:
            make_mlp = partial(make_moe, **moe)
        elif kind == "mlp" or not config.one_branch:
            make_mlp = partial(GatedMLP if config.gated else MLP, activation=config.hidden_act, bias=config.mlp_bias)
        super().__init__(
            config,
            grid=grid,
            sequence_parallel=sequence_parallel,
            make_norm=partial(norm, **how),
            make_attention=make_attention,
            make_mlp=make_mlp,
            norm_place=norm_place,
            parallel=config.parallel_residual,
            shared_norm=config.shared_norm,
            multiplier=config.residual_multiplier,
        )
        if not config.learned_positions:  # else the layer of positions has it
            self.max_position_embeddings = config.generated_positions  # the most that generation asks for


def attention_options(config: AnyDecoderConfig, layer: int, grid: Grid) -> AttentionOptions:
    """Return the options of the attention of a block, counted from 0, on a rank of a grid."""
    rotated, scalar, eps = config.has_rope(layer), config.query_pre_attn_scalar, config.norm_epsilon
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    scale = config.attention_multiplier if scalar is None else scalar**-0.5
    rope: Rope | Alibi | None = None
    if rotated and isinstance(config, DecoderConfig):
        turned = config.rope_interleave, True, config.rope_reversed
        rope = Rope(config.rotary_dim, *config.rope_of(layer), *turned)
    elif config.alibi:
        config.check_tensor(grid.tensor.size)
        scale, held = scale or config.head_dim**-0.5, split(heads, grid.tensor.size, grid.tensor.rank)
        rope = Alibi(heads, keys, held, scale, rounded=config.alibi == "rounded")
    norm, _, how = _NORMS[config.norm]
    return AttentionOptions(
        head_dim=config.head_dim,
        kv_heads=None if config.fused_qkv else keys,
        bias=config.qkv_bias,
        out_bias=config.out_bias,
        qk_norm=eps if config.has_qk_norm else None,
        norm_all_heads=config.qk_norm_all_heads,
        norm_per_head=config.qk_norm_per_head,
        norm_after=config.qk_norm_after,
        norm=partial(norm, **how) if config.norm.startswith("rms") else RMSNorm,
        clip=config.clip_qkv,
        output_gate=config.attn_output_gate,
        rope=rope,
        window=config.window_of(layer),
        chunk=config.chunk_of(layer),
        scale=scale,
        softcap=config.attn_logit_softcapping,
        sinks=config.attention_sinks,
        l2_norm=eps if config.qk_l2_norm and rotated else None,
        temperature=(config.attn_scale, config.floor_scale) if config.attn_scale and not rotated else None,
    )


class GPTBlock(DecoderBlock):
    """Block of a ``GPTConfig``."""


class LlamaBlock(DecoderBlock):
    """Block of a ``LlamaConfig``."""


class MixtralBlock(DecoderBlock):
    """Block of a ``MixtralConfig``."""


# The classes differ in name only, by which pictures, reports and recomputation call them.
_BLOCKS = {cls.__name__: cls for cls in (DecoderBlock, GPTBlock, LlamaBlock, MixtralBlock)}
