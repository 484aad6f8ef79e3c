"""The vocabulary sharded over the tensor axis: embedding, and the head that it is tied to or not.

Shoeybi et al. 2019, arXiv:1909.08053, section 3. A vocabulary of any size is shared out by
``grid.layout.split``, to within one row: no parameter has rows that only pad.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..grid import Grid
from ..grid.layout import Layout, split
from ..grid.random import Normal, Uniform
from .column import column_linear
from .linear import _default, reduced, sharded_parameter
from .regions import gather_split

__all__ = ["VocabParallelEmbedding", "VocabParallelHead", "gather_logits"]


class VocabParallelEmbedding(nn.Module):
    """``nn.Embedding`` with the vocabulary sharded over the tensor axis.

    Each rank looks up the ids that it owns and puts zeros for the others; the sum over the ranks is the
    embedding. On a grid with tensor=1 it is ``nn.Embedding``.

    Args:
        num_embeddings: V, the whole vocabulary: any size of at least the tensor axis's.
        embedding_dim: D.
        grid: its tensor axis shards the vocabulary.
        sequence_parallel: leave on each rank its shard of the sequence (dim 1); ``attend`` takes such shards.
        init: distribution of the weight; by default ``nn.Embedding``'s, N(0, 1).
        device, dtype: of the weight, as for ``nn.Embedding``.

    Attributes:
        weight: (V_local, D): rows ``split(V, t, tensor rank)`` of the whole.

    Shape:
        integers (...), the same on every tensor rank -> (..., D), the same on every tensor rank.
        With ``sequence_parallel``: integers (B, T) -> (B, T / t, D).

    Raises:
        ValueError: the vocabulary is smaller than the tensor axis; in forward, with ``sequence_parallel``, t does
            not divide T.
        IndexError: an id is outside [0, V), on every tensor rank. On CUDA it is a device-side assertion,
            which shows at a later call: reading the ids back would stop the device at every step.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        grid: Grid,
        sequence_parallel: bool = False,
        init: Normal | Uniform | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.axis = grid.tensor
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.sequence_parallel = sequence_parallel
        self.start, self.stop = vocabulary_range(num_embeddings, self.axis.rank, self.axis.size)
        layout = Layout((num_embeddings, embedding_dim), shard_dim=0)
        init = init or Normal(1.0)
        self.weight = sharded_parameter(layout, init, self.axis.rank, self.axis.size, device, dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of these ids: see Shape."""
        check_ids(ids, self.num_embeddings, "token id")
        if self.axis.size == 1:
            return F.embedding(ids, self.weight)
        foreign = (ids < self.start) | (ids >= self.stop)  # (...)
        rows = F.embedding((ids - self.start).masked_fill(foreign, 0), self.weight)  # (..., D)
        return reduced(rows.masked_fill(foreign[..., None], 0.0), self.axis, self.sequence_parallel)

    def attend(self, x: Tensor) -> Tensor:
        """The weight as an output layer (Press and Wolf 2017, arXiv:1608.05859): the tied head.

        Args:
            x: (..., D), the same on every tensor rank; with ``sequence_parallel``, (B, T / t, D).

        Returns:
            (..., V_local): this rank's logits; ``gather_logits`` gives all of them.
        """
        return column_linear(x, self.weight, None, self.axis, self.sequence_parallel)

    def extra_repr(self) -> str:
        """What ``print`` shows: whole sizes, and the number of shards."""
        return f"{self.num_embeddings}, {self.embedding_dim}, tensor={self.axis.size}"


class VocabParallelHead(nn.Module):
    """An output layer of its own weight, column-parallel over a vocabulary of any size.

    ``ColumnParallelLinear`` but for the sizes: rows are shared out unevenly where they must be.

    Args:
        in_features: D.
        vocab_size: V, of at least the tensor axis's size.
        bias: whether to add one, sharded as the vocabulary is.
        grid: its tensor axis shards the vocabulary.
        sequence_parallel: the input is this rank's shard of the sequence (dim 1), and is gathered here.
        init: distribution of the weight; by default ``nn.Linear``'s. The bias takes ``nn.Linear``'s.
        device, dtype: of the parameters.

    Attributes:
        weight: (V_local, D).
        bias: (V_local,), or None.

    Shape:
        (..., D), the same on every tensor rank -> (..., V_local), this rank's logits.
        With ``sequence_parallel``: (B, T / t, D) -> (B, T, V_local).

    Raises:
        ValueError: the vocabulary is smaller than the tensor axis.
    """

    def __init__(
        self,
        in_features: int,
        vocab_size: int,
        bias: bool = False,
        *,
        grid: Grid,
        sequence_parallel: bool = False,
        init: Normal | Uniform | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.axis = grid.tensor
        self.in_features, self.vocab_size = in_features, vocab_size
        self.sequence_parallel = sequence_parallel
        rank, size = self.axis.rank, self.axis.size
        vocabulary_range(vocab_size, rank, size)
        layout = Layout((vocab_size, in_features), shard_dim=0)
        self.weight = sharded_parameter(layout, init or _default(in_features), rank, size, device, dtype)
        self.bias = None
        if bias:
            layout = Layout((vocab_size,), shard_dim=0)
            self.bias = sharded_parameter(layout, _default(in_features), rank, size, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """This rank's logits: see Shape."""
        return column_linear(x, self.weight, self.bias, self.axis, self.sequence_parallel)

    def extra_repr(self) -> str:
        """What ``print`` shows: whole sizes, and the number of shards."""
        return f"{self.in_features}, {self.vocab_size}, bias={self.bias is not None}, tensor={self.axis.size}"


def gather_logits(logits: Tensor, *, grid: Grid, vocab_size: int) -> Tensor:
    """All logits on every tensor rank, for sampling or for a loss of one's own.

    Args:
        logits: (..., V_local), this rank's.
        grid: its tensor axis holds the shards.
        vocab_size: V.

    Returns:
        (..., V). Its gradient is taken as the same on every rank: use it alike on each.

    Raises:
        ValueError: V_local is not this rank's share of V.
    """
    return gather_split(logits, grid.tensor, length=vocab_size)


def vocabulary_range(vocab_size: int, rank: int, size: int) -> tuple[int, int]:
    """The ids [start, stop) that tensor rank ``rank`` of ``size`` owns; ValueError if one would own none."""
    if vocab_size < size:
        raise ValueError(
            f"a vocabulary of {vocab_size} over tensor={size} leaves {size - vocab_size} of its ranks "
            f"without a row; give the grid a tensor axis of at most {vocab_size}"
        )
    return split(vocab_size, size, rank)


def check_ids(ids: Tensor, vocab_size: int, what: str) -> None:
    """Refuse ids outside [0, vocab_size): a mask would turn them into zeros without a word.

    Raises:
        IndexError: with the range found, on the CPU.
        RuntimeError: on an accelerator, later and without the number: see ``VocabParallelEmbedding``.
    """
    if ids.is_meta or ids.numel() == 0:
        return
    low, high = torch.aminmax(ids)
    message = f"a {what} lies outside the vocabulary of {vocab_size} (0 to {vocab_size - 1})"
    if ids.device.type != "cpu":
        torch._assert_async((low >= 0) & (high < vocab_size), message)
    elif low < 0 or high >= vocab_size:
        raise IndexError(f"{message}: the ids run from {int(low)} to {int(high)}")
