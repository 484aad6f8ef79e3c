"""DeepSpeed's topologies: ranks and coordinates of processes, ``PipelineModule(topology=...)``."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Collection, Sequence
from typing import Any

from ...grid.topology import Topology


class ProcessTopology:
    """Grid of ranks with named axes, the outermost first: ``triax.Topology`` with DeepSpeed's methods.

    Args:
        axes: names of the axes.
        dims: their sizes.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes, self.dims = list(axes), list(dims)
        make: Any = namedtuple  # its fields are the caller's
        self.ProcessCoord = make("ProcessCoord", self.axes)
        self._grid = Topology(**dict(zip(self.axes, self.dims, strict=True)))

    @property
    def mapping(self) -> dict[Any, int]:
        """The rank of each coordinate."""
        return {self.get_coord(rank): rank for rank in range(self.world_size())}

    def get_rank(self, **coord_kwargs: int) -> int:
        """Return the rank at a coordinate, which names every axis."""
        if len(coord_kwargs) != len(self.axes):
            raise ValueError(
                f"get_rank got {len(coord_kwargs)} of {len(self.axes)} axes: name every axis, or call filter_match"
            )
        return self._grid.rank(**coord_kwargs)

    def get_axis_names(self) -> list[str]:
        """Return the names of the axes, the outermost first."""
        return self.axes

    def get_rank_repr(
        self, rank: int, omit_axes: Collection[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """Return a text that names a rank's place on the axes that are not omitted: ``model_00``."""
        coordinates = self.get_coord(rank)
        named = [axis for axis in self.axes if axis not in omit_axes]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(coordinates, axis):02d}" for axis in named)

    def get_dim(self, axis: str) -> int:
        """Return the size of an axis; 0 if the topology does not have it."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """Return the coordinate of a rank: a named tuple with a field for each axis."""
        coordinates = self._grid.coordinate(rank)
        return self.ProcessCoord(*(getattr(coordinates, axis) for axis in self.axes))

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the ranks of each group along an axis; [] if the topology does not have it."""
        return self._grid.groups(axis) if axis in self.axes else []

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Return the ranks with these coordinates."""
        return self._grid.ranks(**filter_kwargs)

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks at one place of an axis."""
        return self._grid.ranks(**{axis: idx})

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._grid.world_size

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Stages and replicas: the axes pipe and data."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Stages, replicas and shards of a layer: the axes pipe, data and model (triax's tensor axis)."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])
