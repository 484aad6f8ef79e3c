"""Encoders as lists of layers: BERT, RoBERTa and ModernBERT (text), ViT, DINOv2 and SigLIP (images).

Their blocks are the decoders' ``ResidualBlock``, in which each token attends to all tokens of its row. The first layer
turns the fields of a microbatch into embeddings, and the last ones are a head for masked tokens or for classes:

    TextEmbedding or ImageEmbedding -> EncoderBlock 0, ... -> (norm) -> MaskedTransform, head, or ClassificationHead

BERT: Devlin et al. 2019, arXiv:1810.04805. RoBERTa: Liu et al. 2019, arXiv:1907.11692. ModernBERT: Warner et al. 2024,
arXiv:2412.13663. ViT: Dosovitskiy et al. 2021, arXiv:2010.11929. Dropout acts on the embeddings, on the output of each
branch and in front of the classes, and not on the attention probabilities.

Shapes: B rows of T tokens, D the width, V the vocabulary, C the classes, t the tensor axis's size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.uncompiled import uncompiled
from ..context.dropout import dropout
from ..context.order import shard
from ..grid import Grid
from ..grid.comm.regions import gather_split, split_gather
from ..grid.layout import Layout
from ..grid.randomness.random import Constant, Normal, sharded_parameter
from ..pipe.spec import LayerSpec, TiedLayerSpec
from ..tensor_parallel.embedding import VocabParallelHead, check_ids
from ..tensor_parallel.norm import LayerNorm
from .attention import SelfAttention
from .config import EncoderConfig
from .layers import ACTIVATIONS, ResidualBlock, TokenEmbedding, normalized
from .mlp import MLP, GatedMLP
from .packed import attach, detach
from .positions import PositionEmbedding
from .replicated_linear import ReplicatedLinear
from .rope import Rope

_FIELDS = ("input_ids", "attention_mask", "token_type_ids")


def encoder_layers(config: EncoderConfig, sequence_parallel: bool = False, attention: str = "ring") -> list[LayerSpec]:
    """List the specs of an encoder's layers in order, for a ``PipelineModule``.

    The inputs are ids (B, T), a dict of ``input_ids`` and, if wanted, ``attention_mask`` and ``token_type_ids``, each
    (B, T), or ``(ids, documents)`` for packed rows; of an encoder of images, ``pixel_values`` (B, channels, height,
    width), alone or in a dict. The outputs are logits (B, T, V / t), or (B, C) with ``num_labels``; of an encoder of
    images without ``num_labels`` the features (B, T, D).

    >>> config = triax.models.EncoderConfig.preset("encoder-tiny")
    >>> layers = triax.models.encoder_layers(config)
    >>> loss_fn = triax.models.MaskedLMLoss(triax.Grid(), config.vocab_size)
    >>> model = triax.PipelineModule(layers, loss_fn=loss_fn)
    >>> ids, mask = torch.tensor([[1, 2, 3, 0]]), torch.tensor([[1, 1, 1, 0]])
    >>> len(layers), model({"input_ids": ids, "attention_mask": mask}).shape
    (5, torch.Size([1, 4, 256]))

    Args:
        config: the model's configuration.
        sequence_parallel: keep on each tensor-parallel rank, between the layers, only its shard (B, T / t, D) of the
            tokens. The tensor axis's size t must divide T.
        attention: how the ranks of the context axis compute attention: ``ring``, ``ulysses`` or ``gather``. It has no
            effect on a grid with context=1.

    Returns:
        The specs. With ``tie_word_embeddings`` the output layer has the weight of the token embeddings.
    """
    common: dict[str, Any] = {"sequence_parallel": sequence_parallel}
    width, masked = config.hidden_size, config.predicts_masked
    tied = partial(TiedLayerSpec, "embed") if masked and config.tie_word_embeddings else LayerSpec
    count, before = config.num_hidden_layers, config.norm_place != "sum"
    blocks = [LayerSpec(EncoderBlock, config, layer, attention=attention, **common) for layer in range(count)]
    norm = [LayerSpec(EncoderNorm, width, config.norm_epsilon, bias=config.norm_bias, **common)] * before
    inits: dict[str, Any] = {"init": Normal(config.initializer_range), "bias_init": Constant(0.0)}
    return [
        LayerSpec(ImageEmbedding, config, **common) if config.image_size else tied(TextEmbedding, config, **common),
        *blocks,
        *norm,
        *([LayerSpec(MaskedTransform, config, **common)] * masked),
        tied(VocabParallelHead, width, config.vocab_size, True, **common, **inits)
        if masked
        else LayerSpec(ClassificationHead if config.num_labels else Features, config, **common),
    ]


def classification_layers(layers: Sequence[LayerSpec], num_labels: int) -> list[LayerSpec]:
    """Return the layers of an encoder with a new head for classes of rows in place of its head.

    The head's initial weights are drawn by the seed, those of a pooler too.

    Args:
        layers: what ``encoder_layers(config)`` returns, or ``load_hf`` of an encoder.
        num_labels: number of classes.

    Raises:
        ValueError: the layers are no encoder's.
    """
    config = next((arg for spec in layers for arg in getattr(spec, "args", ()) if isinstance(arg, EncoderConfig)), None)
    if config is None:
        raise ValueError("the layers have no EncoderConfig. Give those of encoder_layers(config) or load_hf(folder).")
    ours = replace(config, num_labels=num_labels)
    kept = [
        LayerSpec(spec.cls, *(ours if arg is config else arg for arg in spec.args), **spec.kwargs)  # tied no more
        for spec in layers[: config.layer_count - 1 - config.predicts_masked]
    ]
    return [*kept, LayerSpec(ClassificationHead, ours, sequence_parallel=kept[0].kwargs["sequence_parallel"])]


class TextEmbedding(TokenEmbedding):
    """Embeddings of tokens, token types and learned positions, with their norm and dropout: ids (B, T) -> (B, T, D).

    The tokens of a row that ``attention_mask`` leaves out are a document of their own (``packed.py``), so that no other
    token attends to them.

    Args:
        config: the model's configuration.
        grid, sequence_parallel: as for ``TokenEmbedding``.

    Attributes:
        weight: (V / t, D).
        types: (token types, D), whole on every tensor-parallel rank; None if there are none.
        positions: the learned positions, or None.
        norm: LayerNorm, or None.

    Raises:
        ValueError: in forward, the inputs have another field, a row is padded on the left or within, or RoBERTa's
            padding is among the tokens that are attended to.
    """

    def __init__(self, config: EncoderConfig, *, grid: Grid, sequence_parallel: bool = False) -> None:
        init, width = Normal(config.initializer_range), config.hidden_size
        common: dict[str, Any] = {"grid": grid, "sequence_parallel": sequence_parallel}
        super().__init__(config.vocab_size, width, init=init, **common)
        layout = Layout((config.type_vocab_size, width), partial=sequence_parallel and grid.tensor.size > 1)
        self.types = sharded_parameter(layout, init, rank=0, size=1) if config.type_vocab_size else None
        learned, norm = config.learned_positions, partial(LayerNorm, width, config.norm_epsilon, bias=config.norm_bias)
        self.positions = PositionEmbedding(config, config.position_offset, **common) if learned else None
        self.norm = norm(**common) if config.norm_place != "before" else None
        self.dropout = dropout(config.dropout, grid, sequence_parallel)

    def forward(self, inputs: Any) -> Any:
        """Embed the tokens, the types and the positions; the inputs are those of ``encoder_layers``."""
        ids, documents, types = _text_fields(inputs, _FIELDS[:2] if self.types is None else _FIELDS)
        if self.positions is not None and self.positions.offset:
            _check_padding(ids, documents, self.positions.offset - 1)
        x, documents = detach(super().forward(attach(ids, documents)))
        if self.types is not None:
            x = x + self._of_types(self.types, types, x.shape[1])
        if self.positions is not None:
            x = self.positions.added(x, documents)
        return attach(self.dropout(normalized(x, self.norm)), documents)

    def _of_types(self, table: Tensor, types: Tensor | None, here: int) -> Tensor:
        if types is None:
            return table[0]
        check_ids(types, len(table), "token type")
        shards = self.axis.size if self.sequence_parallel else 1
        own, start = shard(types, self.context, multiple=shards), here * self.axis.rank if shards > 1 else 0
        return F.embedding(own[:, start : start + here], table)


def _text_fields(inputs: Any, known: Sequence[str]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the ids, the documents and the token types of a microbatch."""
    if not isinstance(inputs, Mapping):
        return *detach(inputs), None
    if unknown := [name for name in inputs if name not in known]:
        raise ValueError(f"this encoder of text takes {', '.join(known)}, not the field {unknown[0]!r}. Leave it out.")
    mask = inputs.get("attention_mask")
    return inputs["input_ids"], None if mask is None else (mask == 0).long(), inputs.get("token_type_ids")


