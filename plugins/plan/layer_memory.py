"""Bytes of one layer on a rank: activations that it keeps for its backward pass, and working memory of that pass.

    forward pass           other microbatches            backward pass
    ------|----- activations, one set a microbatch ------------|
                                                         |- working memory -|   of one layer at a time

Each formula is a list of terms. b s are the tokens of a microbatch on a rank, h the hidden width, z the bytes of an
activation, a the heads, t the size of the tensor axis (1 for hidden states without sequence parallelism).

| layer | term | bytes | source |
|---|---|---|---|
| embedding | shifted ids and a mask | 9 b s, with a tensor axis | tensor_parallel/embedding.py |
| positions | mask of the dropout | b s h / t | Korthikanti et al. 2022, section 4.1 |
| projection | input | z b s x inputs / t | torch's linear |
| norm | input and statistics | z (b s h + numbers b s) / t | torch's fused norms |
| head | input | z b s h / t | tensor_parallel/cross_entropy.py |
| head | loss | logits, and of each token a logarithm and a mask | the same |
| block | residual, norms, attention, MLP | block_activations | Korthikanti et al. 2022, section 4.1 |
| block | scores, attention not fused | 5 a s^2 b in 16 bits | the same |
| block | cosines and sines | z x rotated channels x s | models/rope.py |
| block | latent vectors | z b s x (2 x widths - rotated) / t | models/deepseek.py |
| block | router | input in fp32, scores; number (twice) and weight of each chosen expert | moe/router.py |

| layer | term of the working memory | bytes |
|---|---|---|
| all | gradients of output and input | 2 z b s h / t |
| all | gradient of the largest weight, before it is added to the fp32 one | z x elements |
| head | gradient of the logits | z b s x vocabulary / t |
| block | gradients in the MLP; in tiles also what a tile keeps | z b s x (product + activation) |
| block | recomputed activations | those of the block, or its scores |
| block | copies of S borrowed experts, their gradients, messages to n ranks | 2 S M + (n - 1) M', of moe/lending.py |
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ...base.formulas import CHUNK_TOKENS
from .activations import block_activations
from .cached import cached_method
from .layer_shapes import LayerShape
from .local_sizes import LocalSizes, kv_heads, local_sizes
from .parallel_layout import ParallelLayout
from .state_memory import StateOptions

_DENSE = ("none", "mlp")  # kinds of recomputation that keep what attention makes


class HeldTensors(NamedTuple):
    """Tensors that a layer holds: a name, and their bytes."""

    name: str
    bytes: float


class LayerSplit(NamedTuple):
    """A microbatch, or one slice of its sequences, on a rank: all that the bytes of a layer depend on.

    Attributes:
        tokens: its tokens on this rank, before sequence parallelism divides them.
        sequence: tokens of a whole sequence, or of a slice of it.
        slices: slices of each sequence.
        tensor, expert, context, recompute: as in ``ParallelLayout``.
        hidden_shards: ranks that share the hidden states.
    """

    tokens: float
    sequence: int
    slices: int
    tensor: int
    expert: int
    context: int
    hidden_shards: int
    recompute: str

    @classmethod
    def of(cls, layout: ParallelLayout, tokens: float, sequence: int, slices: int = 1) -> LayerSplit:
        """Return a slice of so many tokens on a rank of a layout."""
        axes = layout.tensor, layout.expert, layout.context
        return cls(tokens, sequence, slices, *axes, layout.hidden_shards, layout.recompute)

    @property
    def hidden_tokens(self) -> float:
        """Tokens whose hidden states this rank holds."""
        return self.tokens / self.hidden_shards

    @property
    def loss_chunk(self) -> int:
        """Tokens of a chunk of head and loss, as ``pipe/chunked_loss.py`` cuts them; 0 if nothing is cut."""
        if self.tokens <= CHUNK_TOKENS:
            return 0
        row = self.sequence // self.context
        unit = row if row <= CHUNK_TOKENS else self.hidden_shards
        return CHUNK_TOKENS // unit * unit


@dataclass(frozen=True, eq=False)
class LayerMemory:
    """Bytes of the layers of a model on a rank, by kind of layer.

    Attributes:
        kinds: the different layers of the model.
        options: training options.
        vocabulary: number of tokens of the vocabulary.
        shard_tensor, lend, fused_attention, fused_kernels: as for ``ModelMemory``.
        on_cpu: torch has no fused RMSNorm, which then keeps more.
    """

    kinds: list[LayerShape]
    options: StateOptions
    vocabulary: int
    shard_tensor: bool
    lend: int
    fused_attention: bool
    fused_kernels: bool
    on_cpu: bool

    @property
    def _size(self) -> int:
        """Bytes of an activation."""
        return self.options.size

    @property
    def _statistic(self) -> int:
        """Bytes of a number that is computed in fp32 at least."""
        return max(self._size, 4)

    # --------------------------------------------------------------------------------------------- activations

    @cached_method
    def activations(self, kind: int, split: LayerSplit) -> float:
        """Return the bytes that a layer keeps of a slice; its keys and values are in the buffer of the sequence."""
        layer = self.kinds[kind]
        kept = _total(self.terms(layer, split))
        if split.slices > 1 and split.recompute in _DENSE:
            return kept - split.tokens * self._in_buffer(layer, split)
        return kept

    def terms(self, layer: LayerShape, split: LayerSplit) -> Iterator[HeldTensors]:
        """Yield what a layer keeps of a microbatch until its backward pass: the first table of this file."""
        hidden, recomputed = split.hidden_tokens * layer.hidden, split.recompute == "full"
        if layer.kind == "block":
            yield from self._block_terms(layer, split)
        elif layer.kind == "embedding" and split.tensor > 1 and not recomputed:
            yield HeldTensors("shifted ids and a mask", 9.0 * split.tokens)
        elif layer.kind == "positions" and layer.dropout and not recomputed:
            yield HeldTensors("mask of the dropout", hidden)
        elif layer.kind == "projection":
            yield HeldTensors("input", self._size * split.tokens * layer.products[0].inputs / split.hidden_shards)
        elif layer.kind == "norm" and recomputed:
            yield HeldTensors("input", self._size * hidden)
        elif layer.kind == "norm":
            tensors, statistics = self._norms(layer)
            kept = tensors * hidden + statistics * split.tokens / split.hidden_shards
            yield HeldTensors("input and statistics", self._size * kept)
        elif layer.kind == "head":
            yield HeldTensors("input", self._size * hidden)
            if not split.loss_chunk:  # the logits of a chunk exist in the backward pass alone
                yield HeldTensors("loss", self.loss(split.tokens, split.tensor))

    def loss(self, tokens: float, tensor: int) -> float:
        """Return the bytes that the loss of some tokens keeps: logits, and of each token a logarithm and a mask."""
        return (self._size * self._shard_of_vocabulary(tensor) + self._statistic + 1) * tokens

    def _shard_of_vocabulary(self, tensor: int) -> int:
        return -(-self.vocabulary // tensor)

    def _norms(self, layer: LayerShape) -> tuple[float, float]:
        """Return what the norms of a layer keep: tensors of the hidden width, and numbers per token, in elements."""
        wide = self._statistic / self._size
        if layer.norm.startswith("layer"):
            return layer.inputs, 2 * layer.norms * (1.0 if self.on_cpu else wide)
        if not self.on_cpu:
            return layer.inputs, layer.norms * wide
        # Its products one by one: x, in fp32 at least, and x divided by its norm.
        inputs = layer.inputs if wide == 1 else layer.norms * wide
        return inputs + layer.norms * wide, layer.norms * wide

    def _block_terms(self, layer: LayerShape, split: LayerSplit) -> Iterator[HeldTensors]:
        attention, feedforward = layer.attention, layer.feedforward
        assert attention is not None and feedforward is not None
        sizes, size, wide = self._sizes(layer, split), self._size, self._statistic
        dense = split.recompute in _DENSE
        yield HeldTensors("residual, norms, attention, MLP", self._block(layer, split))
        if split.recompute == "full":
            return
        if dense and not self.fused_attention:
            yield HeldTensors("scores", self._scores(layer, split, sizes.heads))
        yield HeldTensors("cosines and sines", size * attention.rotated * split.sequence / split.context)
        if attention.latent:
            widths = 2 * attention.latent - attention.rotated
            yield HeldTensors("latent vectors", size * split.tokens * widths / split.hidden_shards)
        if feedforward.experts:
            chosen = (16 + wide + size) * feedforward.per_token
            numbers = wide * feedforward.experts + chosen + wide
            copied = wide * layer.hidden if wide != size else 0  # the input in fp32
            yield HeldTensors("router", split.tokens * (numbers + copied) / split.hidden_shards)

    def _block(self, layer: LayerShape, split: LayerSplit) -> float:
        """Return the bytes of ``block_activations``."""
        attention, sizes, dense = layer.attention, self._sizes(layer, split), split.recompute in _DENSE
        assert attention is not None
        kept = sizes.attention
        # The output is laid out as the rotated queries, head by head, so the last product's input is a copy of it.
        if dense and attention.rotated and not self.fused_kernels:
            kept += sizes.heads * attention.value_dim
        # Tiles of the MLP, and an MLP that is computed again, keep its input alone.
        from_input = self._tile(layer, split) < 1.0 or split.recompute == "mlp"
        tensors, statistics = self._norms(layer)
        return block_activations(
            split.tokens,
            layer.hidden,
            attention=kept,
            heads=sizes.heads if self.fused_attention else 0.0,
            product=0.0 if from_input else sizes.product,
            activation=0.0 if from_input else sizes.activation + sizes.routed,
            hidden=tensors + layer.branches,
            statistics=statistics,
            tensor=split.tensor,
            sequence_parallel=split.hidden_shards > 1,
            recompute="none" if split.recompute == "mlp" else split.recompute,
            dropout=layer.dropout,
            precision=self.options.precision,
        )

    def _scores(self, layer: LayerShape, split: LayerSplit, heads: float) -> float:
        """Return the bytes of attention's s x s tensors: probabilities, and the dropout's mask and output."""
        number = self._size + (1 + self._size if layer.dropout else 0)
        return number * split.tokens * split.sequence * heads

    def _tile(self, layer: LayerShape, split: LayerSplit) -> float:
        """Return the share of its tokens that the MLP of a block runs on at a time; experts run on all."""
        if self.options.mlp_tile is None or layer.feedforward is None or layer.feedforward.experts:
            return 1.0
        return min(1.0, self.options.mlp_tile * split.context * split.hidden_shards / split.sequence)

    def _sizes(self, layer: LayerShape, split: LayerSplit) -> LocalSizes:
        return local_sizes(layer, split.tensor, split.hidden_shards, self.shard_tensor, self.fused_kernels)

    # ------------------------------------------------------------------------------- keys and values in slices

    def keys(self, kind: int, tensor: int) -> int:
        """Return the elements per token of the keys and values of a layer on one rank."""
        attention = self.kinds[kind].attention
        return 0 if attention is None else kv_heads(attention, tensor) * (attention.query_dim + attention.value_dim)

    def _in_buffer(self, layer: LayerShape, split: LayerSplit) -> int:
        """Return the bytes per token of keys and values, rotated and not, that a slice of a sequence does not keep."""
        attention = layer.attention
        if attention is None or not attention.rotated:
            return 0
        unrotated = 0 if self.fused_kernels else attention.query_dim
        dims = attention.query_dim + attention.value_dim + unrotated
        return self._size * kv_heads(attention, split.tensor) * dims

    # ------------------------------------------------------------------------------------------ working memory

    @cached_method
    def working(self, kind: int, split: LayerSplit) -> float:
        """Return the bytes that the backward pass of a layer needs."""
        return _total(self.working_terms(self.kinds[kind], split))

    def working_terms(self, layer: LayerShape, split: LayerSplit) -> Iterator[HeldTensors]:
        """Yield what the backward pass of a layer needs beside activations: the second table of this file."""
        size = self._size
        yield HeldTensors("gradients of output and input", 2 * size * split.tokens * layer.hidden / split.hidden_shards)
        if layer.kind == "head":
            chunk, row = split.loss_chunk, size * self._shard_of_vocabulary(split.tensor)
            yield HeldTensors("gradient of the logits", row * (chunk or split.tokens))
            if chunk:
                yield HeldTensors("sum of the weight's gradients", self._statistic * sum(_shards(layer, split)))
        elif layer.kind == "block":
            yield from self._block_working(layer, split)
        if self.options.wide != size:
            largest = max(_shards(layer, split), default=0)
            yield HeldTensors("gradient of a weight, before it is added to the fp32 one", size * largest)

    def _block_working(self, layer: LayerShape, split: LayerSplit) -> Iterator[HeldTensors]:
        sizes, tile = self._sizes(layer, split), self._tile(layer, split)
        width = sizes.product + sizes.activation + sizes.routed
        kept_too = tile < 1.0 or split.recompute == "mlp"
        yield HeldTensors("gradients in the MLP", self._size * split.tokens * tile * width * (2 if kept_too else 1))
        if split.recompute == "full":
            yield HeldTensors("recomputed activations", _total(self.terms(layer, split._replace(recompute="none"))))
        elif split.recompute == "selective" and not self.fused_attention:
            yield HeldTensors("recomputed scores", self._scores(layer, split, sizes.heads))
        experts = [weight for weight in layer.weights if weight.expert_dim is not None]
        if self.lend and experts and split.expert > 1:
            rank = split.tensor - 1, split.tensor
            matrices = [math.prod(weight.local_shape(*rank, (0, weight.shape[0]))) for weight in experts]  # of one
            numbers = 2 * self.lend * sum(matrices) + (split.expert - 1) * max(matrices)
            yield HeldTensors("copies of borrowed experts", self._size * numbers)


def _total(terms: Iterator[HeldTensors]) -> float:
    return sum((term.bytes for term in terms), start=0.0)


def _shards(layer: LayerShape, split: LayerSplit) -> list[int]:
    """Return the elements of a layer's weights on the last tensor-parallel rank."""
    rank, expert = split.tensor - 1, (0, split.expert)
    return [math.prod(weight.local_shape(rank, split.tensor, expert)) for weight in layer.weights]
