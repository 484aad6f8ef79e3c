"""DeepSpeed's class ``PipelineParallelGrid``: a grid that also answers Megatron's questions."""

from __future__ import annotations

import operator
from functools import partial
from math import prod
from typing import Any

from ...grid import Grid

# Attributes, each with a method get_NAME too: name -> its place in the grid.
_ATTRIBUTES = {
    "stage_id": "pipe.rank",
    "is_first_stage": "pipe.is_first",
    "is_last_stage": "pipe.is_last",
    "data_parallel_id": "data.rank",
    "data_parallel_size": "data.size",
    "pipe_parallel_size": "pipe.size",
    "model_parallel_size": "tensor.size",
    "slice_parallel_size": "tensor.size",
    "global_rank": "rank",
    "world_size": "size",
}
# Axes, for which there are get_NAME_rank, get_NAME_world_size, get_NAME_group and get_NAME_group_ranks.
_AXES = {
    "pipe_parallel": ("pipe",),
    "pipeline_model_parallel": ("pipe",),
    "data_parallel": ("data",),
    "slice_parallel": ("tensor",),
    "tensor_model_parallel": ("tensor",),
    "model_parallel": ("pipe", "tensor"),
    "sequence_parallel": ("context",),
    "sequence_data_parallel": ("data_context",),
    "expert_parallel": ("expert",),
    "expert_data_parallel": ("expert_data",),
}
# Other names of them: name -> axis, and what of it.
_GROUPS = {
    "pp_group": ("pipe_parallel", "group_ranks"),
    "pp_proc_group": ("pipe_parallel", "group"),
    "dp_group": ("data_parallel", "group_ranks"),
    "dp_proc_group": ("data_parallel", "group"),
    "slice_group": ("slice_parallel", "group_ranks"),
    "slice_proc_group": ("slice_parallel", "group"),
}


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
            theirs, what = _GROUPS[name]
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
