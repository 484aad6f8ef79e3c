"""Plain sum over the replicas of the gradients that a compressor leaves uncompressed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...grid.comm.axis import Axis
from ...grid.comm.pending import All, Pending
from ...zero.managed import ManagedParameter
from ...zero.protocols import GradientBucket


class ParameterSlice(NamedTuple):
    """A parameter in its bucket: elements ``start`` to ``stop`` of bucket number ``bucket``."""

    bucket: int
    member: ManagedParameter
    start: int
    stop: int

    def of(self, flats: Sequence[Tensor]) -> Tensor:
        """Return a view of the parameter's elements, (numel,), in flat tensors, one for each bucket."""
        return flats[self.bucket][self.start : self.stop]

    @property
    def matrix(self) -> tuple[int, int]:
        """Shape on this rank after all dims but the first are joined."""
        rows = self.member.parameter.shape[0]
        return rows, (self.stop - self.start) // rows if rows else 0


def parameter_slices(buckets: Sequence[GradientBucket]) -> list[ParameterSlice]:
    """Return the parameters of all buckets."""
    return [
        ParameterSlice(number, member, slot.start, slot.stop)
        for number, bucket in enumerate(buckets)
        for slot, member in zip(bucket.flat.slots, bucket.members, strict=True)
    ]


def count_elements(slices: Iterable[ParameterSlice]) -> int:
    """Return the number of elements of all slices."""
    return sum(place.stop - place.start for place in slices)


def concatenate(slices: Sequence[ParameterSlice], flats: Sequence[Tensor]) -> Tensor:
    """Copy slices into one tensor, (elements,)."""
    return torch.cat([place.of(flats) for place in slices])


def copy_back(values: Tensor, slices: Sequence[ParameterSlice], flats: Sequence[Tensor]) -> None:
    """Write concatenated slices back to the flat tensors."""
    for place, value in zip(slices, values.split([p.stop - p.start for p in slices]), strict=True):
        place.of(flats).copy_(value)


class MessageKind(NamedTuple):
    """Property of gradients that share a message: dtype, dtype of the sum, and tie (a tie's gradients travel alone).

    The order in which a ring adds an element up, and with it the last bit, depends on the element's position in the
    message. A tie's weights must stay equal on all its stages, whatever else these stages send.
    """

    dtype: torch.dtype
    sum_dtype: torch.dtype
    tie: int | None

    @classmethod
    def of(cls, buckets: Sequence[GradientBucket], number: int) -> MessageKind:
        """Return the kind of the bucket of this number."""
        bucket = buckets[number]
        return cls(bucket.owned_gradient.dtype, bucket.communication_dtype, None if bucket.tie is None else number)


class UncompressedSum:
    """Plain sum over the replicas of all slices that are not compressed.

    A bucket without compressed slices is summed as without a compressor: in stage 1 only the owned range. The
    uncompressed slices of the other buckets are concatenated, one message for each ``MessageKind``, and all-reduced.

    Args:
        axis: the data axis.
        buckets: the trained ones.
        compressed: slices to leave out.
    """

    def __init__(self, axis: Axis, buckets: Sequence[GradientBucket], compressed: Collection[ParameterSlice]) -> None:
        self._axis = axis
        mixed, excluded = {place.bucket for place in compressed}, set(compressed)
        self._buckets = [bucket for number, bucket in enumerate(buckets) if number not in mixed]
        self._slices: dict[MessageKind, list[ParameterSlice]] = {}
        for place in parameter_slices(buckets):
            if place.bucket in mixed and place not in excluded:
                self._slices.setdefault(MessageKind.of(buckets, place.bucket), []).append(place)
        self._running: list[Pending] = []
        self._messages: list[tuple[list[ParameterSlice], Tensor]] = []

    def start(self, gradients: Sequence[Tensor]) -> None:
        """Start the sums."""
        if self._axis.size == 1:
            return
        self._running = [bucket.sum() for bucket in self._buckets]
        for kind, slices in self._slices.items():
            message = concatenate(slices, gradients).to(kind.sum_dtype)
            self._messages.append((slices, message))
            self._running.append(self._axis.all_reduce(message, async_op=True))

    def finish(self, gradients: Sequence[Tensor]) -> None:
        """Wait for the sums and write them to the gradients."""
        All(self._running).wait()
        for slices, message in self._messages:
            copy_back(message, slices, gradients)
        self._running, self._messages = [], []

    def formula(self) -> float:
        """Return the bytes that this rank sends for it (Rajbhandari et al. 2020, section 7)."""
        total = 0.0
        for bucket in self._buckets:
            scattered = bucket.owned != (0, bucket.flat.numel)
            total += bucket.flat.numel * bucket.communication_dtype.itemsize * (1 if scattered else 2)
        for kind, slices in self._slices.items():
            total += 2 * count_elements(slices) * kind.sum_dtype.itemsize
        return total * (self._axis.size - 1) / self._axis.size
