"""Ranges of parameters that flat tensors of this rank hold, and the ranks that write them to a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..base.seeds import derive
from ..grid import Grid
from ..grid.layout import FlatRange, Layout
from .bucket import Bucket

DtypeOf = Callable[[str, str], torch.dtype | None]  # dtype of a parameter's saved state: (name, key) -> dtype, or None
KeyedRanges = Iterator[tuple[str, FlatRange]]


class NamedParameter(NamedTuple):
    """A parameter of this rank, by its whole-model name."""

    parameter: nn.Parameter
    layout: Layout  # with its whole-model name
    counted: bool  # True if this pipe rank, of all that hold it, writes it


class ShardRanges:
    """Cuts flat tensors of this rank into ranges of parameters.

    Args:
        parameters: all parameters of this rank.
        grid: the grid of this rank.

    Attributes:
        grid: as given.
        of_parameter, of_name: the parameters by tensor and by whole-model name.
    """

    def __init__(self, parameters: Sequence[NamedParameter], grid: Grid) -> None:
        self.grid = grid
        self.of_parameter: dict[Tensor, NamedParameter] = {named.parameter: named for named in parameters}
        self.of_name = {named.layout.name: named for named in parameters}

    def writes(self, named: NamedParameter) -> bool:
        """Return True if this rank writes a parameter to a checkpoint, of all ranks with equal values in this replica.

        A sharded parameter is written by every rank of the tensor axis, a replicated one by one of them.
        """
        tensor = self.grid.tensor
        turn = named.layout.sharded or derive(named.layout.name) % tensor.size == tensor.rank
        return named.counted and turn

    def of_bucket(self, bucket: Bucket, flat: Tensor, first: int, mine: bool) -> Iterator[FlatRange]:
        """Cut a flat tensor that begins with element ``first`` of a bucket.

        Args:
            bucket: the bucket whose layout gives the position of each parameter.
            flat: (n,), the values of elements ``first`` to ``first + n`` of the bucket.
            first: index in the bucket of the first element of ``flat``.
            mine: yield only the ranges that this rank writes; if False, yield all ranges.
        """
        start, stop = first, first + flat.numel()
        if mine:
            # In local SGD the bucket's own axis has one replica, and the first one of the grid writes.
            axis = self.grid.axis(bucket.replicas) if bucket.copies is None else bucket.shard_axis
            if bucket.copies is not None and not bucket.copies.is_first:
                return  # the first group writes
            start, stop = bucket.flat.owned(axis.rank)
        for slot, member in zip(bucket.flat.slots, bucket.members, strict=True):
            low, high = max(slot.start, start), min(slot.stop, stop)
            if (low < high or slot.start == slot.stop) and not (
                mine and not self.writes(self.of_parameter[member.parameter])
            ):
                view = flat[max(low - first, 0) : max(high - first, 0)]
                yield FlatRange(member.layout.name, member.layout, low - slot.start, high - slot.start, view)

    def of_replicated(self, named: NamedParameter, flat: Tensor) -> Iterator[FlatRange]:
        """Cut a parameter that every replica holds in full by rows; yield the part that this replica writes.

        Args:
            named: the parameter.
            flat: (numel,), its flattened values.
        """
        if self.writes(named):
            axis, shape = self.grid.axis(named.layout.replicas), named.parameter.shape
            rows = shape[0] if shape else 1
            row = flat.numel() // max(rows, 1)
            start, stop = (rows * at // axis.size * row for at in (axis.rank, axis.rank + 1))
            yield FlatRange(named.layout.name, named.layout, start, stop, flat[start:stop])

    def whole(self, named: NamedParameter, flat: Tensor) -> FlatRange:
        """Return the range that covers a whole parameter, with its values as a 1-dim tensor, ``flat``."""
        return FlatRange(named.layout.name, named.layout, 0, flat.numel(), flat)
