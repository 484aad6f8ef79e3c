"""A GPT as a list of layers: token embedding, positions, blocks, final norm, head.

The shape is GPT-2's (Radford et al. 2019): learned positions, LayerNorm in front of each branch, GELU in its
tanh form, the head tied to the token embedding. Attention and MLP are each one column-parallel and one
row-parallel layer over the tensor axis (Shoeybi et al. 2019, arXiv:1909.08053, section 3), so a block costs
two all-reduces forward and two backward. Dropout acts on the embeddings and on what each branch adds; not on
the attention probabilities, where GPT-2 has it too.

Shapes: B sequences of T tokens, D the width, V the vocabulary, t the tensor axis's size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ..grid import Grid
from ..grid.layout import Layout
from ..grid.random import Dropout, Normal
from ..pipe.spec import LayerSpec, TiedLayerSpec
from ..tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from ..tensor_parallel.embedding import VocabParallelEmbedding, VocabParallelHead
from ..tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, sharded_parameter
from .config import GPTConfig

__all__ = ["MLP", "Attention", "Block", "GPTConfig", "GPTLoss", "PositionEmbedding", "gpt"]

_ZERO = Normal(0.0)


def gpt(config: GPTConfig) -> list[LayerSpec]:
    """The model's layers in order, for a ``PipelineModule``: ids (B, T) -> logits (B, T, V / t).

    The list is ``[embedding, positions, block 0, ..., block L - 1, norm, head]``: L + 4 layers. Nothing is
    built here, and the list does not depend on the grid.

    Args:
        config: of the model.

    Returns:
        The specs. With ``tie_embeddings`` the first and the last are ties of the key ``"embed"``.
    """
    embedding = (VocabParallelEmbedding, config.vocab_size, config.width)
    init = Normal(config.init_std)
    first: LayerSpec
    head: LayerSpec
    if config.tie_embeddings:
        first = TiedLayerSpec("embed", *embedding, init=init)
        head = TiedLayerSpec("embed", *embedding, init=init, forward_fn=VocabParallelEmbedding.attend)
    else:
        first = LayerSpec(*embedding, init=init)
        head = LayerSpec(VocabParallelHead, config.width, config.vocab_size, init=init)
    return [
        first,
        LayerSpec(PositionEmbedding, config),
        *(LayerSpec(Block, config) for _ in range(config.layers)),
        LayerSpec(nn.LayerNorm, config.width, eps=config.norm_eps),
        head,
    ]


class PositionEmbedding(nn.Module):
    """Adds a learned vector for each position, then drops: (B, T, D) -> (B, T, D).

    Raises:
        ValueError: in forward, a sequence longer than ``config.sequence_length``.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        layout = Layout((config.sequence_length, config.width))
        # Whole on every tensor rank, and drawn as every parallel layer's: alike on each.
        self.weight = sharded_parameter(layout, Normal(config.init_std), rank=0, size=1)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """See above."""
        length = x.shape[1]
        if length > self.weight.shape[0]:
            raise ValueError(
                f"a sequence of {length} tokens, and the model has {self.weight.shape[0]} positions: cut it, "
                f"or build the model with sequence_length={length}"
            )
        y: Tensor = self.dropout(x + self.weight[:length])
        return y


class Block(nn.Module):
    """One transformer layer: x + attention(norm1(x)), then x + mlp(norm2(x)): (B, T, D) -> (B, T, D).

    Args:
        config: of the model.
        grid: its tensor axis shards heads and hidden width.

    Raises:
        ValueError: the tensor axis does not divide the heads.
    """

    def __init__(self, config: GPTConfig, *, grid: Grid) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config, grid=grid)
        self.dropout1 = Dropout(config.dropout)
        self.norm2 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.mlp = MLP(config, grid=grid)
        self.dropout2 = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """See above."""
        x = x + self.dropout1(self.attention(self.norm1(x)))
        return x + self.dropout2(self.mlp(self.norm2(x)))


class Attention(nn.Module):
    """Causal self-attention, heads / t of the heads on each tensor rank: (B, T, D) -> (B, T, D).

    Args:
        config: of the model.
        grid: its tensor axis shards the heads.

    Raises:
        ValueError: the tensor axis does not divide the heads.
    """

    def __init__(self, config: GPTConfig, *, grid: Grid) -> None:
        super().__init__()
        config.check_tensor(grid.tensor.size)
        width = config.width
        self.head_dim = config.head_dim
        # q, k and v sharded each on its own: whole heads of all three lie on every rank.
        self.qkv = ColumnParallelLinear(
            width, 3 * width, grid=grid, parts=(width,) * 3, init=Normal(config.init_std), bias_init=_ZERO
        )
        self.out = RowParallelLinear(width, width, grid=grid, init=Normal(config.residual_std), bias_init=_ZERO)

    def forward(self, x: Tensor) -> Tensor:
        """See above."""
        qkv = self.qkv(x)  # (B, T, 3 D / t)
        q, k, v = rearrange(qkv, "b t (three heads dim) -> three b heads t dim", three=3, dim=self.head_dim)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, heads / t, T, dim)
        out: Tensor = self.out(rearrange(y, "b heads t dim -> b t (heads dim)"))
        return out  # (B, T, D)


class MLP(nn.Module):
    """down(gelu(up(x))), the hidden width sharded over the tensor axis: (B, T, D) -> (B, T, D)."""

    def __init__(self, config: GPTConfig, *, grid: Grid) -> None:
        super().__init__()
        width, hidden = config.width, config.mlp_ratio * config.width
        self.up = ColumnParallelLinear(width, hidden, grid=grid, init=Normal(config.init_std), bias_init=_ZERO)
        self.down = RowParallelLinear(hidden, width, grid=grid, init=Normal(config.residual_std), bias_init=_ZERO)

    def forward(self, x: Tensor) -> Tensor:
        """See above."""
        y: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return y


@dataclass(frozen=True)
class GPTLoss:
    """Cross entropy of the next token, as a sum and its weight: the engine divides once, by the whole
    batch's.

    Args:
        grid: its tensor axis shards the vocabulary.
        vocab_size: V, the whole vocabulary.
        ignore_index: labels with this value do not count.
        label_smoothing: over the whole vocabulary.
    """

    grid: Grid
    vocab_size: int
    ignore_index: int = -100
    label_smoothing: float = 0.0

    def __call__(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of the losses, and the number of labels that count.

        Args:
            logits: (B, T, V / t), this tensor rank's.
            labels: integers (B, T): the tokens that should follow.

        Returns:
            () of the logits' dtype (float32 at least), and an integer (); the same on every tensor rank.
        """
        total = vocab_parallel_cross_entropy(
            logits,
            labels,
            grid=self.grid,
            vocab_size=self.vocab_size,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction="sum",
        )
        return total, torch.count_nonzero(labels != self.ignore_index)
