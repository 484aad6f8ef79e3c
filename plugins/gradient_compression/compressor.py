"""Base of the gradient compressors: step counter, residuals, messages, and the plain sum of what is not compressed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ...grid.grid import Grid
from ...zero.protocols import GradientBucket, ReplicatedTensor
from .uncompressed_sum import ParameterSlice, UncompressedSum


class Compressor:
    """An ``Exchange`` that compresses some parameters' gradients and sums the others.

    A subclass implements ``_compress``, and ``_prepare`` if something comes before the sum of the others.

    Args:
        grid: its data axis holds the replicas.
        buckets: the trained buckets.
        compressed: the parameters whose gradients are compressed; each has a residual.
        start_step: number of first steps in which all gradients are summed without compression.

    Attributes:
        axis: the data axis.
        steps: number of exchanges so far.
    """

    def __init__(
        self,
        grid: Grid,
        buckets: Sequence[GradientBucket],
        compressed: Collection[ParameterSlice],
        start_step: int = 0,
    ) -> None:
        self.axis, self.steps, self._start_step = grid.data_context, 0, start_step
        self._rest = UncompressedSum(grid.data_context, buckets, compressed)
        self._all = UncompressedSum(grid.data_context, buckets, ())
        self._residual = zeros_like_buckets(buckets, compressed)
        self._sent = 0.0

    def gradients(self, buckets: Sequence[GradientBucket]) -> None:
        """Replace each bucket's gradients by their compressed sum over the replicas. Collective."""
        own = [bucket.gradients for bucket in buckets if bucket.gradients is not None]
        assert len(own) == len(buckets)
        compresses = self.steps >= self._start_step
        self.steps += 1
        self._prepare(buckets, own, compresses)
        uncompressed = self._rest if compresses else self._all
        uncompressed.start(own)
        self._sent = uncompressed.formula()
        if compresses:
            self._compress(own)
        uncompressed.finish(own)

    def _prepare(self, buckets: Sequence[GradientBucket], own: Sequence[Tensor], compresses: bool) -> None:
        """Change this replica's own gradients, or choose what to compress, before the plain sum starts."""

    def _compress(self, own: Sequence[Tensor]) -> None:
        """Exchange the compressed gradients while the other gradients are summed, and add the bytes to ``_sent``."""
        raise NotImplementedError

    def state(self) -> Mapping[str, Sequence[Tensor]]:
        """Return the residuals, one flat tensor for each bucket, empty for a bucket without compressed gradients."""
        return {"residual": self._residual}

    def replicated(self) -> Iterator[ReplicatedTensor]:
        """Yield the state tensors that are equal on every replica. Checkpoints save and load them in place."""
        yield from ()

    def formula(self) -> float:
        """Return the bytes that this rank sent over the data axis in the last step, by the method's formula."""
        return self._sent

    def _gather(self, indices: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """All-gather sparse values: yield the indices (int32) and values of each replica, in rank order. Collective."""
        message = pack_message(indices, values)
        gathered = message.new_empty(self.axis.size * message.numel())
        self.axis.all_gather(gathered, message)
        self._sent += 4 * message.numel() * (self.axis.size - 1)
        for received in gathered.view(self.axis.size, -1):
            yield unpack_message(received, indices.numel(), values.numel(), values.dtype)


def zeros_like_buckets(buckets: Sequence[GradientBucket], chosen: Collection[ParameterSlice]) -> list[Tensor]:
    """Return one flat tensor of zeros for each bucket, in fp32 or float64, to hold residuals.

    It is (numel,) for a bucket with a slice in ``chosen``, and empty for the others.
    """
    used = {place.bucket for place in chosen}
    return [
        torch.zeros(
            bucket.flat.numel if number in used else 0,
            dtype=torch.promote_types(bucket.owned_gradient.dtype, torch.float32),
            device=bucket.weights.device,
        )
        for number, bucket in enumerate(buckets)
    ]


def pack_message(indices: Tensor, values: Tensor) -> Tensor:
    """Pack indices (int32) and values (any dtype of at least two bytes) into one flat int32 tensor."""
    if values.numel() * values.element_size() % 4:
        values = torch.cat([values, values.new_zeros(1)])
    parts = [values.view(torch.int32), indices]
    if values.element_size() == 8 and indices.numel() % 2:  # aligns the values of the next message
        parts.append(indices.new_zeros(1))
    return torch.cat(parts)


def unpack_message(message: Tensor, indices: int, values: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the indices and the values of a packed message, given the numbers of them."""
    start = -(-values * dtype.itemsize // 4)
    return message[start : start + indices], message[:start].view(dtype)[:values]


def message_bytes(indices: int, values: int, dtype: torch.dtype) -> int:
    """Return the bytes of a packed message."""
    size = -(-values * dtype.itemsize // 4) + indices
    return 4 * (size + size % 2 if dtype.itemsize == 8 else size)
