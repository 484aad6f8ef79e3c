"""DeepSpeed's arguments of ``PipelineModule``: num_stages, topology, partition_method, seed_layers, base_seed, ..."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from ..base.checks import check_seed
from ..grid import Grid
from ..grid.topology import AXES, DEFAULT_AXES, Topology

# Keyword arguments of DeepSpeed's PipelineModule: those that are accepted, and for the others what to do instead.
_ACCEPTED = ("seed_layers", "base_seed", "dynamic_shape")  # shapes may always change between microbatches
_REFUSED = {
    "seed_fn": "layers are seeded by seed= and their place in the list: leave it out",
    "activation_checkpoint_func": "recomputation is activation_checkpoint_interval= and the configuration's "
    "activation_checkpointing: leave it out",
}


def grid_of(grid: Grid | None, num_stages: int | None, topology: Any) -> Grid:
    """Return the given grid, or make the one that ``num_stages`` or ``topology`` describes.

    Args:
        grid: the grid, or None to make one.
        num_stages: number of ranks of the pipe axis. The remaining factor of the number of processes is the data axis.
        topology: a ``triax.Topology``, or an object with DeepSpeed's ``get_axis_names`` and ``get_dim``.

    Raises:
        TypeError: the grid or the topology has another type.
        ValueError: two of the arguments contradict each other, or the sizes do not fit the number of processes.
    """
    if grid is not None and not isinstance(grid, Grid):
        raise TypeError(
            f"grid is {grid!r}, not a triax.Grid: write num_stages={grid!r}, or pass grid=triax.Grid(pipe={grid!r})"
        )
    if topology is not None:
        sizes, expert = _sizes(topology), topology.expert if isinstance(topology, Topology) else 1
        if grid is None:
            context = sizes.get("context", 1)
            order = tuple(name for name in sizes if name != "context" or context > 1)
            grid = Grid(sizes["pipe"], sizes["data"], sizes["tensor"], context=context, expert=expert, order=order)
        elif {axis: getattr(grid, axis).size for axis in (*sizes, "expert")} != {**sizes, "expert": expert}:
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
    """Return ``partition``, or DeepSpeed's ``partition_method``; by default ``"parameters"``.

    Raises:
        ValueError: ``partition`` and ``partition_method`` are both given, and differ.
    """
    if partition is not None and method is not None and partition != method:
        raise ValueError(f"partition is {partition!r} and partition_method is {method!r}: give one of them")
    given = method if partition is None else partition
    return "parameters" if given is None else given


def seed_of(seed: int | None, others: Mapping[str, Any], known: Sequence[str]) -> int:
    """Return the seed of the initial weights, and check DeepSpeed's other arguments.

    Raises:
        TypeError: an argument that cannot act here (the message says what to write instead), or an unknown one.
        ValueError: ``seed`` and ``base_seed`` differ, or it is no seed.
    """
    for name in others:
        if name in _REFUSED:
            raise TypeError(f"PipelineModule: {name} is DeepSpeed's; {_REFUSED[name]}")
        if name not in _ACCEPTED:
            close = difflib.get_close_matches(name, [*known, *_ACCEPTED], n=1)
            hint = f"did you mean {close[0]}?" if close else f"give some of {', '.join(known)}"
            raise TypeError(f"PipelineModule has no argument {name!r}: {hint}")
    chosen = check_seed(others.get("base_seed", 0) if seed is None else seed)
    if others.get("base_seed", chosen) != chosen:
        raise ValueError(f"seed is {seed} and base_seed {others['base_seed']}: give one of them")
    return chosen


def _sizes(topology: Any) -> dict[str, int]:
    """Return the axes of a topology with their sizes, as axis name -> size, outermost axis first."""
    if isinstance(topology, Topology):
        found = dict(topology.axes)
    elif hasattr(topology, "get_axis_names") and hasattr(topology, "get_dim"):
        # DeepSpeed's name of the tensor axis is "model".
        found = {"tensor" if n == "model" else n: topology.get_dim(n) for n in topology.get_axis_names()}
    else:
        kind = type(topology).__name__
        raise TypeError(f"topology is a {kind}: pass topology=triax.Topology(pipe=2, data=2), or a grid")
    strange = sorted(set(found) - set(AXES))
    if strange:
        raise ValueError(
            f"topology has the axes {', '.join(strange)}, but a model can be laid out only over pipe, data, context "
            "and tensor: leave them out"
        )
    return {**{axis: 1 for axis in DEFAULT_AXES if axis not in found}, **found}
