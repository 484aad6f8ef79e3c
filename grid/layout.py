"""Layout: where every element of a parameter lives, as one frozen record.

Five readers and no other tags on parameters: the slice taken at initialisation, the group its gradient is
reduced over, who counts it in the norm, its ZeRO range, and its box in a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

# Not plain `layout`: every tensor has that attribute already (torch.strided), and it cannot be written.
_ATTRIBUTE = "triax_layout"


class Box(NamedTuple):
    """An n-d slice of a whole tensor, and where it lies in this rank's part: both as one slice a dim."""

    whole: tuple[slice, ...]
    local: tuple[slice, ...]


def split(length: int, parts: int, index: int, unit: int = 1) -> tuple[int, int]:
    """The half-open range that part ``index`` of ``parts`` owns: whole units, of which parts differ by one at most.

    ``length`` is a multiple of ``unit``.

    >>> [split(10, 4, i) for i in range(4)]
    [(0, 2), (2, 5), (5, 7), (7, 10)]
    >>> [split(48, 4, i, unit=8) for i in range(4)]
    [(0, 8), (8, 24), (24, 32), (32, 48)]
    """
    units = length // unit
    return units * index // parts * unit, units * (index + 1) // parts * unit


@dataclass(frozen=True)
class Layout:
    """Where a parameter's elements live.

    Attributes:
        shape: the whole shape, on a grid of one rank.
        name: the whole-model name, e.g. ``layers.7.attention.qkv.weight``, whatever stage holds it; empty until
            a ``PipelineModule`` places the layer.
        shard_dim: the dim that the tensor axis shards; None: every tensor rank holds the whole parameter.
        parts: lengths of the fused parts along ``shard_dim`` (q, k and v, say), each sharded on its own; None
            is one part. A length need not be a multiple of the tensor axis's size: see ``split``.
        unit: what is never cut along ``shard_dim``: a head's rows, say. It divides each part (or the dim), and whole
            units are shared out, unevenly where their number is not a multiple of the tensor axis's size.
        partial: the parameter is replicated over the tensor axis, but each rank's gradient is a partial sum
            (norms on sequence shards): the gradients are summed over the tensor axis.
        tie: the key of the tie it belongs to, or None.
    """

    shape: tuple[int, ...]
    name: str = ""
    shard_dim: int | None = None
    parts: tuple[int, ...] | None = None
    partial: bool = False
    tie: str | None = None
    unit: int = 1

    def __post_init__(self) -> None:
        if self.shard_dim is None:
            if self.parts is not None or self.unit != 1:
                what = f"a unit of {self.unit} without the dim it lies on"
                if self.parts is not None:
                    what = f"parts {self.parts} without the dim they lie on"
                raise ValueError(f"{what}: give shard_dim too")
        elif not 0 <= self.shard_dim < len(self.shape):
            raise ValueError(f"shard_dim {self.shard_dim} is not a dim of {self.shape}")
        elif self.parts is not None and sum(self.parts) != self.shape[self.shard_dim]:
            raise ValueError(
                f"parts {self.parts} add up to {sum(self.parts)}, but dim {self.shard_dim} of {self.shape} "
                f"is {self.shape[self.shard_dim]} long"
            )
        elif self.unit < 1 or any(length % self.unit for length in self._parts):
            raise ValueError(
                f"a unit of {self.unit} does not divide {' and '.join(map(str, self._parts))} (dim {self.shard_dim} of "
                f"{self.shape}): give unit a divisor, the rows of one head, say"
            )
        if self.partial and self.shard_dim is not None:
            raise ValueError("a sharded parameter's gradient is whole on its rank: partial is for replicated ones")

    @property
    def sharded(self) -> bool:
        """Whether the tensor axis shards it."""
        return self.shard_dim is not None

    def boxes(self, rank: int, size: int) -> list[Box]:
        """The boxes of the whole tensor that tensor rank ``rank`` of ``size`` holds, one a fused part."""
        everything = tuple(slice(0, length) for length in self.shape)
        if self.shard_dim is None:
            return [Box(everything, everything)]
        boxes = []
        part_start = local_start = 0
        for length in self._parts:
            start, stop = split(length, size, rank, self.unit)
            span = slice(part_start + start, part_start + stop)
            local = slice(local_start, local_start + stop - start)
            boxes.append(Box(_at(everything, self.shard_dim, span), _at(everything, self.shard_dim, local)))
            part_start += length
            local_start += stop - start
        return boxes

    def local_shape(self, rank: int, size: int) -> tuple[int, ...]:
        """The shape that tensor rank ``rank`` of ``size`` holds."""
        if self.shard_dim is None:
            return self.shape
        length = sum(self.lengths(rank, size))
        return (*self.shape[: self.shard_dim], length, *self.shape[self.shard_dim + 1 :])

    def lengths(self, rank: int, size: int) -> list[int]:
        """How long each fused part is on tensor rank ``rank`` of ``size``."""
        return [stop - start for start, stop in (split(n, size, rank, self.unit) for n in self._parts)]

    def shard(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """This rank's part of a whole tensor: a view where one box holds it, else a copy."""
        if tuple(whole.shape) != self.shape:
            raise ValueError(f"{self.name or 'this parameter'} has shape {self.shape}, not {tuple(whole.shape)}")
        if self.shard_dim is None:
            return whole
        pieces = [whole[box.whole] for box in self.boxes(rank, size)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=self.shard_dim)

    def assemble(self, shards: list[Tensor]) -> Tensor:
        """The whole tensor from the parts of all tensor ranks, in rank order: the inverse of ``shard``."""
        if self.shard_dim is None:
            return shards[0]
        whole = shards[0].new_empty(self.shape)
        for rank, shard in enumerate(shards):
            for box in self.boxes(rank, len(shards)):
                whole[box.whole] = shard[box.local]
        return whole

    @property
    def _parts(self) -> tuple[int, ...]:
        assert self.shard_dim is not None
        return self.parts or (self.shape[self.shard_dim],)


def layout_of(parameter: Tensor) -> Layout:
    """The layout of a parameter; one that no parallel layer marked is whole on every rank."""
    layout = getattr(parameter, _ATTRIBUTE, None)
    return layout if isinstance(layout, Layout) else Layout(tuple(parameter.shape))


def set_layout(parameter: nn.Parameter, layout: Layout) -> None:
    """Attach a layout: the one attribute that triax puts on a parameter."""
    setattr(parameter, _ATTRIBUTE, layout)


def rename(parameter: nn.Parameter, name: str, tie: str | None) -> None:
    """Give a placed parameter its whole-model name and its tie."""
    set_layout(parameter, replace(layout_of(parameter), name=name, tie=tie))


def _at(slices: tuple[slice, ...], dim: int, span: slice) -> tuple[slice, ...]:
    return (*slices[:dim], span, *slices[dim + 1 :])
