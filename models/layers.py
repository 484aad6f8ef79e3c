"""What the models' lists have in common: the first layer, the blocks' residual stream, the last norm, the loss.

Each of them takes what travels: ``x``, or ``(x, documents)`` where rows are packed (see ``packed``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..grid import Grid
from ..grid.random import Dropout, Normal
from ..pipe.spec import LayerSpec, TiedLayerSpec
from ..tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from ..tensor_parallel.embedding import VocabParallelEmbedding, VocabParallelHead
from ..tensor_parallel.norm import LayerNorm, RMSNorm
from .attention import SelfAttention
from .packed import attach, check_documents, detach

__all__ = ["FinalLayerNorm", "FinalRMSNorm", "NextTokenLoss", "ResidualBlock", "TokenEmbedding", "dropout"]


class TokenEmbedding(VocabParallelEmbedding):
    """``VocabParallelEmbedding`` of ids, or of ``(ids, documents)``, which stay with the result.

    Raises:
        ValueError: in forward, documents that do not number the tokens.
    """

    def forward(self, ids: Any) -> Any:
        """ids (B, T) -> (B, T, D), or (B, T / t, D) under sequence parallelism."""
        ids, documents = detach(ids)
        check_documents(ids, documents)
        return attach(super().forward(ids), documents)


def first_and_last(
    vocab_size: int, width: int, std: float, tied: bool, sequence_parallel: bool
) -> tuple[LayerSpec, LayerSpec]:
    """The token embedding and the head of a model's list: two layers, or ties of the key ``"embed"``."""
    common: dict[str, Any] = {"init": Normal(std), "sequence_parallel": sequence_parallel}
    sizes = (TokenEmbedding, vocab_size, width)
    if not tied:
        return LayerSpec(*sizes, **common), LayerSpec(VocabParallelHead, width, vocab_size, **common)
    head = TiedLayerSpec("embed", *sizes, **common, forward_fn=TokenEmbedding.attend)
    return TiedLayerSpec("embed", *sizes, **common), head


class ResidualBlock(nn.Module):
    """x + attention(norm1(x)), then x + mlp(norm2(x)), with dropout on what is added: (B, T, D) -> (B, T, D).

    A block of a model is a subclass that makes the parts named here.
    """

    norm1: nn.Module
    attention: SelfAttention
    dropout1: Dropout
    norm2: nn.Module
    mlp: nn.Module
    dropout2: Dropout

    def forward(self, x: Any) -> Any:
        """See above."""
        x, documents = detach(x)
        x = x + self.dropout1(self.attention(self.norm1(x), documents))
        x = x + self.dropout2(self.mlp(self.norm2(x)))
        return attach(x, documents)


class FinalLayerNorm(LayerNorm):
    """The LayerNorm in front of the head, where documents end their journey."""

    def forward(self, x: Any) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        return super().forward(detach(x)[0])


class FinalRMSNorm(RMSNorm):
    """The RMSNorm in front of the head, where documents end their journey."""

    def forward(self, x: Any) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        return super().forward(detach(x)[0])


def dropout(p: float, grid: Grid, sequence_parallel: bool) -> Dropout:
    """Dropout of the residual stream, which under sequence parallelism is a shard of the sequence."""
    return Dropout(p, axis=grid.tensor) if sequence_parallel else Dropout(p)


@dataclass(frozen=True)
class NextTokenLoss:
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
