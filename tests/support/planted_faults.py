"""Small models with a fault each, and right ones, for ``triax check``.

The seed draws width, words, number of blocks and the block with the fault. Right models are those of ``RIGHT``.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, PipelineModule, TiedLayerSpec
from triax.context.dropout import dropout
from triax.context.order import positions, shard
from triax.grid import Layout
from triax.grid.comm.regions import all_reduce_copy, copy_all_reduce
from triax.grid.randomness.random import Dropout, Normal, sharded_parameter
from triax.grid.ranges import split
from triax.models.attention import SelfAttention
from triax.models.layers import FinalRMSNorm, NextTokenLoss, TokenEmbedding
from triax.models.rope import Rope
from triax.moe import MoE
from triax.tensor_parallel.embedding import VocabParallelHead, gather_logits
from triax.tensor_parallel.norm import RMSNorm


class Fault(NamedTuple):
    """What a check must say about a model: axis, phase, end of the module's name, part of the op, name of the cause."""

    axis: str
    phase: str
    module: str
    op: str
    cause: str


BLOCK = "layers.{}"
FAULTS: dict[str, Fault] = {
    "mean_over_a_shard": Fault("tensor", "forward", BLOCK + ".mlp", "aten.mean", "reduction over a shard"),
    "missing_copy": Fault("tensor", "backward", BLOCK + ".mlp", "", "missing copy region"),
    "missing_reduce": Fault("tensor", "forward", BLOCK + ".mlp", "", "missing all-reduce"),
    "unsummed_norm": Fault("tensor", "parameter", BLOCK + ".mlp.norm", "", "gradient not summed over tensor"),
    "default_generator": Fault("tensor", "forward", BLOCK + ".mlp", "aten.rand", "default generator"),
    "batch_buffer": Fault("data", "forward", BLOCK + ".mlp", "", "buffer of the batch"),
    "state": Fault("data", "forward", BLOCK + ".mlp", "aten.mul", "state across microbatches"),
    "smoothing_over_a_shard": Fault("tensor", "forward", "loss_fn", "aten.mean", "loss over a shard"),
    "gathered_logits": Fault("tensor", "forward", "loss_fn", "", "gathered logits in a sharded loss"),
    "equal_masks": Fault("tensor", "forward", BLOCK + ".mlp.drop", "", "equal dropout masks"),
    "tied_twice": Fault("pipe", "parameter", "layers.0", "", "tied weight"),
    "averaged_over_context": Fault("context", "forward", "loss_fn", "", "loss averaged over parts"),
    "bias_on_every_rank": Fault("tensor", "forward", BLOCK + ".mlp", "", "bias on every rank"),
    "positions_restart": Fault("context", "forward", "layers.1", "", "positions restart"),
    "scaled_gradient": Fault("tensor", "parameter", BLOCK + ".mlp", "", "scaled gradient"),
    "unmasked_embedding": Fault("tensor", "forward", "layers.0", "", "unmasked embedding"),
    "missing_combine": Fault("expert", "forward", BLOCK + ".mlp", "", "experts"),
    "summed_twice": Fault("tensor", "forward", BLOCK + ".mlp", "", "summed once too often"),
}
RIGHT = (
    *("plain", "tied", "keyed_dropout", "sequence_parallel", "sequence_dropout", "experts", "tied_sequence"),
    *("smoothing", "own_loss", "own_embedding", "positions", "own_regions"),
)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model, and the index of the block with the fault."""

    width: int
    words: int
    blocks: int
    at: int


def sizes_of(seed: int) -> Sizes:
    """Return the sizes that a seed draws. The first block is the third entry of the list."""
    draw = random.Random(seed)
    blocks = draw.choice((2, 3, 4))
    return Sizes(draw.choice((8, 12, 16)), draw.choice((20, 26, 32)), blocks, 2 + draw.randrange(blocks))


def build(kind: str, seed: int, grid: Grid) -> PipelineModule:
    """Build the model of a name and a seed."""
    s = sizes_of(seed)
    sequence = kind in ("sequence_parallel", "sequence_dropout", "tied_sequence", "unsummed_norm", "equal_masks")
    common: dict[str, Any] = {"init": Normal(0.3), "sequence_parallel": sequence}
    tie: Any = ("embed", TokenEmbedding, s.words, s.width)
    ends: list[Any] = [
        LayerSpec(TokenEmbedding, s.words, s.width, **common),
        LayerSpec(VocabParallelHead, s.width, s.words, **common),
    ]
    if kind in ("tied", "tied_sequence", "tied_twice"):
        first = TwiceEmbedding if kind == "tied_twice" else TokenEmbedding
        tie = ("embed", first, s.words, s.width)
        ends = [TiedLayerSpec(*tie, **common), TiedLayerSpec(*tie, **common, forward_fn=first.attend)]
    if kind in ("unmasked_embedding", "own_embedding"):
        ends[0] = LayerSpec(OwnEmbedding, s.words, s.width, kind == "own_embedding")
    at = {2 + i: kind if 2 + i == s.at or kind in RIGHT else "" for i in range(s.blocks)}
    blocks = [LayerSpec(Block, at[2 + i], s.width, sequence) for i in range(s.blocks)]
    places = LayerSpec(Positions, s.width, sequence, kind != "positions_restart")
    norm = LayerSpec(FinalRMSNorm, s.width, sequence_parallel=sequence)
    layers = [ends[0], places, *blocks, norm, ends[1]]
    return PipelineModule(layers, grid=grid, loss_fn=loss_of(kind, s, grid), seed=seed, partition="uniform")


def loss_of(kind: str, s: Sizes, grid: Grid) -> Any:
    match kind:
        case "smoothing_over_a_shard":
            return partial(smoothed, grid, s.words)
        case "gathered_logits":
            return partial(own_cross_entropy, grid, s.words, True)
        case "own_loss":
            return partial(own_cross_entropy, grid, s.words, False)
        case "averaged_over_context":
            return partial(averaged, grid, s.words)
        case "smoothing":
            return NextTokenLoss(grid, s.words, label_smoothing=0.1)
    return NextTokenLoss(grid, s.words)


def own_cross_entropy(grid: Grid, words: int, gathered: bool, logits: Tensor, labels: Tensor) -> Any:
    """Cross entropy of sharded logits, summed over the tensor axis; ``gathered``: of whole ones, by mistake."""
    if gathered:
        logits = gather_logits(logits, grid=grid, vocab_size=words)
    labels = shard(labels, grid.context)
    start, stop = split(words, grid.tensor.size, grid.tensor.rank)
    if gathered:
        start, stop = 0, words
    total = all_reduce_copy(logits.exp().sum(-1), grid.tensor)
    mine = (labels >= start) & (labels < stop)
    picked = logits.gather(-1, ((labels - start) * mine)[..., None])[..., 0] * mine
    if not gathered:
        picked = all_reduce_copy(picked, grid.tensor)
    return (total.log() - picked).sum(), labels.numel()


def smoothed(grid: Grid, words: int, logits: Tensor, labels: Tensor) -> Any:
    """Cross entropy with label smoothing over the words of one shard alone."""
    loss, count = own_cross_entropy(grid, words, False, logits, labels)
    return loss - 0.1 * logits.mean(-1).sum(), count


def averaged(grid: Grid, words: int, logits: Tensor, labels: Tensor) -> Any:
    """Mean over some tokens of a part: other parts have other numbers of them."""
    labels = shard(labels, grid.context)
    losses = F.cross_entropy(
        gather_logits(logits, grid=grid, vocab_size=words).flatten(0, 1), labels.flatten(), reduction="none"
    )
    even = labels.flatten() % 3 == 0
    return (losses * even).sum() / even.sum().clamp(min=1), 1.0


class OwnEmbedding(nn.Module):
    """Lookup in a shard of the table."""

    def __init__(self, words: int, width: int, masks: bool, grid: Grid) -> None:
        super().__init__()
        self.words, self.masks, self.grid = words, masks, grid
        layout = Layout((words, width), shard_dim=0)
        self.table = sharded_parameter(layout, Normal(0.3), grid.tensor.rank, grid.tensor.size, None, None)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up: (B, T) -> (B, T / c, D)."""
        ids = shard(ids, self.grid.context)
        start, stop = split(self.words, self.grid.tensor.size, self.grid.tensor.rank)
        mine = (ids >= start) & (ids < stop)
        rows = F.embedding((ids - start).clamp(0, stop - start - 1), self.table)
        if self.masks:
            rows = rows * mine[..., None]
        return all_reduce_copy(rows, self.grid.tensor)


