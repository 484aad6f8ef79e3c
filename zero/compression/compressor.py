"""Base of the gradient compressors: step counter, residuals, messages, and the plain sum of what is not compressed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...base.nest import map_tensors
from ...grid.grid import Grid
from ..managed import ManagedParameter
from ..protocols import Exchange, GradientBucket
from .uncompressed_sum import ParameterSlice, UncompressedSum


class ReplicatedTensor(NamedTuple):
    """A tensor of a compressor that is equal on every replica; ``key`` tells a parameter's tensors apart."""

    key: str
    member: ManagedParameter
    value: Tensor


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


def exchange_state_dict(exchange: Exchange) -> dict[str, Any]:
    """Return a copy of this replica's state of an exchange, for ``torch.save``."""
    copied: dict[str, Any] = map_tensors(Tensor.clone, _state(exchange))
    return copied


def load_exchange_state_dict(exchange: Exchange, saved: Mapping[str, Any] | None) -> None:
    """Load what ``exchange_state_dict`` returned.

    Raises:
        ValueError: the state is of another exchange, or of other buckets.
    """
    state = _state(exchange)
    if saved is None or _shapes(saved) != _shapes(state):
        problem = "has no state of a gradient compressor" if saved is None else "is of other compressed tensors"
        raise ValueError(
            f"the saved state {problem}. Make the optimizer with the compression and the parameters with which the "
            "state was saved"
        )
    for key, flats in state["state"].items():
        for tensor, value in zip(flats, saved["state"][key], strict=True):
            tensor.copy_(value)
    if isinstance(exchange, Compressor):
        exchange.steps = saved["steps"]
        for (*_, tensor), (*_, value) in zip(state["kept"], saved["kept"], strict=True):
            tensor.copy_(value)


def _state(exchange: Exchange) -> dict[str, Any]:
    found: dict[str, Any] = {"state": {key: list(flats) for key, flats in exchange.state().items()}}
    if isinstance(exchange, Compressor):
        found["steps"] = exchange.steps
        found["kept"] = [(kept.key, kept.member.layout.name, kept.value) for kept in exchange.replicated()]
    return found


def _shapes(state: Mapping[str, Any]) -> Any:
    return map_tensors(lambda tensor: tensor.shape, {**state, "steps": None})


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
