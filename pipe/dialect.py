"""The arguments of ``PipelineModule`` that scripts written for DeepSpeed pass."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from ..grid import Grid
from ..grid.topology import DEFAULT_AXES, Topology

# What DeepSpeed's has beside, and what to do here. Those that ask for what is so anyway are taken.
_TAKEN = ("seed_layers", "base_seed")
_OTHERS = {
    "seed_fn": "layers are seeded by seed= and their place in the list: leave it out",
    "activation_checkpoint_func": "recomputation is activation_checkpoint_interval= and the configuration's "
    "activation_checkpointing: leave it out",
    "dynamic_shape": "shapes may change from one microbatch to the next here: leave it out",
}
# DeepSpeed's names of axes.
_AXES = {"pipe": "pipe", "data": "data", "model": "tensor", "tensor": "tensor"}


def grid_of(grid: Grid | None, num_stages: int | None, topology: Any) -> Grid:
    """The grid that was given, or the one that ``num_stages`` or ``topology`` describes.

    Args:
        grid: None: made here.
        num_stages: ranks of the pipe axis; the other ranks are replicas.
        topology: a ``triax.Topology``, or an object with DeepSpeed's ``get_axis_names`` and ``get_dim``.

    Raises:
        TypeError: the grid, or the topology, is something else.
        ValueError: two of them are given and differ, or they do not fit the number of processes.
    """
    if grid is not None and not isinstance(grid, Grid):
        raise TypeError(f"grid is {grid!r}: write num_stages={grid!r}, or pass grid=triax.Grid(pipe={grid!r})")
    if topology is not None:
        sizes = _sizes(topology)
        if grid is None:
            grid = Grid(sizes["pipe"], sizes["data"], sizes["tensor"], order=tuple(sizes))
        elif {axis: getattr(grid, axis).size for axis in sizes} != sizes:
            raise ValueError(f"the grid is {grid.topology}, and topology= asks for {sizes}: leave one of them out")
    if num_stages is not None:
        if isinstance(num_stages, bool) or not isinstance(num_stages, int) or num_stages < 1:
            raise ValueError(f"num_stages is {num_stages!r}: give a whole number of at least 1")
        if grid is None:
            grid = Grid(pipe=num_stages)
        elif grid.pipe.size != num_stages:
            raise ValueError(
                f"num_stages is {num_stages}, and the grid has {grid.pipe.size} ranks on its pipe axis: leave one of "
                "them out"
            )
    return grid if grid is not None else Grid()


def partition_of(partition: str | Sequence[int] | None, method: str | Sequence[int] | None) -> str | Sequence[int]:
    """Where to cut: ``partition``, or DeepSpeed's ``partition_method``; by default the least largest stage.

    Raises:
        ValueError: both are given, and differ.
    """
    if partition is not None and method is not None and partition != method:
        raise ValueError(f"partition is {partition!r} and partition_method {method!r}: give one of them")
    given = method if partition is None else partition
    return "parameters" if given is None else given


def seed_of(seed: int | None, others: Mapping[str, Any], known: Sequence[str]) -> int:
    """The seed of the initial weights, from the rest of DeepSpeed's arguments.

    Raises:
        TypeError: an argument that cannot act here, with what to write, or that nobody knows.
        ValueError: two seeds.
    """
    for name in others:
        if name in _OTHERS:
            raise TypeError(f"PipelineModule: {name} is DeepSpeed's; {_OTHERS[name]}")
        if name not in _TAKEN:
            close = difflib.get_close_matches(name, [*known, *_TAKEN], n=1)
            hint = f"did you mean {close[0]}?" if close else f"it takes {', '.join(known)}"
            raise TypeError(f"PipelineModule has no argument {name!r}; {hint}")
    if seed is not None and others.get("base_seed", seed) != seed:
        raise ValueError(f"seed is {seed} and base_seed {others['base_seed']}: give one of them")
    return int(others.get("base_seed", 0) if seed is None else seed)


def _sizes(topology: Any) -> dict[str, int]:
    """Axis -> size, outermost first."""
    if isinstance(topology, Topology):
        found = dict(topology.axes)
    elif hasattr(topology, "get_axis_names") and hasattr(topology, "get_dim"):
        found = {_AXES.get(name, name): topology.get_dim(name) for name in topology.get_axis_names()}
    else:
        kind = type(topology).__name__
        raise TypeError(f"topology is a {kind}: pass topology=triax.Topology(pipe=2, data=2), or a grid")
    strange = sorted(set(found) - set(DEFAULT_AXES))
    if strange:
        raise ValueError(f"topology has axes {', '.join(strange)}; a model is laid out over pipe, data and tensor")
    return {**{axis: 1 for axis in DEFAULT_AXES if axis not in found}, **found}
