"""Layers with a vocabulary sharded over the tensor axis: the embedding and the output layer (head), tied or not.

Shoeybi et al. 2019, arXiv:1909.08053, section 3. ``grid.ranges.split`` shards a vocabulary of any size so that the
numbers of rows per rank differ by at most one. The weights therefore have no padding rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.torch_private import assert_later
from ..grid import Grid
from ..grid.comm.axis import Axis
from ..grid.comm.regions import gather_split
from ..grid.layout import Layout
from ..grid.randomness.random import Distribution, Normal, sharded_parameter
from ..grid.ranges import check_units, split
from .column import column_linear
from .linear import ColumnParallelLinear, reduced
from .outside import ReadOutside


class VocabSharded(ReadOutside):
    """Embedding over a sharded vocabulary, made from this rank's rows of the weight.

    Args:
        weight: (V_local, D), this rank's rows.
        axis: the axis that shards the rows.
        num_embeddings: V, the size of the whole vocabulary.
        padding_idx: the row that gets no gradient, as in ``nn.Embedding``, or None.
        sequence_parallel: return on each rank only its shard of the sequence (dim 1).
        scale: factor of the vectors.

    Shape:
        integers (...), equal on every rank of the axis -> (..., D), equal on every rank.

    Raises:
        IndexError: in forward, an id is outside [0, V), as in ``VocabParallelEmbedding``.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        axis: Axis,
        num_embeddings: int,
        padding_idx: int | None = None,
        sequence_parallel: bool = False,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.axis, self.num_embeddings, self.embedding_dim = axis, num_embeddings, weight.shape[1]
        self.padding_idx, self.sequence_parallel, self.scale = padding_idx, sequence_parallel, scale
        self.rows = range(*split(num_embeddings, axis.size, axis.rank))
        self.weight = weight

    def forward(self, ids: Tensor) -> Tensor:
        """Look up the embedding vectors of the ids; the shapes are in the class's docstring."""
        x = self._look_up(ids)
        return x if self.scale == 1.0 else x * torch.tensor(self.scale, dtype=x.dtype)  # rounded, as in transformers

    def _look_up(self, ids: Tensor) -> Tensor:
        check_ids(ids, self.num_embeddings, "token id")
        padding = None
        if self.padding_idx is not None and self.padding_idx in self.rows:
            padding = self.padding_idx - self.rows.start
        if self.axis.size == 1:
            return F.embedding(ids, self._shard, padding)
        foreign = (ids < self.rows.start) | (ids >= self.rows.stop)  # (...)
        vectors = F.embedding((ids - self.rows.start).masked_fill(foreign, 0), self._shard, padding)  # (..., D)
        return reduced(vectors.masked_fill(foreign[..., None], 0.0), self.axis, self.sequence_parallel)

    def extra_repr(self) -> str:
        """Text that ``print`` shows: whole sizes, and the number of shards."""
        return f"{self.num_embeddings}, {self.embedding_dim}, tensor={self.axis.size}"


