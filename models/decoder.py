"""Decoder-only transformers as lists of layers: GPT, Llama, Mixtral, Gemma, Phi, OPT, GPT-NeoX, Falcon and more.

One configuration, ``DecoderConfig``, and one block for all of them. Its settings say in what a model differs from a
Llama (Touvron et al. 2023, arXiv:2302.13971, section 2.2); ``models/huggingface/families.py`` has those of each family.
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
from ..pipe.spec import LayerSpec
from ..tensor_parallel.norm import LayerNorm, OffsetRMSNorm, RMSNorm
from .config import DecoderConfig
from .layers import FinalLayerNorm, FinalOffsetRMSNorm, FinalRMSNorm, ResidualBlock, first_and_last
from .mlp import MLP, GatedMLP, check_moe_options, make_moe
from .positions import PositionEmbedding
from .recurrent.layers import make_recurrent
from .rope import Rope

# Norms by their names in ``DecoderConfig``: of blocks, and before the head.
_NORMS: dict[str, tuple[Callable[..., nn.Module], Callable[..., nn.Module]]] = {
    "rms": (RMSNorm, FinalRMSNorm),
    "rms_offset": (OffsetRMSNorm, FinalOffsetRMSNorm),
    "layer": (LayerNorm, FinalLayerNorm),
}


def decoder_layers(
    config: DecoderConfig, sequence_parallel: bool = False, attention: str = "ring", **moe: Any
) -> list[LayerSpec]:
    """List the specs of a decoder's layers in order, for a ``PipelineModule``: ids (B, T) -> logits (B, T, V / t).

    The list is ``[embedding, block 0, ..., block L - 1, norm, head]``, with learned positions, if the model has any,
    behind the embedding. The layers are built later, by the ``PipelineModule``, and the list does not depend on the
    grid. The input may be ``(ids, documents)`` for packed rows (see ``packed.py``).

    ``gpt_layers``, ``llama_layers`` and ``mixtral_layers`` are other names of this function.

    Args:
        config: the model's configuration.
        sequence_parallel: keep on each tensor-parallel rank, between the layers, only its shard (B, T / t, D) of the
            sequence. The tensor axis's size t must divide T (Korthikanti et al. 2022, arXiv:2205.05198).
        attention: how the ranks of the context axis compute attention: ``ring``, ``ulysses`` or ``gather``. It has no
            effect on a grid with context=1.
        moe: options of ``triax.moe.MoE`` for every block with experts: ``balance``, ``bias_rate``, ``z_loss``,
            ``capacity``, ``shard_tensor``. The coefficient of the load-balancing loss is the configuration's.

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
        scale=config.hidden_size**0.5 if config.scale_embedding else 1.0,
        softcap=config.final_logit_softcapping,
        bias=config.head_bias,
    )
    common: dict[str, Any] = {"sequence_parallel": sequence_parallel}
    block = _BLOCKS[config.BLOCK]
    return [
        first,
        *([LayerSpec(PositionEmbedding, config, config.position_offset, **common)] * config.learned_positions),
        *(LayerSpec(block, config, i, attention=attention, **common, **moe) for i in range(config.num_hidden_layers)),
        LayerSpec(_NORMS[config.norm][1], config.hidden_size, config.norm_epsilon, **common),
        head,
    ]


class DecoderBlock(ResidualBlock):
    """``ResidualBlock`` with the norms, the branches, the MLP and the attention that a ``DecoderConfig`` names.

    Args:
        config: the model's configuration.
        layer: number of the block, counted from 0.
        grid, sequence_parallel, attention: as for ``ResidualBlock``.
        moe: further arguments of ``MoE``, of a block with experts.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer: int = 0,
        *,
        grid: Grid,
        sequence_parallel: bool = False,
        attention: str = "ring",
        **moe: Any,
    ) -> None:
        mlp = partial(GatedMLP if config.gated else MLP, activation=config.hidden_act, bias=config.mlp_bias)
        kind, place = config.type_of(layer), config.norm_place
        if place == "after_attention":
            place = "after" if kind == "attention" else "before"
        branches: dict[str, Any] = {"make_mlp": partial(make_moe, **moe) if layer in config.moe_layers else mlp}
        if config.one_branch and kind != "mlp":
            branches["make_mlp"] = None
        if kind == "mlp":
            branches["make_attention"] = None
        elif config.linear_attention is not None and kind == "linear_attention":
            branches["make_attention"] = partial(make_recurrent, config.linear_attention, config.norm_epsilon)
        else:
            branches |= _attention_arguments(config, layer)
        super().__init__(
            config,
            grid=grid,
            sequence_parallel=sequence_parallel,
            attention=attention,
            make_norm=_NORMS[config.norm][0],
            norm_place=place,
            parallel=config.parallel_residual,
            shared_norm=config.shared_norm,
            **branches,
        )
        if not config.learned_positions:  # else the layer of positions has it
            self.max_position_embeddings = config.max_position_embeddings  # the most that generation asks for


def _attention_arguments(config: DecoderConfig, layer: int) -> dict[str, Any]:
    """Return the arguments of ``SelfAttention`` of a block, beside those that ``ResidualBlock`` gives."""
    scalar = config.query_pre_attn_scalar
    return {
        "head_dim": config.head_dim,
        "kv_heads": None if config.fused_qkv else config.num_key_value_heads,
        "rope": Rope(config.rotary_dim, *config.rope_of(layer), leading=True) if config.has_rope(layer) else None,
        "window": config.window_of(layer),
        "bias": config.qkv_bias,
        "out_bias": config.out_bias,
        "qk_norm": config.norm_epsilon if config.qk_norm or config.qk_norm_all_heads else None,
        "norm_all_heads": config.qk_norm_all_heads,
        "norm": OffsetRMSNorm if config.norm == "rms_offset" else RMSNorm,
        "clip": config.clip_qkv,
        "scale": None if scalar is None else scalar**-0.5,
        "softcap": config.attn_logit_softcapping,
        "output_gate": config.attn_output_gate,
    }


class GPTBlock(DecoderBlock):
    """Block of a ``GPTConfig``."""


class LlamaBlock(DecoderBlock):
    """Block of a ``LlamaConfig``."""


class MixtralBlock(DecoderBlock):
    """Block of a ``MixtralConfig``."""


# The classes differ in name only, by which pictures, reports and recomputation call them.
_BLOCKS = {cls.__name__: cls for cls in (DecoderBlock, GPTBlock, LlamaBlock, MixtralBlock)}
