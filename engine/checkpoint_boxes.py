"""From a flat range of one rank's part of a tensor to boxes of the whole tensor, and what two boxes have in common."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from ..grid import Layout
from ..zero.flat import boxes
from ..zero.held import Range

Spans = tuple[tuple[int, int], ...]  # (start, stop) for each dim


class Piece(NamedTuple):
    """A box of a whole tensor, and the elements that are here."""

    box: Spans
    value: Tensor  # of the box's shape: a view


def pieces(part: Range, rank: int, size: int) -> Iterator[Piece]:
    """The boxes of the whole tensor that a range on tensor rank ``rank`` of ``size`` is made of."""
    layout: Layout = part.layout
    held = layout.boxes(rank, size)
    at = 0
    for here in boxes(layout.local_shape(rank, size), part.start, part.stop):
        spans = tuple((each.start, each.stop) for each in here)
        shape = shape_of(spans)
        value = part.value[at : at + math.prod(shape)].view(shape)
        at += math.prod(shape)
        for box in held:
            common = overlap(spans, tuple((each.start, each.stop) for each in box.local))
            if common is not None:
                shifts = [whole.start - local.start for whole, local in zip(box.whole, box.local, strict=True)]
                whole = tuple((low + shift, high + shift) for (low, high), shift in zip(common, shifts, strict=True))
                yield Piece(whole, value[within(common, spans)])


def overlap(a: Spans, b: Spans) -> Spans | None:
    """What two boxes of one tensor have in common, if anything."""
    common = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return common if all(low < high for low, high in common) else None


def within(box: Spans, around: Spans) -> tuple[slice, ...]:
    """A box as slices of one around it."""
    return tuple(slice(low - start, high - start) for (low, high), (start, _) in zip(box, around, strict=True))


def shape_of(box: Spans) -> tuple[int, ...]:
    """The lengths of a box."""
    return tuple(high - low for low, high in box)


def everything(shape: Sequence[int]) -> Spans:
    """The box that is all of a tensor."""
    return tuple((0, length) for length in shape)
