"""A GPT as a list of layers: token embedding, positions, blocks, final norm, head.

The shape is GPT-2's (Radford et al. 2019): learned positions, LayerNorm in front of each branch, GELU in its
tanh form, the head tied to the token embedding. Attention and MLP are each one column-parallel and one
row-parallel layer over the tensor axis (Shoeybi et al. 2019, arXiv:1909.08053, section 3), so a block costs
two all-reduces forward and two backward. Dropout acts on the embeddings and on the output of each residual
branch. Unlike GPT-2, the model has no dropout on the attention probabilities.

Shapes: B sequences of T tokens, D the width, V the vocabulary, t the tensor axis's size.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..grid import Grid
from ..grid.layout import Layout
from ..pipe.spec import LayerSpec
from ..randomness.random import Constant, Normal, sharded_parameter
from ..tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from ..tensor_parallel.norm import LayerNorm
from .config import DecoderConfig, GPTConfig
from .layers import ACTIVATIONS, FinalLayerNorm, NextTokenLoss, ResidualBlock, dropout, first_and_last
from .packed import attach, detach, positions_within, token_positions

GPTLoss = NextTokenLoss

_ZERO = Constant(0.0)


def gpt_layers(config: GPTConfig, sequence_parallel: bool = False, attention: str = "ring") -> list[LayerSpec]:
    """List the specs of a GPT's layers in order, for a ``PipelineModule``: ids (B, T) -> logits (B, T, V / t).

    The list is ``[embedding, positions, block 0, ..., block L - 1, norm, head]``, which are L + 4 layers. The layers
    are built later, by the ``PipelineModule``, and the list does not depend on the grid. The input may be
    ``(ids, documents)`` for packed rows (see ``packed.py``).

    Args:
        config: the model's configuration.
        sequence_parallel: keep on each tensor-parallel rank, between the layers, only its shard (B, T / t, D) of the
            sequence. The tensor axis's size t must divide T (Korthikanti et al. 2022, arXiv:2205.05198).
        attention: how the ranks of the context axis compute attention: ``ring``, ``ulysses`` or ``gather``. It has no
            effect on a grid with context=1.

    Returns:
        The specs. With ``tie_word_embeddings`` the first and the last spec are tied with the key ``"embed"``.
    """
    first, head = first_and_last(config, sequence_parallel)
    return [
        first,
        LayerSpec(PositionEmbedding, config, sequence_parallel=sequence_parallel),
        *(
            LayerSpec(GPTBlock, config, sequence_parallel=sequence_parallel, attention=attention)
            for _ in range(config.num_hidden_layers)
        ),
        LayerSpec(FinalLayerNorm, config.hidden_size, config.layer_norm_epsilon, sequence_parallel=sequence_parallel),
        head,
    ]


class PositionEmbedding(nn.Module):
    """Layer that adds a learned vector for each position and applies dropout: (B, T, D) -> (B, T, D).

    Args:
        config: the model's configuration.
        offset: number of rows before that of the first position.
        grid: grid whose tensor axis shards the sequence if ``sequence_parallel``.
        sequence_parallel: the input is this rank's shard of the sequence, (B, T / t, D), and gets the positions that
            the shard has in the whole sequence.

    Attributes:
        weight: (offset + max_position_embeddings, D), replicated on every tensor-parallel rank.
        cache: KV cache with the positions of the new tokens during generation, else None.

    Raises:
        ValueError: in forward, the sequence is longer than ``config.max_position_embeddings``.
    """

    cache: Any = None

    def __init__(
        self, config: GPTConfig | DecoderConfig, offset: int = 0, *, grid: Grid, sequence_parallel: bool = False
    ) -> None:
        super().__init__()
        self.axis, self.context, self.sequence_parallel, self.offset = (
            grid.tensor,
            grid.context,
            sequence_parallel,
            offset,
        )
        self.max_position_embeddings = config.max_position_embeddings  # the most that generation asks for
        partial = sequence_parallel and grid.tensor.size > 1
        layout = Layout((offset + config.max_position_embeddings, config.hidden_size), partial=partial)
        # Whole on every tensor rank, and drawn from (seed, name) like every parallel layer's: the same on each.
        self.weight = sharded_parameter(layout, Normal(config.initializer_range), rank=0, size=1)
        self.dropout = dropout(config.dropout, grid, sequence_parallel)

    def forward(self, x: Any) -> Any:
        """Add the position vectors and apply dropout. In packed rows ``(x, documents)`` each document starts at 0."""
        x, documents = detach(x)
        here = x.shape[1]
        start = self.axis.rank * here if self.sequence_parallel else 0
        if self.cache is not None:
            y = x + F.embedding(self.cache.positions + self.offset, self.weight)
        else:
            local = here * self.axis.size if self.sequence_parallel else here
            positions = token_positions(local, self.context, documents, x.device)
            if documents is None:
                self._check(local * self.context.size)
            elif documents.device.type == "cpu":  # elsewhere the lookup asserts: to read it back would stop the device
                self._check(int(positions_within(documents).max()) + 1)
            if positions is None:
                y = x + self.weight[self.offset + start : self.offset + start + here]
            else:
                y = x + F.embedding(positions[:, start : start + here] + self.offset, self.weight)
        return attach(self.dropout(y), documents)

    def _check(self, length: int) -> None:
        if length > self.max_position_embeddings:
            raise ValueError(
                f"the sequence has {length} tokens, but the model has {self.max_position_embeddings} positions. Cut "
                f"the sequence, or build the model with max_position_embeddings={length}."
            )


class MLP(nn.Module):
    """MLP ``down(gelu(up(x)))``, its hidden width sharded over the tensor axis: (B, T, D) -> (B, T, D).

    Args:
        config: the model's configuration.
        grid, sequence_parallel: as for ``ResidualBlock``.
        activation: name in ``ACTIVATIONS``.
        bias: add biases, with initial value 0.
    """

    def __init__(
        self,
        config: GPTConfig | DecoderConfig,
        *,
        grid: Grid,
        sequence_parallel: bool = False,
        activation: str = "gelu_new",
        bias: bool = True,
    ) -> None:
        super().__init__()
        width, hidden, self.activation = config.hidden_size, config.intermediate_size, ACTIVATIONS[activation]
        common: dict[str, Any] = {"grid": grid, "unit": 1, "sequence_parallel": sequence_parallel, "bias": bias}
        common["bias_init"] = _ZERO
        self.up = ColumnParallelLinear(width, hidden, init=Normal(config.initializer_range), **common)
        self.down = RowParallelLinear(hidden, width, init=Normal(config.residual_std), **common)

    def forward(self, x: Tensor) -> Tensor:
        """Run the MLP: (B, T, D) -> (B, T, D)."""
        y: Tensor = self.down(self.activation(self.up(x)))
        return y


class GPTBlock(ResidualBlock):
    """``ResidualBlock`` of GPT-2, with LayerNorm, an MLP with GELU and biases in every linear layer."""

    norm = LayerNorm
    make_mlp = MLP

    def __init__(self, config: GPTConfig, *, grid: Grid, sequence_parallel: bool = False, **others: Any) -> None:
        super().__init__(config, grid=grid, sequence_parallel=sequence_parallel, bias=True, out_bias=True, **others)
