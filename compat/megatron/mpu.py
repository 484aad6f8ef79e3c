"""Grid of Megatron's ``mpu``, the object (or module) that answers for the process groups of a script."""

from __future__ import annotations

from itertools import permutations
from math import prod
from typing import Any

import torch.distributed as dist

from ...base.errors import ConfigError
from ...grid.grid import Grid
from ...grid.topology import Topology

# For each axis, the names under which Megatron and DeepSpeed ask an mpu for it, the newest first.
_AXES = {
    "pipe": ("pipeline_model_parallel", "pipe_parallel"),
    "data": ("data_parallel",),
    "context": ("context_parallel", "sequence_parallel"),
    "tensor": ("tensor_model_parallel", "slice_parallel", "model_parallel"),
}


def grid_of_mpu(mpu: Any) -> Grid:
    """Make the grid that an ``mpu`` describes: the same sizes, and the same ranks in each group. Collective.

    Args:
        mpu: object with Megatron's methods, ``get_model_parallel_world_size()``, ``get_data_parallel_group()``, ...

    Raises:
        ConfigError: the sizes do not fit the number of processes, or no order of the axes has these groups.
    """
    sizes = {axis: _ask(mpu, names, "world_size") or 1 for axis, names in _AXES.items()}
    groups = {axis: _ranks(_ask(mpu, names, "group")) for axis, names in _AXES.items()}
    world, product = dist.get_world_size() if dist.is_initialized() else 1, prod(sizes.values())
    said = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    if product != world:
        raise ConfigError(
            f"mpu describes {said} = {product} ranks, but there are {world} processes: give an mpu for all of them"
        )
    rank = dist.get_rank() if world > 1 else 0
    named = [axis for axis in _AXES if axis != "context" or sizes["context"] > 1]
    for order in permutations(named):
        topology = Topology(**{axis: sizes[axis] for axis in order})
        ranks_of = {axis: next(sorted(group) for group in topology.groups(axis) if rank in group) for axis in named}
        if all(groups[axis] in (None, ranks_of[axis]) for axis in named):
            context = sizes["context"]
            return Grid(sizes["pipe"], sizes["data"], sizes["tensor"], context=context, order=order)
    known = ", ".join(f"{axis} {ranks}" for axis, ranks in groups.items() if ranks is not None)
    raise ConfigError(
        f"mpu describes {said} with the groups {known} of rank {rank}, which no order of the axes gives: leave mpu "
        "out, and pass grid=triax.Grid(...)"
    )


def _ask(mpu: Any, names: tuple[str, ...], what: str) -> Any:
    """Return the result of the first of the mpu's methods ``get_NAME_WHAT`` that it has; None if it has none."""
    method = next((getter for name in names if (getter := getattr(mpu, f"get_{name}_{what}", None)) is not None), None)
    return None if method is None else method()


def _ranks(group: Any) -> list[int] | None:
    if group is None or not dist.is_initialized():
        return None
    return sorted(dist.get_process_group_ranks(group))
