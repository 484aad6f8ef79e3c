"""A GPT as a list of layers: token embedding, positions, blocks, final norm, head.

The shape is GPT-2's (Radford et al. 2019): learned positions, LayerNorm in front of each branch, GELU in its
tanh form, the head tied to the token embedding. Attention and MLP are each one column-parallel and one
row-parallel layer over the tensor axis (Shoeybi et al. 2019, arXiv:1909.08053, section 3), so a block costs
two all-reduces forward and two backward. Dropout acts on the embeddings and on what each branch adds; not on
the attention probabilities, where GPT-2 has it too.

Shapes: B sequences of T tokens, D the width, V the vocabulary, t the tensor axis's size.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..grid import Grid
from ..grid.layout import Layout
from ..grid.random import Normal
from ..pipe.spec import LayerSpec
from ..tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, sharded_parameter
from ..tensor_parallel.norm import LayerNorm
from .attention import SelfAttention
from .config import GPTConfig
from .layers import FinalLayerNorm, NextTokenLoss, ResidualBlock, dropout, first_and_last
from .packed import attach, detach, positions_within

__all__ = ["MLP", "Block", "GPTConfig", "GPTLoss", "PositionEmbedding", "gpt"]

GPTLoss = NextTokenLoss

_ZERO = Normal(0.0)


def gpt(config: GPTConfig, sequence_parallel: bool = False) -> list[LayerSpec]:
    """The model's layers in order, for a ``PipelineModule``: ids (B, T) -> logits (B, T, V / t).

    The list is ``[embedding, positions, block 0, ..., block L - 1, norm, head]``: L + 4 layers. Nothing is
    built here, and the list does not depend on the grid. The input may be ``(ids, documents)``: see ``packed``.

    Args:
        config: of the model.
        sequence_parallel: between the layers, each tensor rank holds its shard (B, T / t, D) of the sequence; t
            divides T then (Korthikanti et al. 2022, arXiv:2205.05198).

    Returns:
        The specs. With ``tie_embeddings`` the first and the last are ties of the key ``"embed"``.
    """
    first, head = first_and_last(
        config.vocab_size, config.width, config.init_std, config.tie_embeddings, sequence_parallel
    )
    return [
        first,
        LayerSpec(PositionEmbedding, config, sequence_parallel=sequence_parallel),
        *(LayerSpec(Block, config, sequence_parallel=sequence_parallel) for _ in range(config.layers)),
        LayerSpec(FinalLayerNorm, config.width, config.norm_eps, sequence_parallel=sequence_parallel),
        head,
    ]


class PositionEmbedding(nn.Module):
    """Adds a learned vector for each position, then drops: (B, T, D) -> (B, T, D).

    Args:
        config: of the model.
        grid: its tensor axis shards the sequence, if anything does.
        sequence_parallel: x is a shard of the sequence, (B, T / t, D), and takes the positions of its place.

    Attributes:
        weight: (sequence_length, D), whole on every tensor rank.
        cache: the positions of the tokens that come, for generation; else None.

    Raises:
        ValueError: in forward, a sequence longer than ``config.sequence_length``.
    """

    cache: Any = None

    def __init__(self, config: GPTConfig, *, grid: Grid, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.axis, self.sequence_parallel = grid.tensor, sequence_parallel
        self.sequence_length = config.sequence_length  # the most that generation asks for
        partial = sequence_parallel and grid.tensor.size > 1
        layout = Layout((config.sequence_length, config.width), partial=partial)
        # Whole on every tensor rank, and drawn as every parallel layer's: alike on each.
        self.weight = sharded_parameter(layout, Normal(config.init_std), rank=0, size=1)
        self.dropout = dropout(config.dropout, grid, sequence_parallel)

    def forward(self, x: Any) -> Any:
        """See above; ``(x, documents)`` where rows are packed: positions start anew in each document."""
        x, documents = detach(x)
        here = x.shape[1]
        start = self.axis.rank * here if self.sequence_parallel else 0
        if self.cache is not None:
            y = x + F.embedding(self.cache.positions, self.weight)
        elif documents is not None:
            positions = positions_within(documents)
            if positions.device.type == "cpu":  # elsewhere the lookup asserts: reading it back would stop the device
                self._check(int(positions.max()) + 1)
            y = x + F.embedding(positions[:, start : start + here], self.weight)
        else:
            self._check(here * self.axis.size if self.sequence_parallel else here)
            y = x + self.weight[start : start + here]
        return attach(self.dropout(y), documents)

    def _check(self, length: int) -> None:
        if length > self.weight.shape[0]:
            raise ValueError(
                f"a sequence of {length} tokens, and the model has {self.weight.shape[0]} positions: cut it, "
                f"or build the model with sequence_length={length}"
            )


class Block(ResidualBlock):
    """One transformer layer: x + attention(norm1(x)), then x + mlp(norm2(x)): (B, T, D) -> (B, T, D).

    Args:
        config: of the model.
        grid: its tensor axis shards heads and hidden width.
        sequence_parallel: x is a shard of the sequence, (B, T / t, D).

    Raises:
        ValueError: the tensor axis is larger than the number of heads.
    """

    def __init__(self, config: GPTConfig, *, grid: Grid, sequence_parallel: bool = False) -> None:
        super().__init__()
        config.check_tensor(grid.tensor.size)
        self.norm1 = LayerNorm(config.width, config.norm_eps, grid=grid, sequence_parallel=sequence_parallel)
        self.attention = SelfAttention(
            config.width,
            config.heads,
            grid=grid,
            bias=True,
            out_bias=True,
            init=Normal(config.init_std),
            out_init=Normal(config.residual_std),
            sequence_parallel=sequence_parallel,
        )
        self.dropout1 = dropout(config.dropout, grid, sequence_parallel)
        self.norm2 = LayerNorm(config.width, config.norm_eps, grid=grid, sequence_parallel=sequence_parallel)
        self.mlp = MLP(config, grid=grid, sequence_parallel=sequence_parallel)
        self.dropout2 = dropout(config.dropout, grid, sequence_parallel)


class MLP(nn.Module):
    """down(gelu(up(x))), the hidden width sharded over the tensor axis: (B, T, D) -> (B, T, D)."""

    def __init__(self, config: GPTConfig, *, grid: Grid, sequence_parallel: bool = False) -> None:
        super().__init__()
        width, hidden = config.width, config.mlp_ratio * config.width
        common: dict[str, Any] = {"grid": grid, "unit": 1, "sequence_parallel": sequence_parallel, "bias_init": _ZERO}
        self.up = ColumnParallelLinear(width, hidden, init=Normal(config.init_std), **common)
        self.down = RowParallelLinear(hidden, width, init=Normal(config.residual_std), **common)

    def forward(self, x: Tensor) -> Tensor:
        """See above."""
        y: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return y