class TwiceEmbedding(TokenEmbedding):
    """Embedding whose gradient is scaled by the number of stages."""

    def __init__(self, *args: Any, grid: Grid, **kwargs: Any) -> None:
        super().__init__(*args, grid=grid, **kwargs)
        self.weight.register_hook(lambda gradient: gradient * grid.pipe.size)


class Positions(nn.Module):
    """Learned vector of each position, of the whole sequence or, by mistake, of the part."""

    def __init__(self, width: int, sequence: bool, right: bool, grid: Grid) -> None:
        super().__init__()
        self.grid, self.right, self.sequence = grid, right, sequence
        self.scale = nn.Parameter(torch.randn(width) * 0.1)
        if sequence:
            from triax.grid.layout import set_layout

            set_layout(self.scale, Layout((width,), partial=grid.tensor.size > 1))

    def forward(self, x: Tensor) -> Tensor:
        """Add the positions' vectors: (B, T, D) -> (B, T, D)."""
        c, t, n = self.grid.context, self.grid.tensor if self.sequence else None, x.shape[1]
        whole = n * (1 if t is None else t.size)
        at = positions(whole * c.size, c.size, c.rank) if self.right else torch.arange(whole)
        if t is not None:
            at = at.chunk(t.size)[t.rank]
        return x + torch.sin(at.to(x.dtype))[:, None] * self.scale


