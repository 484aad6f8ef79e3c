"""Arithmetic of ranges and boxes: parts of a dim, flat ranges of a tensor, and n-d boxes of a tensor. No torch.

A range is half-open, ``(start, stop)``. A box is one range for each dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

Spans = tuple[tuple[int, int], ...]  # a box: (start, stop) for each dim


def split(length: int, parts: int, index: int, unit: int = 1) -> tuple[int, int]:
    """Return the range of part ``index``, if a dim is split into ``parts`` parts of whole units, as evenly as possible.

    The numbers of units of two parts differ by one at most. ``length`` must be a multiple of ``unit``.

    >>> [triax.grid.split(10, 4, i) for i in range(4)]
    [(0, 2), (2, 5), (5, 7), (7, 10)]
    >>> [triax.grid.split(48, 4, i, unit=8) for i in range(4)]
    [(0, 8), (8, 24), (24, 32), (32, 48)]
    """
    units = length // unit
    return units * index // parts * unit, units * (index + 1) // parts * unit


def shard_shape(
    shape: Sequence[int],
    rank: int,
    size: int,
    dim: int | None,
    parts: Sequence[int] | None = None,
    unit: int = 1,
    expert: tuple[int, int] = (0, 1),
    expert_dim: int | None = None,
) -> tuple[int, ...]:
    """Return the shape of one rank's shard of a tensor that the tensor axis and the expert axis shard.

    >>> shard_shape((48, 7), 1, 4, 0, parts=(16, 16, 16), unit=4)
    (12, 7)

    Args:
        shape: the unsharded shape.
        rank, size: rank on, and size of, the tensor axis.
        dim: the dim that the tensor axis shards, or None.
        parts: lengths of fused parts along ``dim``, each sharded on its own; None: one part.
        unit: rows along ``dim`` that stay together.
        expert: rank on, and size of, the expert axis.
        expert_dim: the dim that the expert axis shards, or None.
    """
    local = list(shape)
    if expert_dim is not None:
        start, stop = split(shape[expert_dim], expert[1], expert[0])
        local[expert_dim] = stop - start
    if dim is not None:
        spans = (split(length, size, rank, unit) for length in parts or (shape[dim],))
        local[dim] = sum(stop - start for start, stop in spans)
    return tuple(local)


def check_units(what: str, length: int, unit: int, tensor: int) -> None:
    """Check that the tensor axis can shard a length in whole units, with at least one unit for each rank.

    Raises:
        ValueError: ``unit`` does not divide ``length``, or there are fewer units than ranks. ``what`` names the length.
    """
    if unit < 1 or length % unit:
        raise ValueError(f"{what} is {length}, not a multiple of unit={unit}. Give a unit that divides {length}.")
    if (units := length // unit) < tensor:
        held = f"{length}" if unit == 1 else f"{length}, which is {units} units of {unit}"
        raise ValueError(f"{what} is {held}, but tensor={tensor} needs at least {tensor}. Give tensor={units} at most.")


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[slice, ...]]:
    """Cut elements ``start`` to ``stop`` of a flattened (row-major) tensor into boxes of the tensor, in order.

    A tensor of n dims needs at most 2n - 1 boxes.

    >>> [*boxes_of_range((4, 3), 2, 9)]
    [(slice(0, 1, None), slice(2, 3, None)), (slice(1, 3, None), slice(0, 3, None))]
    """
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    inner = math.prod(shape[1:])
    (first, begin), (last, end) = divmod(start, inner), divmod(stop, inner)
    if first == last:
        yield from ((slice(first, first + 1), *rest) for rest in boxes_of_range(shape[1:], begin, end))
        return
    if begin:
        yield from ((slice(first, first + 1), *rest) for rest in boxes_of_range(shape[1:], begin, inner))
        first += 1
    if first < last:
        yield (slice(first, last), *(slice(0, length) for length in shape[1:]))
    yield from ((slice(last, last + 1), *rest) for rest in boxes_of_range(shape[1:], 0, end))


def overlap(a: Spans, b: Spans) -> Spans | None:
    """Return the intersection of two boxes of one tensor; None if it is empty."""
    common = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return common if all(low < high for low, high in common) else None


def within(box: Spans, around: Spans) -> tuple[slice, ...]:
    """Return the slices that select a box in a tensor that holds only the larger box ``around``."""
    return tuple(slice(low - start, high - start) for (low, high), (start, _) in zip(box, around, strict=True))


def shape_of(box: Spans) -> tuple[int, ...]:
    """Return the lengths of a box."""
    return tuple(high - low for low, high in box)


def everything(shape: Sequence[int]) -> Spans:
    """Return the box that is the whole tensor."""
    return tuple((0, length) for length in shape)
