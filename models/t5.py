"""T5 as a list of layers: an encoder, and a decoder whose blocks also attend to the encoder's output.

Raffel et al. 2020, arXiv:1910.10683, section 2.1; T5 v1.1 and Flan-T5 have a gated MLP and an untied output layer.
The norms are RMSNorms before the branches, and scores are not scaled. The scores within a stack get a bias that depends
on the distance of two tokens: a table with a number for each head and bucket of distances, one for all blocks of a
stack. The list, and the value that each layer returns (s the ids of the source, t those of the target):

    embedding, of s          (x, mask, t)         x (B, S, D); mask (B, S), 0 at padding; t (B, T)
    start of the encoder     (x, mask, table, t)  table (buckets, heads / tensor ranks)
    blocks of the encoder    (x, mask, table, t)
    end of the encoder       (e, mask, t)         e (B, S, D), the encoder's output
    embedding, of t          (x, mask, e)         x (B, T, D)
    start of the decoder     (x, mask, table, e)
    blocks of the decoder    (x, mask, table, e)
    end of the decoder       x
    head                     logits (B, T, V / tensor ranks)

So ``e`` and the tables travel past the stages of the pipeline with x, and their gradients come back with that of x.
Dropout acts on the embeddings, on the output of each branch and on that of each stack, and not on the attention
probabilities or within the MLP.

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
from ..grid.layout import Layout
from ..grid.randomness.random import Normal, sharded_parameter
from ..pipe.spec import LayerSpec, TiedLayerSpec
from ..tensor_parallel.norm import RMSNorm
from .attention_options import ScoreOptions
from .config import T5Config
from .encoder_decoder import CrossAttention, EncoderDecoderBlock, source_and_target
from .encoder_losses import MaskedLMLoss as T5Loss
from .layers import CappedHead, TokenEmbedding

__all__ = ["T5Block", "T5Config", "T5Loss", "t5_layers"]

_FIELDS = ("input_ids", "attention_mask", "decoder_input_ids")


def t5_layers(config: T5Config, sequence_parallel: bool = False) -> list[LayerSpec]:
    """List the specs of the layers of a T5 in order, for a ``PipelineModule``.

    The inputs are a dict of ``input_ids`` (B, S) and, if wanted, ``attention_mask`` (B, S), which is 0 at padding, and
    ``decoder_input_ids`` (B, T). Without ``decoder_input_ids`` the decoder's input are the labels (B, T), moved by one
    token: the first layer takes them. The outputs are the logits of the labels, (B, T, V / t).

    >>> config = triax.models.T5Config.preset("t5-tiny")
    >>> layers = triax.models.t5_layers(config)
    >>> model = triax.PipelineModule(layers, loss_fn=triax.models.T5Loss(triax.Grid(), config.vocab_size))
    >>> ids, mask, labels = torch.tensor([[5, 6, 7, 0]]), torch.tensor([[1, 1, 1, 0]]), torch.tensor([[8, 9]])
    >>> len(layers), model({"input_ids": ids, "attention_mask": mask}, labels=labels).shape
    (11, torch.Size([1, 2, 256]))

    Args:
        config: the model's configuration.
        sequence_parallel: keep on each tensor-parallel rank, between the layers, only its shard of the tokens. The
            tensor axis's size must divide S and T.

    Returns:
        The specs. The embeddings of both stacks and, with ``tie_word_embeddings``, the head have one weight.
    """
    common: dict[str, Any] = {"sequence_parallel": sequence_parallel}
    width, vocab_size = config.hidden_size, config.vocab_size
    scale, init = width**-0.5 if config.scale_decoder_outputs else 1.0, Normal(config.initializer_range)
    ends: dict[str, Any] = {"logit_scale": scale, **common}
    embedding = partial(TiedLayerSpec, "embed", TokenEmbedding, vocab_size, width, init=init, **ends)
    own = Normal(config.initializer_range * width**-0.5 / scale)  # the logits of any head begin with equal deviations
    return [
        embedding(forward_fn=partial(_embed_source, config), takes="labels"),
        LayerSpec(StackStart, config, **common),
        *[LayerSpec(T5Block, config, decodes=False, **common)] * config.num_hidden_layers,
        LayerSpec(StackEnd, config, last=False, **common),
        embedding(forward_fn=_embed_target),
        LayerSpec(StackStart, config, **common),
        *[LayerSpec(T5Block, config, decodes=True, **common)] * config.num_decoder_layers,
        LayerSpec(StackEnd, config, last=True, **common),
        embedding(forward_fn=TokenEmbedding.attend)
        if config.tie_word_embeddings
        else LayerSpec(CappedHead, width, vocab_size, init=own, **ends),
    ]


def _embed_source(config: T5Config, embedding: TokenEmbedding, inputs: Any, labels: Any) -> tuple[Tensor, ...]:
    """Embed the source's ids, and return the mask and the decoder's ids beside them.

    Raises:
        ValueError: as ``source_and_target``; or there are no ids, or the mask has another shape than the ids.
    """
    ids, mask, target = source_and_target(config, _FIELDS, inputs, labels)
    if not isinstance(ids, Tensor):
        raise ValueError(f"T5 takes input_ids, a tensor (B, S), not a {type(ids).__name__}. Rows cannot be packed.")
    if mask is not None and mask.shape != ids.shape:
        raise ValueError(f"attention_mask is {tuple(mask.shape)}, but input_ids are {tuple(ids.shape)}. Give as many.")
    return embedding(ids), torch.ones_like(ids) if mask is None else mask.long(), target


def _embed_target(embedding: TokenEmbedding, value: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    encoded, mask, target = value
    return embedding(target), mask, encoded


def buckets(distances: Tensor, config: T5Config, both: bool) -> Tensor:
    """Return the buckets of distances from a query to a key, as transformers does, with a logarithm in float32.

    Half of the buckets are of single distances. The others grow with the logarithm of the distance.

    Args:
        distances: integers, the position of the key minus the position of the query.
        config: the configuration, with the number of buckets and the distance at which the last one begins.
        both: half of all buckets are of keys behind the query; False: these keys have distance 0.
    """
    count, first = config.relative_attention_num_buckets, torch.zeros_like(distances)
    if both:
        count //= 2
        first, distances = (distances > 0) * count, distances.abs()
    else:
        distances = (-distances).clamp(min=0)
    single = count // 2
    grown = torch.log(distances.clamp(min=single).float() / single)
    grown = grown / math.log(config.relative_attention_max_distance / single) * (count - single)
    return first + torch.where(distances < single, distances, (single + grown.long()).clamp(max=count - 1))


class StackStart(nn.Module):
    """Start of a stack: dropout of the embeddings, and the table of biases of all blocks of the stack.

    Args:
        config: the model's configuration.
        grid: the grid.
        sequence_parallel: the input is this rank's shard of the tokens.

    Attributes:
        weight: (buckets, heads / t), sharded by heads.
    """

    def __init__(self, config: T5Config, *, grid: Grid, sequence_parallel: bool = False) -> None:
        super().__init__()
        layout = Layout((config.relative_attention_num_buckets, config.num_attention_heads), shard_dim=1)
        init = Normal(config.initializer_range * config.hidden_size**-0.5)
        self.weight = sharded_parameter(layout, init, grid.tensor.rank, grid.tensor.size)
        self.dropout = dropout(config.dropout, grid, sequence_parallel)

    def forward(self, value: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Add the table: (x, mask, other) -> (x, mask, table, other)."""
        x, mask, other = value
        return self.dropout(x), mask, self.weight.clone(), other  # the weight itself may be released behind the layer


