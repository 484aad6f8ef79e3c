"""Row-sparse gradients of embeddings: only rows that some replica's batch looked up are sent, and sums are exact.

The gradient of an embedding is zero except in the rows of the batch's tokens. Each replica sends these rows and their
numbers, and all replicas add up what every one sent. If that takes more bytes than the plain sum, the gradient is
summed plainly. All replicas decide alike: by the largest number of rows that any of them has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...base.option_error import refusal
from ...grid import Grid, layout_of
from ...tensor_parallel.embedding import VocabParallelEmbedding
from ...zero.protocols import GradientBucket
from .compressor import Compressor, message_bytes
from .uncompressed_sum import ParameterSlice, UncompressedSum, count_elements, parameter_slices

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag, VocabParallelEmbedding)


@dataclass(frozen=True)
class SparseRows:
    """Options of row-sparse gradients, of which only rows with a nonzero element are sent.

    Attributes:
        weights: weights of embeddings, (rows, columns), for example ``[model.embedding.weight]``. A weight with another
            use, such as a tied head, has a gradient in every row, so nothing is saved, and its rows are searched in
            vain.

    Raises:
        ValueError: a weight is not of two dims.
    """

    weights: Collection[Tensor]

    def __post_init__(self) -> None:
        flat = next((tuple(weight.shape) for weight in self.weights if weight.dim() != 2), None)
        if flat is not None:
            raise ValueError(
                f"a weight is of shape {flat}: give weights of embeddings only, which are of shape (rows, columns)"
            )

    def __call__(self, grid: Grid, buckets: Sequence[GradientBucket]) -> SparseRowsExchange:
        """Make the ``Exchange`` of these buckets."""
        return SparseRowsExchange(self, grid, buckets)


@dataclass(frozen=True)
class SparseEmbeddings:
    """Options of row-sparse gradients of a model's embeddings, wherever they are: ``compression: sparse_rows``."""

    def of(self, module: nn.Module, grid: Grid) -> SparseRows:
        """Return the options for the embeddings of a model. Collective over the grid.

        Raises:
            OptionError: on every rank, if the model has no embedding with sparse gradients.
        """
        return SparseRows(_embeddings(module, grid))


class SparseRowsExchange(Compressor):
    """Exchange of ``SparseRows``. It keeps no state.

    Bytes sent: for each embedding N - 1 messages with as many rows as the replica with the most has, and the plain sum
    of the rest.
    """

    def __init__(self, options: SparseRows, grid: Grid, buckets: Sequence[GradientBucket]) -> None:
        super().__init__(grid, buckets, ())
        weights = set(options.weights)
        self._slices = [p for p in parameter_slices(buckets) if p.member.parameter in weights and p.start < p.stop]
        self._counts = torch.zeros(len(self._slices), dtype=torch.int64, device=grid.device)  # of rows, largest
        # Of each slice sent by row in this step: this replica's rows, the largest count, and the dtype that is sent.
        self._sparse: dict[ParameterSlice, tuple[Tensor, int, torch.dtype]] = {}

    def _prepare(self, buckets: Sequence[GradientBucket], own: Sequence[Tensor], compresses: bool) -> None:
        """Choose the embeddings whose rows take fewer bytes than the plain sum."""
        if self.axis.size == 1:
            return
        filled = [(place.of(own).view(place.matrix) != 0).any(1) for place in self._slices]
        rows: list[Tensor] = []
        most: list[int] = []
        if filled:
            counts = torch.stack([each.sum() for each in filled])
            self._counts = counts.clone()
            self.axis.all_reduce(self._counts, op="max")
            here, most = torch.stack([counts, self._counts]).tolist()  # the host waits for the device once
            rows = [torch.nonzero_static(each, size=n).view(-1) for each, n in zip(filled, here, strict=True)]
        found = dict(zip(self._slices, zip(rows, most, strict=True), strict=True))
        self._sparse = {
            place: (*found[place], buckets[place.bucket].communication_dtype)
            for number in dict.fromkeys(place.bucket for place in self._slices)
            for place in self._fewer(
                buckets[number], {p: count for p, (_, count) in found.items() if p.bucket == number}
            )
        }
        self._rest = UncompressedSum(self.axis, buckets, self._sparse)

    def _fewer(self, bucket: GradientBucket, counts: dict[ParameterSlice, int]) -> list[ParameterSlice]:
        """Return the embeddings of a bucket whose rows take fewer bytes than the plain sum.

        If some are sent by rows in stage 1, the rest of the bucket is all-reduced, not reduce-scattered. That takes
        twice the bytes, which the rows must save too.

        Args:
            bucket: the bucket.
            counts: for each embedding in it, the largest number of nonzero rows on any replica.
        """
        dtype = bucket.communication_dtype
        # Bytes that an element of the bucket takes in a reduce-scatter, by N - 1; an all-reduce takes twice as many.
        whole = dtype.itemsize / self.axis.size
        sent = {p: message_bytes(count, count * p.matrix[1], dtype) for p, count in counts.items()}
        chosen = [p for p in sent if sent[p] < 2 * whole * (p.stop - p.start)]
        others = bucket.flat.numel - count_elements(chosen)
        scattered = bucket.owned != (0, bucket.flat.numel)
        fewer = not scattered or sum(sent[p] for p in chosen) + 2 * whole * others < whole * bucket.flat.numel
        return chosen if fewer else []

    def _compress(self, own: Sequence[Tensor]) -> None:
        self._sent += 2 * self._counts.numel() * self._counts.itemsize * (self.axis.size - 1) / self.axis.size
        for place, (rows, count, dtype) in self._sparse.items():
            if not count:
                continue
            gradient = place.of(own).view(place.matrix)
            # A replica with fewer rows fills its message with zeros for row 0.
            numbers = torch.zeros(count, dtype=torch.int32, device=gradient.device)
            numbers[: rows.numel()] = rows
            values = torch.zeros(count, place.matrix[1], dtype=dtype, device=gradient.device)
            values[: rows.numel()] = gradient[rows]
            gradient.zero_()
            for where, received in self._gather(numbers, values.view(-1)):
                gradient.index_add_(0, where, received.view(values.shape).to(gradient.dtype))

    def state(self) -> dict[str, Sequence[Tensor]]:
        """Return an empty dict, because row-sparse sums keep no state between steps."""
        return {}


def _embeddings(module: nn.Module, grid: Grid) -> list[Tensor]:
    """Return the weights of embeddings that no other layer uses. Collective over the grid."""
    users: dict[Tensor, list[nn.Module]] = defaultdict(list)
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            users[parameter].append(part)
    found: dict[str, Tensor] = {}
    problems: list[str] = []
    for name, parameter in module.named_parameters():
        using, layout = users[parameter], layout_of(parameter)
        if not any(isinstance(part, _EMBEDDINGS) for part in using):
            continue
        title = layout.name or name
        if layout.tie is not None or not all(isinstance(part, _EMBEDDINGS) for part in using):
            problems.append(f"{title} is tied to another layer, so that no row of its gradient is zero")
        else:
            found[title] = parameter
    told = grid.world.all_gather_json((len(found), problems))
    if not any(count for count, _ in told):
        why = next((text for _, texts in told for text in texts), "it has no nn.Embedding")
        raise refusal(
            f"<compression> sparse_rows has no effect: the model has no embedding with a sparse gradient ({why}). "
            "Leave it out",
        )
    return list(found.values())