@uncompiled
def _check_padding(ids: Tensor, documents: Tensor | None, padding: int) -> None:
    """Raise ValueError if a token that is attended to is padding, which has no position; looked at on a CPU only."""
    padded = (ids == padding) & (True if documents is None else documents == 0)
    if ids.device.type == "cpu" and bool(padded.any()):
        raise ValueError(f"{int(padded.sum())} tokens are {padding}, padding without a position. Give attention_mask.")


class ImageEmbedding(nn.Module):
    """Embeddings of images: the class token first, then the patches; learned positions are added, and dropout acts.

    Args:
        config: the model's configuration.
        grid: the grid.
        sequence_parallel: return on each tensor-parallel rank only its shard of the patches.

    Attributes:
        weight, bias: (D, channels, patch, patch) and (D,): the convolution of the patches.
        cls: (1, D), embedding of the token in front of the patches, or None.
        positions: the learned positions.

    Shape:
        (B, channels, height, width) -> (B, T, D), or (B, T / t, D); T counts the patches and the class token.

    Raises:
        ValueError: in forward, the images have another shape; or t does not divide T under sequence parallelism.
    """

    def __init__(self, config: EncoderConfig, *, grid: Grid, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.axis, self.sequence_parallel, self.patch = grid.tensor, sequence_parallel, config.patch_size
        self.shape = config.num_channels, config.image_size, config.image_size
        if sequence_parallel and config.max_position_embeddings % self.axis.size:
            tokens = f"the {config.max_position_embeddings} tokens of an image"
            raise ValueError(f"tensor={self.axis.size} does not divide {tokens}. Leave out sequence_parallel.")
        width, init = config.hidden_size, Normal(config.initializer_range)
        whole: dict[str, Any] = {"rank": 0, "size": 1}
        self.weight = sharded_parameter(Layout((width, config.num_channels, self.patch, self.patch)), init, **whole)
        self.bias = sharded_parameter(Layout((width,)), Constant(0.0), **whole)
        self.cls = sharded_parameter(Layout((1, width)), init, **whole) if config.class_token else None
        self.positions = PositionEmbedding(config, grid=grid)

    def forward(self, inputs: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Embed the images, or those under ``pixel_values`` in a dict; the shapes are in the class's docstring."""
        images = inputs["pixel_values"] if isinstance(inputs, Mapping) else inputs
        if images.shape[1:] != self.shape:
            raise ValueError(f"an image is {tuple(images.shape[1:])}, but the model takes {self.shape}. Resize it.")
        patches = F.conv2d(images, self.weight, self.bias, stride=self.patch).flatten(2).transpose(1, 2)
        first = [] if self.cls is None else [self.cls.expand(len(patches), 1, -1)]
        x: Tensor = self.positions(torch.cat([*first, patches], 1))
        return split_gather(x, self.axis, dim=1) if self.sequence_parallel else x


class LayerScale(nn.Module):
    """Learned factor of each channel, behind a branch (Touvron et al. 2021, arXiv:2103.17239): (B, T, D) -> (B, T, D).

    Args:
        value: initial value.
        width: D.
        epsilon: without effect; norms have one.
        grid, sequence_parallel: as for norms.
    """

    def __init__(self, value: float, width: int, epsilon: float, *, grid: Grid, sequence_parallel: bool) -> None:
        super().__init__()
        layout = Layout((width,), partial=sequence_parallel and grid.tensor.size > 1)
        self.weight = sharded_parameter(layout, Constant(value), rank=0, size=1)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        return x * self.weight


class EncoderBlock(ResidualBlock):
    """``ResidualBlock`` of an encoder: LayerNorms, attention to all tokens of a row, and an MLP.

    Args:
        config: the model's configuration.
        layer: number of the block, counted from 0.
        grid, sequence_parallel: as for ``ResidualBlock``.
        attention: how the ranks of the context axis compute attention: ``ring``, ``ulysses`` or ``gather``.
    """

    def __init__(
        self, config: EncoderConfig, layer: int, *, grid: Grid, sequence_parallel: bool = False, attention: str = "ring"
    ) -> None:
        heads, mlp = config.num_attention_heads, GatedMLP if config.gated else MLP
        rope = None if config.learned_positions else Rope(config.hidden_size // heads, *config.rope_of(layer))
        options: dict[str, Any] = {"bias": config.qkv_bias, "out_bias": config.out_bias, "causal": False, "rope": rope}
        super().__init__(
            config,
            grid=grid,
            sequence_parallel=sequence_parallel,
            make_norm=partial(LayerNorm, bias=config.norm_bias),
            make_attention=partial(
                SelfAttention,
                config.hidden_size,
                heads,
                kind=attention,
                kv_heads=heads,
                window=config.window_of(layer),
                **options,
            ),
            make_mlp=partial(mlp, activation=config.hidden_act, bias=config.mlp_bias),
            make_post_norm=partial(LayerScale, config.layer_scale) if config.layer_scale else None,
            norm_place="both" if config.layer_scale else "sum" if config.norm_place == "sum" else "before",
        )
        if config.norm_place == "embedding" and not layer:
            self.norm1 = None


class EncoderNorm(LayerNorm):
    """LayerNorm behind the blocks; of ``(x, documents)``, or of x and what else travels with it, it normalizes x."""

    def forward(self, x: Any) -> Any:
        """Normalize: (B, T, D) -> (B, T, D)."""
        x, documents = detach(x)
        return attach(super().forward(x), documents)


class MaskedTransform(nn.Module):
    """Linear layer, activation and norm in front of the output layer for masked tokens: (B, T, D) -> (B, T, D)."""

    def __init__(self, config: EncoderConfig, *, grid: Grid, sequence_parallel: bool = False) -> None:
        super().__init__()
        width, self.activation = config.hidden_size, ACTIVATIONS[config.hidden_act]
        common: dict[str, Any] = {"grid": grid, "sequence_parallel": sequence_parallel}
        self.dense = ReplicatedLinear(width, width, config.head_bias, init=Normal(config.initializer_range), **common)
        self.norm = LayerNorm(width, config.norm_epsilon, bias=config.norm_bias, **common)

    def forward(self, x: Any) -> Tensor:
        """Transform x, or the first of ``(x, documents)``."""
        y: Tensor = self.norm(self.activation(self.dense(detach(x)[0])))
        return y


class Features(nn.Module):
    """Last layer of an encoder without a head: (B, T, D), or (B, T / t, D), -> (B, T, D), equal on every rank."""

    def __init__(self, config: EncoderConfig, *, grid: Grid, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.axis, self.sequence_parallel = grid.tensor, sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Gather the tokens of the tensor-parallel ranks."""
        return gather_split(x, self.axis, dim=1) if self.sequence_parallel else x


class ClassificationHead(nn.Module):
    """Classes of each row, from its first token, with ``mean_pool`` also from the mean of its other tokens.

    With ``classifier_pooling`` they are from the first token or from the mean, behind a ``MaskedTransform``.

    The input is (B, T, D), or (B, T / t, D) under sequence parallelism, and the output (B, C), equal on every rank.

    Args:
        config: the model's configuration.
        grid: the grid.
        sequence_parallel: the input is this rank's shard of the sequence.

    Raises:
        ValueError: the grid has a context axis.
    """

    def __init__(self, config: EncoderConfig, *, grid: Grid, sequence_parallel: bool = False) -> None:
        super().__init__()
        if grid.context.size > 1:
            raise ValueError(
                f"classes of rows need context=1, but the grid has context={grid.context.size}. Change it."
            )
        self.axis, self.sequence_parallel, width = grid.tensor, sequence_parallel, config.hidden_size
        common: dict[str, Any] = {"grid": grid, "init": Normal(config.initializer_range)}
        self.dense = ReplicatedLinear(width, width, True, **common) if config.pooler else None
        self.dropout, self.mean_pool = dropout(config.dropout, grid, False), config.mean_pool
        self.pooling = config.classifier_pooling
        self.transform = MaskedTransform(config, grid=grid) if self.pooling else None
        self.out = ReplicatedLinear(2 * width if config.mean_pool else width, config.num_labels, True, **common)

    def forward(self, x: Any) -> Tensor:
        """Compute the classes of x, or of the first of ``(x, documents)``."""
        x, documents = detach(x)
        tokens = x if self.mean_pool or self.pooling == "mean" else x[:, :1]
        tokens = gather_split(tokens, self.axis, dim=1) if self.sequence_parallel else tokens
        first = torch.cat([tokens[:, 0], tokens[:, 1:].mean(1)], -1) if self.mean_pool else tokens[:, 0]
        if self.pooling == "mean":
            seen = torch.ones_like(tokens[..., :1]) if documents is None else (documents == 0)[..., None].to(x.dtype)
            first = (tokens * seen).sum(1) / seen.sum(1)
        if self.dense is not None:
            first = self.dropout(torch.tanh(self.dense(first)))
        if self.transform is not None:
            first = self.dropout(self.transform(first))
        y: Tensor = self.out(first)
        return y
