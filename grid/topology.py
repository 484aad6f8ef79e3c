"""Topology of a grid: conversion between ranks and coordinates, and the ranks of each process group.

A topology is a value that needs neither torch nor processes, so that a grid can be examined without a cluster.
"""

from __future__ import annotations

import math
from collections import namedtuple
from itertools import product
from typing import Any

DEFAULT_AXES = ("pipe", "data", "tensor")


class Topology:
    """Grid of ranks with named axes, the outermost first.

    ``Topology(pipe=2, data=2, tensor=2)`` numbers its ranks as a row-major array of shape (2, 2, 2), so the
    ranks of a tensor group are consecutive: the axis that communicates most stays inside a host.

    Args:
        axes: size of each axis (an int of at least 1), in the order of the keywords. Of ``pipe``, ``data`` and
            ``tensor``, those left out have size 1 (unless axes with other names are given: then the topology
            has just the axes named).

    Raises:
        ValueError: a size below 1.
    """

    def __init__(self, **axes: int) -> None:
        if set(axes) <= set(DEFAULT_AXES):
            axes |= {name: 1 for name in DEFAULT_AXES if name not in axes}
        for name, size in axes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"the {name} axis has the size {size!r}: give a whole number of at least 1")
        self.axes: dict[str, int] = dict(axes)
        make: Any = namedtuple  # its fields are the caller's, so no type checker can know them
        self._coordinate = make("Coordinate", list(axes))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes, outermost first."""
        return tuple(self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes, outermost first."""
        return tuple(self.axes.values())

    @property
    def world_size(self) -> int:
        """The number of ranks: the product of the sizes."""
        return math.prod(self.shape)

    def size(self, axis: str) -> int:
        """Return the size of one axis."""
        self._check(axis)
        return self.axes[axis]

    def coordinate(self, rank: int) -> Any:
        """Return the coordinate of a rank: a named tuple with one field for each axis.

        >>> Topology(pipe=2, data=2, tensor=2).coordinate(5)
        Coordinate(pipe=1, data=0, tensor=1)
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not one of {self.world_size} ranks: give 0 to {self.world_size - 1}")
        place = []
        for size in reversed(self.shape):
            rank, at = divmod(rank, size)
            place.append(at)
        return self._coordinate(*reversed(place))

    def rank(self, **coordinate: int) -> int:
        """Return the rank at a coordinate; axes of size 1 may be left out.

        >>> Topology(pipe=2, data=2, tensor=2).rank(pipe=1, data=0, tensor=1)
        5
        """
        ranks = self.ranks(**coordinate)
        if len(ranks) != 1:
            missing = [name for name, size in self.axes.items() if size > 1 and name not in coordinate]
            raise ValueError(f"{self} has {len(ranks)} ranks with {coordinate}: name {', '.join(missing)} too")
        return ranks[0]

    def ranks(self, **fixed: int) -> list[int]:
        """Return all ranks with the given coordinates, in order: a slice of the grid.

        >>> Topology(pipe=2, data=2, tensor=2).ranks(pipe=0)
        [0, 1, 2, 3]
        """
        for axis, at in fixed.items():
            self._check(axis)
            if not 0 <= at < (size := self.axes[axis]):
                raise ValueError(f"{axis}={at} does not lie on the {axis} axis of size {size}: give 0 to {size - 1}")
        spans = [(fixed[name],) if name in fixed else range(size) for name, size in self.axes.items()]
        strides = [math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))]
        return [sum(at * stride for at, stride in zip(place, strides, strict=True)) for place in product(*spans)]

    def groups(self, *axes: str) -> list[list[int]]:
        """Return the ranks of each process group of an axis, or of several axes joined, in a fixed order.

        Every rank is in exactly one group. ``groups("pipe", "tensor")`` has the ranks that together hold one replica of
        the model.

        >>> Topology(pipe=2, tensor=2).groups("pipe")
        [[0, 2], [1, 3]]
        """
        for axis in axes:
            self._check(axis)
        others = [range(size) for name, size in self.axes.items() if name not in axes]
        names = [name for name in self.axes if name not in axes]
        return [self.ranks(**dict(zip(names, place, strict=True))) for place in product(*others)]

    def _check(self, axis: str) -> None:
        if axis not in self.axes:
            raise ValueError(f"{self} has no axis {axis!r}: give one of {', '.join(self.axes)}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Topology) and list(self.axes.items()) == list(other.axes.items())

    def __hash__(self) -> int:
        return hash(tuple(self.axes.items()))

    def __repr__(self) -> str:
        return f"Topology({', '.join(f'{name}={size}' for name, size in self.axes.items())})"
