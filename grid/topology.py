"""Topology of a grid: conversion between ranks and coordinates, and the ranks of each process group.

A topology is a value that needs neither torch nor processes, so that a grid can be examined without a cluster.
"""

from __future__ import annotations

import math
from collections import namedtuple
from functools import partial
from itertools import product
from typing import Any

# The axes of every grid, and the axis that a grid has if it is asked for.
DEFAULT_AXES = ("pipe", "data", "tensor")
AXES = ("pipe", "data", "context", "tensor")
DERIVED_AXES = ("expert", "data_context", "expert_data")  # see ``Topology.groups``


class Topology:
    """Grid of ranks with named axes, the outermost first.

    ``Topology(pipe=2, data=2, tensor=2)`` numbers its ranks as a row-major array of shape (2, 2, 2), so the
    ranks of a tensor group are consecutive: the axis that communicates most stays inside a host.

    The expert axis is not an axis of this array: it divides data x context. The ranks of data x context, in order,
    are cut into runs of ``expert`` ranks. The ranks of a run hold different experts ("expert"); the ranks at one place
    of all runs hold the same experts ("expert_data").

    Args:
        expert: number of shards of each layer's experts. It divides data x context.
        axes: size of each axis (an int of at least 1), in the order of the keywords. Of ``pipe``, ``data`` and
            ``tensor``, those left out have size 1 (unless axes with other names are given: then the topology
            has just the axes named). ``context`` is an axis only if it is given.

    Raises:
        ValueError: a size below 1, or ``expert`` does not divide data x context.
    """

    def __init__(self, *, expert: int = 1, **axes: int) -> None:
        if set(axes) <= set(AXES):
            axes |= {name: 1 for name in DEFAULT_AXES if name not in axes}
        for name, size in {**axes, "expert": expert}.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"the {name} axis has the size {size!r}: give a whole number of at least 1")
        data, context = axes.get("data", 1), axes.get("context", 1)
        if data * context % expert:
            raise ValueError(
                f"expert={expert} does not divide data x context = {data} x {context}: experts are spread over the "
                f"ranks that take different tokens, so give a divisor of {data * context}"
            )
        self.axes: dict[str, int] = dict(axes)
        self.expert = expert
        make: Any = namedtuple  # its fields are the caller's, so no type checker can know them
        self._coordinate = make("Coordinate", list(axes))

    def __reduce__(self) -> tuple[partial[Topology], tuple[()]]:
        # Pickle does not find the class of the coordinates, which is made here.
        return partial(Topology, expert=self.expert, **self.axes), ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes, outermost first."""
        return tuple(self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes, outermost first."""
        return tuple(self.axes.values())

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis, and of the expert axis if it is larger than 1."""
        return {**self.axes, "expert": self.expert} if self.expert > 1 else self.axes

    @property
    def world_size(self) -> int:
        """The number of ranks: the product of the sizes."""
        return math.prod(self.shape)

    def size(self, axis: str) -> int:
        """Return the size of one axis: 1 for one of ``AXES`` that the topology does not have."""
        if axis == "expert":
            return self.expert
        self._check(axis)
        return self.axes.get(axis, 1)

    def coordinate(self, rank: int) -> Any:
        """Return the coordinate of a rank: a named tuple with one field for each axis.

        >>> triax.Topology(pipe=2, data=2, tensor=2).coordinate(5)
        Coordinate(pipe=1, data=0, tensor=1)
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not one of {self.world_size} ranks: give 0 to {self.world_size - 1}")
        coordinates = []
        for size in reversed(self.shape):
            rank, at = divmod(rank, size)
            coordinates.append(at)
        return self._coordinate(*reversed(coordinates))

    def rank(self, **coordinate: int) -> int:
        """Return the rank at a coordinate; axes of size 1 may be left out.

        >>> triax.Topology(pipe=2, data=2, tensor=2).rank(pipe=1, data=0, tensor=1)
        5
        """
        ranks = self.ranks(**coordinate)
        if len(ranks) != 1:
            missing = [name for name, size in self.axes.items() if size > 1 and name not in coordinate]
            raise ValueError(f"{self} has {len(ranks)} ranks with {coordinate}: name {', '.join(missing)} too")
        return ranks[0]

    def ranks(self, **fixed: int) -> list[int]:
        """Return all ranks with the given coordinates, in order: a slice of the grid.

        >>> triax.Topology(pipe=2, data=2, tensor=2).ranks(pipe=0)
        [0, 1, 2, 3]
        """
        for axis, at in fixed.items():
            self._check(axis)
            if not 0 <= at < (size := self.axes.get(axis, 1)):
                raise ValueError(f"{axis}={at} does not lie on the {axis} axis of size {size}: give 0 to {size - 1}")
        spans = [(fixed[name],) if name in fixed else range(size) for name, size in self.axes.items()]
        strides = [math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))]
        return [sum(at * stride for at, stride in zip(offsets, strides, strict=True)) for offsets in product(*spans)]

    def groups(self, *axes: str) -> list[list[int]]:
        """Return the ranks of each process group of an axis, or of several axes joined, in a fixed order.

        Every rank is in exactly one group. ``groups("pipe", "tensor")`` has the ranks that together hold one replica of
        the model.

        ``groups("data_context")`` joins data and context; ``groups("expert")`` and ``groups("expert_data")`` cut these
        groups as the class says.

        >>> triax.Topology(pipe=2, tensor=2).groups("pipe")
        [[0, 2], [1, 3]]
        >>> triax.Topology(data=4, expert=2).groups("expert")
        [[0, 1], [2, 3]]
        """
        if len(axes) == 1 and axes[0] in DERIVED_AXES:
            size, replicas = self.expert, self.groups("data", "context")
            if axes == ("expert",):
                return [group[at : at + size] for group in replicas for at in range(0, len(group), size)]
            return (
                [group[at::size] for group in replicas for at in range(size)] if axes[0] == "expert_data" else replicas
            )
        for axis in axes:
            self._check(axis)
        others = [range(size) for name, size in self.axes.items() if name not in axes]
        names = [name for name in self.axes if name not in axes]
        return [self.ranks(**dict(zip(names, coordinates, strict=True))) for coordinates in product(*others)]

    def _check(self, axis: str) -> None:
        if axis not in self.axes and not (axis in AXES and set(self.axes) <= set(AXES)):
            raise ValueError(f"{self} has no axis {axis!r}: give one of {', '.join(self.axes)}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Topology) and list(self.sizes.items()) == list(other.sizes.items())

    def __hash__(self) -> int:
        return hash(tuple(self.sizes.items()))

    def __repr__(self) -> str:
        return f"Topology({', '.join(f'{name}={size}' for name, size in self.sizes.items())})"
