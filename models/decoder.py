"""Decoder-only transformers of many families as lists of layers: Gemma, Phi, OPT, GPT-NeoX, Falcon, OLMo-2 and more.

``DecoderConfig`` says in which settings a model differs from Llama. ``models/huggingface/families.py`` has the settings
of each family. Attention and MLP are sharded over the tensor axis as in ``gpt.py``.

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
from .gpt import MLP, PositionEmbedding
from .layers import FinalLayerNorm, FinalOffsetRMSNorm, FinalRMSNorm, first_and_last
from .llama import GatedMLP, LlamaBlock
from .packed import attach, detach
from .rope import Rope

# Norms by their names in ``DecoderConfig``: of blocks, and before the head.
_NORMS: dict[str, tuple[Callable[..., nn.Module], Callable[..., nn.Module]]] = {
    "rms": (RMSNorm, FinalRMSNorm),
    "rms_offset": (OffsetRMSNorm, FinalOffsetRMSNorm),
    "layer": (LayerNorm, FinalLayerNorm),
}


def decoder_layers(config: DecoderConfig, sequence_parallel: bool = False, attention: str = "ring") -> list[LayerSpec]:
    """List the specs of a decoder's layers in order, for a ``PipelineModule``: ids (B, T) -> logits (B, T, V / t).

    The list is that of ``llama_layers``; learned positions are a layer behind the embedding.

    Args:
        config: the model's configuration.
        sequence_parallel, attention: as for ``llama_layers``.
    """
    first, head = first_and_last(
        config,
        sequence_parallel,
        scale=config.hidden_size**0.5 if config.scale_embedding else 1.0,
        softcap=config.final_logit_softcapping,
        bias=config.head_bias,
    )
    common: dict[str, Any] = {"sequence_parallel": sequence_parallel}
    return [
        first,
        *([LayerSpec(PositionEmbedding, config, config.position_offset, **common)] * config.learned_positions),
        *(LayerSpec(DecoderBlock, config, i, attention=attention, **common) for i in range(config.num_hidden_layers)),
        LayerSpec(_NORMS[config.norm][1], config.hidden_size, config.norm_epsilon, **common),
        head,
    ]


class DecoderBlock(LlamaBlock):
    """``LlamaBlock`` with the norms, the residual branches, the MLP and the attention that a ``DecoderConfig`` names.

    Args:
        config, layer, grid, sequence_parallel, others: as for ``LlamaBlock``.

    Attributes:
        norm1, norm2: norms before the branches; with ``shared_norm`` there is no ``norm2``, and with ``norm_place`` set
            to ``after`` there are neither.
        post_norm1, post_norm2: norms behind the branches, with ``norm_place`` set to ``after`` or ``both``.
    """

    norm2: nn.Module | None  # type: ignore[assignment]
    post_norm1: nn.Module
    post_norm2: nn.Module

    def __init__(
        self, config: DecoderConfig, layer: int, *, grid: Grid, sequence_parallel: bool = False, **others: Any
    ) -> None:
        norm, scalar = _NORMS[config.norm][0], config.query_pre_attn_scalar
        common: dict[str, Any] = {"grid": grid, "sequence_parallel": sequence_parallel}
        options: dict[str, Any] = {"activation": config.hidden_act, "bias": config.mlp_bias}
        settings: dict[str, Any] = {
            "make_norm": norm,
            "make_mlp": partial(GatedMLP if config.gated else MLP, **options),
            "scale": None if scalar is None else scalar**-0.5,
            "softcap": config.attn_logit_softcapping,
            "norm": OffsetRMSNorm if config.norm == "rms_offset" else RMSNorm,
        }
        if config.has_rope(layer):
            settings["rope"] = Rope(config.rotary_dim, *config.rope_of(layer), leading=True)
        super().__init__(config, layer, **common, **(settings | others))
        self.parallel, self.post_norm1, self.post_norm2 = config.parallel_residual, nn.Identity(), nn.Identity()
        if config.shared_norm:
            self.norm2 = None
        if config.norm_place != "before":
            self.post_norm1, self.post_norm2 = (norm(config.hidden_size, config.norm_epsilon, **common) for _ in "12")
        if config.norm_place == "after":
            self.norm1, self.norm2 = nn.Identity(), nn.Identity()
        if config.learned_positions:
            del self.max_position_embeddings  # the layer of positions says it

    def forward(self, x: Any) -> Any:
        """Run the layer on x, or on ``(x, documents)`` for packed rows."""
        x, documents = detach(x)
        normal = self.norm1(x)
        added = self.dropout1(self.post_norm1(self.attention(normal, documents)))
        if not self.parallel:
            x = x + added
        if self.norm2 is not None:
            normal = self.norm2(x)
        y = self.dropout2(self.post_norm2(self.mlp(normal)))
        return attach(x + added + y if self.parallel else x + y, documents)