class StackEnd(RMSNorm):
    """End of a stack: norm and dropout, of (x, mask, table, other).

    Args:
        config: the model's configuration.
        last: return x alone, of the decoder; False: return (x, mask, other).
        grid, sequence_parallel: as for ``RMSNorm``.
    """

    def __init__(self, config: T5Config, last: bool, *, grid: Grid, sequence_parallel: bool = False) -> None:
        super().__init__(config.hidden_size, config.norm_epsilon, grid=grid, sequence_parallel=sequence_parallel)
        self.last, self.dropout = last, dropout(config.dropout, grid, sequence_parallel)

    def forward(self, x: Any) -> Any:
        """Normalize the first of (x, mask, table, other)."""
        x, mask, _, other = x
        x = self.dropout(super().forward(x))
        return x if self.last else (x, mask, other)


class T5Block(EncoderDecoderBlock):
    """Block of T5, with RMSNorms, no biases, and scores with a mask of the source and a bias of the distance.

    Args:
        config: the model's configuration.
        decodes, grid, sequence_parallel: as for ``EncoderDecoderBlock``.
    """

    make_norm = RMSNorm

    def __init__(self, config: T5Config, decodes: bool, *, grid: Grid, sequence_parallel: bool = False) -> None:
        sizes = {"init": config.hidden_size, "out_init": config.intermediate_size}
        inits = {name: Normal(config.initializer_range * size**-0.5) for name, size in sizes.items()}
        super().__init__(config, decodes, grid=grid, sequence_parallel=sequence_parallel, **inits)
        self.config, self.shards = config, grid.tensor.size if sequence_parallel else 1

    def make_attention(self, config: T5Config, causal: bool, **common: Any) -> CrossAttention:
        """Make an attention with scores without a factor."""
        width, dim, factor = config.hidden_size, config.head_dim, config.initializer_range
        inputs = width * dim, width, config.num_attention_heads * dim
        stds = [factor * size**-0.5 for size in inputs]
        return CrossAttention(config, dim, ScoreOptions(causal=causal, scale=1.0), stds, False, **common)

    def forward(self, value: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Run the block: (x, mask, table, other) -> (x, mask, table, other)."""
        x, mask, table, other = value
        places = torch.arange(x.shape[1] * self.shards, device=x.device)
        distances = places - places[:, None]
        bias = F.embedding(buckets(distances, self.config, both=self.cross is None), table).permute(2, 0, 1)
        source = (mask != 0)[:, None, None]  # (B, 1, 1, S)
        seen = source if self.cross is None else distances <= 0
        return self.run(x, other, seen, bias, source), mask, table, other