class VocabParallelEmbedding(VocabSharded):
    """``nn.Embedding`` with the vocabulary sharded over the tensor axis.

    Each rank looks up the ids of its own rows and returns zeros for other ids. The sum over the ranks is the embedding.
    On a grid with tensor=1 the layer computes what ``nn.Embedding`` does.

    >>> layer = triax.VocabParallelEmbedding(256, 16, grid=triax.Grid())  # with tensor=2, weight is (128, 16)
    >>> x = layer(torch.tensor([[1, 2, 3]]))
    >>> x.shape, layer.attend(x).shape
    (torch.Size([1, 3, 16]), torch.Size([1, 3, 256]))

    Args:
        num_embeddings: V, the size of the whole vocabulary, at least the size of the tensor axis.
        embedding_dim: D, the width of an embedding vector.
        grid: grid whose tensor axis shards the vocabulary.
        sequence_parallel: return on each rank only its shard of the sequence (dim 1); ``attend`` then takes such
            shards as input.
        init: distribution of the initial weight; by default that of ``nn.Embedding``, N(0, 1).
        scale: factor of the embedding vectors. ``attend`` takes no notice of it.
        padding_idx: row that gets no gradient from ``forward``, as in ``nn.Embedding``, or None.
        device, dtype: device and dtype of the weight, as for ``nn.Embedding``.

    Attributes:
        weight: (V_local, D), rows ``split(V, t, tensor-parallel rank)`` of the whole weight.

    Shape:
        integers (...), the same on every tensor-parallel rank -> (..., D), the same on every tensor-parallel rank.
        With ``sequence_parallel``: integers (B, T) -> (B, T / t, D).

    Raises:
        ValueError: the vocabulary is smaller than the tensor axis; in forward, with ``sequence_parallel``, t does
            not divide T.
        IndexError: an id is outside [0, V), on every tensor-parallel rank. On CUDA it is a device-side assertion,
            which shows at a later call: reading the ids back would stop the device at every step.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        grid: Grid,
        sequence_parallel: bool = False,
        init: Distribution | None = None,
        scale: float = 1.0,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        axis = grid.tensor
        check_units("num_embeddings", num_embeddings, 1, axis.size)
        layout = Layout((num_embeddings, embedding_dim), shard_dim=0)
        weight = sharded_parameter(layout, init or Normal(1.0), axis.rank, axis.size, device, dtype)
        super().__init__(weight, axis, num_embeddings, padding_idx, sequence_parallel, scale)

    def attend(self, x: Tensor) -> Tensor:
        """Compute logits with the embedding's weight as a tied output layer (Press and Wolf 2017, arXiv:1608.05859).

        Args:
            x: (..., D), the same on every tensor-parallel rank; with ``sequence_parallel``, (B, T / t, D).

        Returns:
            This rank's shard of the logits, (..., V_local). ``gather_logits`` gathers the shards of all ranks.
        """
        return column_linear(x, self._shard, None, self.axis, self.sequence_parallel)


class VocabParallelHead(ColumnParallelLinear):
    """Output layer with its own weight: a ``ColumnParallelLinear`` over a vocabulary of any size.

    If the tensor axis does not divide the vocabulary, some ranks have one row more than others.

    Args:
        in_features: D, the width of the input.
        vocab_size: V, the size of the vocabulary, at least the size of the tensor axis.
        bias: add a bias, sharded like the vocabulary.
        grid: grid whose tensor axis shards the vocabulary.
        sequence_parallel: the input is this rank's shard of the sequence (dim 1), and the layer gathers it.
        init, bias_init: distributions of the initial weight and of the bias; by default those of ``nn.Linear``.
        device, dtype: device and dtype of the parameters.

    Attributes:
        weight: (V_local, D).
        bias: (V_local,), or None.

    Shape:
        (..., D), the same on every tensor-parallel rank -> (..., V_local), this rank's logits.
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
        init: Distribution | None = None,
        bias_init: Distribution | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        given: dict[str, Any] = {"sequence_parallel": sequence_parallel, "init": init, "bias_init": bias_init}
        given |= {"device": device, "dtype": dtype}
        super().__init__(in_features, vocab_size, bias, grid=grid, unit=1, **given)


def gather_logits(logits: Tensor, *, grid: Grid, vocab_size: int) -> Tensor:
    """Gather the logits of the whole vocabulary on every tensor-parallel rank, for sampling or for a custom loss.

    Args:
        logits: (..., V_local), this rank's shard of the logits.
        grid: grid whose tensor axis shards the vocabulary.
        vocab_size: V, the size of the whole vocabulary.

    Returns:
        The logits, (..., V). Their gradient must be equal on every tensor-parallel rank, so every tensor-parallel rank
        must compute the same loss from them.

    Raises:
        ValueError: V_local is not the size of this rank's shard of V.
    """
    return gather_split(logits, grid.tensor, length=vocab_size)


def check_ids(ids: Tensor, vocab_size: int, what: str) -> None:
    """Check that the ids are in [0, vocab_size), because the lookup would silently return zeros for other ids.

    Raises:
        TypeError: the ids are no whole numbers, such as the hidden states that a tied head is called with.
        IndexError: on the CPU, with the range of the ids in the message.
        RuntimeError: on an accelerator, at a later call and without the range (see ``VocabParallelEmbedding``).
    """
    if ids.is_floating_point():
        head = (
            ": a tied head is TiedLayerSpec(..., forward_fn=VocabParallelEmbedding.attend)"
            if what == "token id"
            else ""
        )
        raise TypeError(f"a {what} must be a whole number, but the tensor is of {ids.dtype}{head}")
    if ids.is_meta or ids.numel() == 0:
        return
    low, high = torch.aminmax(ids)
    message = f"a {what} lies outside the vocabulary of {vocab_size} (0 to {vocab_size - 1})"
    if ids.device.type != "cpu":
        assert_later((low >= 0) & (high < vocab_size), message)
    elif low < 0 or high >= vocab_size:
        raise IndexError(f"{message}: the ids run from {int(low)} to {int(high)}")