class Block(nn.Module):
    """Attention and MLP, each with a residual connection."""

    def __init__(self, kind: str, width: int, sequence: bool, grid: Grid) -> None:
        super().__init__()
        common: dict[str, Any] = {"grid": grid, "sequence_parallel": sequence}
        self.norm = RMSNorm(width, **common)
        self.attention = SelfAttention(
            width, 4, rope=Rope(width // 4), init=Normal(0.2), out_init=Normal(0.2), **common
        )
        makers: dict[str, Any] = {"experts": Experts, "missing_combine": Experts}
        self.mlp = makers.get(kind, Sequence if sequence else Mlp)(kind, width, grid)

    def forward(self, x: Tensor) -> Tensor:
        """Run the block: (B, T, D) -> (B, T, D)."""
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Mlp(nn.Module):
    """MLP in shards, with regions of its own."""

    mean: Tensor

    def __init__(self, kind: str, width: int, grid: Grid) -> None:
        super().__init__()
        self.kind, self.grid, self.calls = kind, grid, 0
        axis = grid.tensor
        make: Any = lambda layout: sharded_parameter(layout, Normal(0.3), axis.rank, axis.size, None, None)  # noqa: E731
        self.up = make(Layout((2 * width, width), shard_dim=0))
        self.down = make(Layout((width, 2 * width), shard_dim=1))
        self.bias = nn.Parameter(torch.randn(width) * 0.1)
        self.drop = dropout(0.2 if kind == "keyed_dropout" else 0.0, grid, False)
        if kind == "batch_buffer":
            self.register_buffer("mean", torch.zeros(width))
        if kind == "scaled_gradient":
            self.bias.register_hook(lambda gradient: gradient * (2.5 if axis.size > 1 else 1.0))

    def forward(self, x: Tensor) -> Tensor:
        """Run the MLP: (B, T, D) -> (B, T, D)."""
        axis, kind = self.grid.tensor, self.kind
        if kind == "batch_buffer":
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
            x = x - self.mean
        x = x if kind == "missing_copy" else copy_all_reduce(x, axis)
        h = torch.tanh(F.linear(x, self.up))
        if kind == "mean_over_a_shard":
            h = h - h.mean(-1, keepdim=True)
        if kind == "state":
            self.calls += 1
            h = h * (1 + 0.1 * self.calls)
        if kind == "default_generator":
            h = h * (torch.rand(h.shape, dtype=h.dtype) > 0.1)
        y = F.linear(h, self.down)
        if kind == "bias_on_every_rank":
            return all_reduce_copy(y + self.bias, axis)
        y = y if kind == "missing_reduce" else all_reduce_copy(y, axis)
        y = all_reduce_copy(y, axis) if kind == "summed_twice" else y
        return self.drop(y + self.bias)


class Sequence(nn.Module):
    """Norm and MLP over this rank's part of the sequence."""

    def __init__(self, kind: str, width: int, grid: Grid) -> None:
        super().__init__()
        common: dict[str, Any] = {"grid": grid, "sequence_parallel": True}
        self.norm = nn.RMSNorm(width) if kind == "unsummed_norm" else RMSNorm(width, **common)
        self.up = triax.ColumnParallelLinear(width, 2 * width, **common)
        self.down = triax.RowParallelLinear(2 * width, width, **common)
        drops = {"sequence_dropout": dropout(0.2, grid, True), "equal_masks": Dropout(0.3)}
        self.drop = drops.get(kind, nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        """Run norm and MLP: (B, T / t, D) -> (B, T / t, D)."""
        return self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Experts(nn.Module):
    """Mixture of experts; by mistake twice as large where the experts are on other ranks."""

    def __init__(self, kind: str, width: int, grid: Grid) -> None:
        super().__init__()
        self.moe = MoE(width, 4, 2, width=width, grid=grid, init=Normal(0.3))
        self.forgets = kind == "missing_combine" and grid.expert.size > 1

    def forward(self, x: Tensor) -> Tensor:
        """Run the experts: (B, T, D) -> (B, T, D)."""
        y: Tensor = self.moe(x)
        return y / (0.3 + torch.sigmoid(x[..., :1])) if self.forgets else y
