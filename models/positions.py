"""Learned positions, which are added to the embeddings (``rope.py`` has rotary ones)."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..context.documents import positions_within
from ..context.dropout import dropout
from ..context.slices import Slices
from ..grid import Grid
from ..grid.layout import Layout
from ..grid.randomness.random import Normal, sharded_parameter
from .config import TransformerConfig
from .packed import attach, detach, token_positions


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
        slices: tells the tokens of a slice, if a pipeline cuts sequences into slices, else None.

    Raises:
        ValueError: in forward, the sequence is longer than ``config.max_position_embeddings``.
    """

    cache: Any = None
    slices: Slices | None = None

    def __init__(
        self, config: TransformerConfig, offset: int = 0, *, grid: Grid, sequence_parallel: bool = False
    ) -> None:
        super().__init__()
        self.axis, self.context = grid.tensor, grid.context
        self.sequence_parallel, self.offset = sequence_parallel, offset
        self.max_position_embeddings = config.max_position_embeddings  # the most that generation asks for
        partial = sequence_parallel and grid.tensor.size > 1
        layout = Layout((offset + config.max_position_embeddings, config.hidden_size), partial=partial)
        # Whole on every tensor rank, and drawn from (seed, name) like every parallel layer's: the same on each.
        self.weight = sharded_parameter(layout, Normal(config.initializer_range), rank=0, size=1)
        self.dropout = dropout(config.dropout, grid, sequence_parallel)

    def forward(self, x: Any) -> Any:
        """Add the position vectors and apply dropout. In packed rows ``(x, documents)`` each document starts at 0."""
        x, documents = detach(x)
        return attach(self.dropout(self.added(x, documents)), documents)

    def added(self, x: Tensor, documents: Tensor | None) -> Tensor:
        """Return x with the position vectors."""
        here = x.shape[1]
        start = self.axis.rank * here if self.sequence_parallel else 0
        if self.cache is not None:
            y = x + F.embedding(self.cache.positions + self.offset, self.weight)
        else:
            local = here * self.axis.size if self.sequence_parallel else here
            length, positions = local * self.context.size, None
            if self.slices is not None and self.slices.active:
                self.slices.require(local)
                positions, length = self.slices.positions(documents, x.device), self.slices.length
            else:
                positions = token_positions(local, self.context, documents, x.device)
            if documents is None:
                self._check(length)
            elif documents.device.type == "cpu":  # elsewhere the lookup asserts: to read it back would stop the device
                self._check(int(positions_within(documents).max()) + 1)
            if positions is None:
                y = x + self.weight[self.offset + start : self.offset + start + here]
            else:
                y = x + F.embedding(positions[:, start : start + here] + self.offset, self.weight)
        return y

    def _check(self, length: int) -> None:
        if length > self.max_position_embeddings:
            raise ValueError(
                f"the sequence has {length} tokens, but the model has {self.max_position_embeddings} positions. Cut "
                f"the sequence, or build the model with max_position_embeddings={length}."
            )
