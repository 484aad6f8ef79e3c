"""DeepSpeed's class ``PipelineParallelGrid``: a grid that also answers Megatron's questions."""

from __future__ import annotations

import operator
from functools import partial
from math import prod
from typing import Any

from ...grid import Grid
from .ledger import TABLES

_ATTRIBUTES, _GROUPS = TABLES["grid_attributes"], TABLES["grid_groups"]
_AXES = {theirs: tuple(axes.split()) for theirs, axes in TABLES["grid_axes"].items()}


class ParallelGrid(Grid):
    """View of a grid, with the methods of DeepSpeed's ``PipelineParallelGrid`` and of Megatron's ``mpu``.

    Args:
        grid: the grid, which shares its state with the view.
    """

    def __init__(self, grid: Grid) -> None:
        # Not by Grid's constructor, which makes process groups.
        self.__dict__ = grid.__dict__

    def __getattr__(self, name: str) -> Any:
        if name in _ATTRIBUTES:
            return operator.attrgetter(_ATTRIBUTES[name])(self)
        if name in _GROUPS:
            theirs, what = _GROUPS[name].split()
            return self._ask(_AXES[theirs], what)
        wanted = name.removeprefix("get_")
        if wanted != name and wanted in _ATTRIBUTES:
            return partial(getattr, self, wanted)
        for theirs, axes in _AXES.items():
            what = wanted.removeprefix(f"{theirs}_")
            if wanted != name and what in ("rank", "world_size", "group", "group_ranks"):
                return partial(self._ask, axes, what)
        raise AttributeError(f"a {type(self).__name__} has no {name!r}")

    def _ask(self, axes: tuple[str, ...], what: str) -> Any:
        """Return the rank, size, group or ranks of axes. Collective where it makes the group of several axes."""
        if what == "world_size":
            return prod(self.axis(name).size for name in axes)
        axis = self.axis(axes[0]) if len(axes) == 1 else self.joint(*axes)
        return {"rank": axis.rank, "group_ranks": list(axis.ranks)}.get(what) if what != "group" else self.group(axis)

    def stage_to_global(self, stage_id: int, **others: int) -> int:
        """Return the rank of a stage in this replica."""
        return self.topology.rank(**{**self.coordinate._asdict(), "pipe": stage_id, **others})
