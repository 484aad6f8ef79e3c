"""Whisper as a list of layers: an encoder of log-mel features of speech, and a decoder of its text.

Radford et al. 2022, arXiv:2212.04356, section 2.2. Two convolutions, the second one with stride 2, turn the features
into tokens; sinusoids, which are stored and not trained, are their positions. The blocks have LayerNorms before their
branches, and keys without a bias. The list, and the value that each layer returns (t the ids of the target):

    embedding of the features   (x, t)   x (B, S, D); t (B, T)
    blocks of the encoder       (x, t)
    norm of the encoder         (e, t)   e (B, S, D), the encoder's output
    embedding of t              (x, e)   x (B, T, D)
    learned positions           (x, e)
    blocks of the decoder       (x, e)
    norm of the decoder         x
    head                        logits (B, T, V / tensor ranks)

Dropout acts on the embeddings and on the output of each branch, and not on the attention probabilities or within the
MLP.

Shapes: B rows of S source tokens and T target tokens, D the width, V the vocabulary. Under sequence parallelism x and e
are a tensor-parallel rank's shards of their tokens.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..context.dropout import dropout
from ..grid import Grid
from ..grid.comm.regions import split_gather
from ..grid.randomness.random import Normal
from ..pipe.spec import LayerSpec, TiedLayerSpec
from ..tensor_parallel.norm import LayerNorm
from .attention_options import ScoreOptions
from .config import WhisperConfig
from .encoder import EncoderNorm
from .encoder_decoder import CrossAttention, EncoderDecoderBlock, source_and_target
from .encoder_losses import MaskedLMLoss as WhisperLoss
from .layers import FinalLayerNorm, TokenEmbedding
from .positions import PositionEmbedding

__all__ = ["WhisperConfig", "WhisperLoss", "whisper_layers"]


def whisper_layers(config: WhisperConfig, sequence_parallel: bool = False) -> list[LayerSpec]:
    """List the specs of the layers of a Whisper in order, for a ``PipelineModule``.

    The inputs are a dict of ``input_features`` (B, mels, 2 S), with S = ``max_source_positions``, and, if wanted,
    ``decoder_input_ids`` (B, T). Without them the decoder's input are the labels (B, T), moved by one token: the first
    layer takes them. The outputs are the logits of the labels, (B, T, V / t).

    >>> config = triax.models.WhisperConfig.preset("whisper-toy")
    >>> layers = triax.models.whisper_layers(config)
    >>> model = triax.PipelineModule(layers, loss_fn=triax.models.WhisperLoss(triax.Grid(), config.vocab_size))
    >>> features, labels = torch.zeros(1, 5, 24), torch.tensor([[8, 9]])
    >>> len(layers), model({"input_features": features}, labels=labels).shape
    (10, torch.Size([1, 2, 256]))

    Args:
        config: the model's configuration.
        sequence_parallel: keep on each tensor-parallel rank, between the layers, only its shard of the tokens. The
            tensor axis's size must divide S and T.

    Returns:
        The specs. The embedding of the target and the head have one weight.
    """
    common: dict[str, Any] = {"sequence_parallel": sequence_parallel}
    norm = config.hidden_size, config.norm_epsilon
    embedding = partial(
        TiedLayerSpec,
        *("embed", TokenEmbedding, config.vocab_size, config.hidden_size),
        init=Normal(config.initializer_range),
        padding_idx=config.pad_token_id,  # as in transformers: the lookup gives this row no gradient
        **common,
    )
    return [
        LayerSpec(FeatureEmbedding, config, takes="labels", **common),
        *[LayerSpec(WhisperBlock, config, decodes=False, **common)] * config.num_hidden_layers,
        LayerSpec(EncoderNorm, *norm, **common),  # of the first of two
        embedding(forward_fn=_embed_target),
        LayerSpec(TargetPositions, config, **common),
        *[LayerSpec(WhisperBlock, config, decodes=True, **common)] * config.num_decoder_layers,
        LayerSpec(FinalLayerNorm, *norm, **common),
        embedding(forward_fn=TokenEmbedding.attend),
    ]


def sinusoids(length: int, width: int) -> Tensor:
    """Return the positions of the encoder: sines, then cosines, of wavelengths from 2 pi to 20,000 pi: (S, D)."""
    rates = torch.exp(torch.arange(width // 2) * (-math.log(1e4) / (width // 2 - 1)))
    angles = torch.arange(length)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], 1)


class FeatureEmbedding(nn.Module):
    """Tokens of speech, from log-mel features: two convolutions with gelu, then positions and dropout.

    Args:
        config: the model's configuration.
        grid: the grid.
        sequence_parallel: return on each tensor-parallel rank only its shard of the tokens.

    Attributes:
        conv1, conv2: convolutions over three frames, whole on every tensor-parallel rank, with torch's initial weights;
            conv2 has stride 2.
        positions: (S, D), sinusoids, which are not trained.

    Raises:
        ValueError: t does not divide S under sequence parallelism; in forward, as ``source_and_target``, or the
            features have another shape.
    """

    def __init__(self, config: WhisperConfig, *, grid: Grid, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.config, self.axis, self.sequence_parallel = config, grid.tensor, sequence_parallel
        width, length = config.hidden_size, config.max_source_positions
        if sequence_parallel and length % self.axis.size:
            tokens = f"the {length} tokens of the encoder"
            raise ValueError(f"tensor={self.axis.size} does not divide {tokens}. Leave out sequence_parallel.")
        self.conv1 = nn.Conv1d(config.num_mel_bins, width, 3, padding=1)
        self.conv2 = nn.Conv1d(width, width, 3, stride=2, padding=1)
        self.positions = nn.Parameter(sinusoids(length, width), requires_grad=False)
        self.dropout = dropout(config.dropout, grid, sequence_parallel)

    def forward(self, inputs: Any, labels: Any) -> tuple[Tensor, Tensor]:
        """Embed the features, and return the decoder's ids beside them: (x, t)."""
        features, target = source_and_target(self.config, ("input_features", "decoder_input_ids"), inputs, labels)
        shape = self.config.num_mel_bins, 2 * self.config.max_source_positions
        if (found := tuple(getattr(features, "shape", ())[1:])) != shape:
            raise ValueError(f"input_features of a row are {found}, but the model takes {shape}. Pad or cut the sound.")
        x = F.gelu(self.conv2(F.gelu(self.conv1(features)))).transpose(1, 2) + self.positions
        return self.dropout(split_gather(x, self.axis, dim=1) if self.sequence_parallel else x), target


def _embed_target(embedding: TokenEmbedding, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    encoded, target = value
    return embedding(target), encoded


class TargetPositions(PositionEmbedding):
    """``PositionEmbedding`` of the target: (x, e) -> (x, e)."""

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Add the positions, and apply dropout."""
        x, encoded = value
        return super().forward(x), encoded


class WhisperBlock(EncoderDecoderBlock):
    """Block of Whisper, with LayerNorms and biases; arguments as for ``EncoderDecoderBlock``."""

    make_norm = LayerNorm

    def make_attention(self, config: WhisperConfig, causal: bool, **common: Any) -> CrossAttention:
        """Make an attention."""
        dim, std = config.hidden_size // config.num_attention_heads, config.initializer_range
        stds = std, std, config.residual_std
        return CrossAttention(config, dim, ScoreOptions(causal=causal), stds, True, **common)

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Run the block: (x, other) -> (x, other)."""
        x, other = value
        return self.run(x, other), other
