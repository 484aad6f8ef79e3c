"""``PipelineModule`` with DeepSpeed's arguments: num_stages, topology, partition_method, seed_layers, base_seed, ..."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ...grid import Grid
from ...grid.topology import AXES, DEFAULT_AXES, Topology
from ...pipe.module import PipelineModule
from ...pipe.ties import Layer

ENDS = "0.3"  # version of triax in which triax.PipelineModule takes these arguments no more

_REFUSED = {
    "seed_fn": "layers are seeded by seed= and their place in the list: leave it out",
    "activation_checkpoint_func": "recomputation is activation_checkpoint_interval= and the configuration's "
    "activation_checkpointing: leave it out",
}
_IDLE = ("seed_layers", "dynamic_shape")  # layers are always seeded; shapes may change between microbatches
NAMES = ("num_stages", "topology", "partition_method", "base_seed", *_IDLE, *_REFUSED)


class DeepSpeedPipelineModule(PipelineModule):
    """``triax.PipelineModule`` that takes DeepSpeed's arguments too.

    Args:
        layers, grid, loss_fn, partition: as in ``triax.PipelineModule``.
        arguments: its other arguments, or DeepSpeed's: ``num_stages`` (the number of ranks of the pipe axis; the other
            ranks are replicas) or ``topology`` in place of a grid, ``partition_method`` (``partition``), ``base_seed``
            (``seed``), ``seed_layers`` and ``dynamic_shape`` (without effect: layers are always seeded, and shapes may
            always change).

    Raises:
        TypeError: an unknown argument, or one of DeepSpeed's that cannot act here.
        ValueError: two arguments contradict each other, or the sizes do not fit the number of processes.
    """

    def __init__(
        self,
        layers: Iterable[Layer],
        grid: Grid | None = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        partition: str | Sequence[int] | None = None,
        **arguments: Any,
    ) -> None:
        theirs = {name: arguments.pop(name) for name in NAMES if name in arguments}
        native, _ = _translated({"grid": grid, "partition": partition, "seed": arguments.pop("seed", None)}, theirs)
        super().__init__(layers, loss_fn=loss_fn, **native, **arguments)


def native_arguments(given: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``triax.PipelineModule`` that DeepSpeed's stand for, with a warning.

    Args:
        given: its arguments grid, partition and seed.
        theirs: DeepSpeed's arguments.
    """
    native, spelled = _translated(given, theirs)
    idle = [name for name in theirs if name in _IDLE]
    write = [f"write {', '.join(spelled)}"] if spelled else []
    leave = [f"leave {', '.join(idle)} out"] if idle else []
    text = (
        f"PipelineModule takes DeepSpeed's arguments ({', '.join(theirs)}) until triax {ENDS}: "
        f"{', and '.join([*write, *leave])}. triax.compat.deepspeed.PipelineModule goes on to take them"
    )
    warnings.warn(text, DeprecationWarning, stacklevel=4)  # of the line that makes the module
    return native


def _translated(given: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return triax's arguments, and how those that DeepSpeed's stand for are written."""
    for name in theirs:
        if name in _REFUSED:
            raise TypeError(f"PipelineModule: {name} is DeepSpeed's; {_REFUSED[name]}")
    native, spelled = dict(given), []
    makes_grid = given["grid"] is None or isinstance(given["grid"], Grid)  # else PipelineModule refuses it
    if makes_grid and theirs.get("topology") is not None:
        native["grid"], text = _grid_of_topology(given["grid"], theirs["topology"])
        spelled.append(text)
    if makes_grid and theirs.get("num_stages") is not None:
        native["grid"] = _grid_of_stages(native["grid"], theirs["num_stages"])
        spelled += [] if spelled else [f"grid=triax.Grid(pipe={theirs['num_stages']})"]
    for ours, name in (("partition", "partition_method"), ("seed", "base_seed")):
        value = theirs.get(name)
        if value is None:
            continue
        if given[ours] not in (None, value):
            raise ValueError(f"{ours} is {given[ours]!r} and {name} is {value!r}: give one of them")
        native[ours] = value
        spelled.append(f"{ours}={value!r}")
    return native, spelled


def _grid_of_stages(grid: Grid | None, stages: Any) -> Grid:
    """Return the grid, or make one with so many ranks on its pipe axis; the other ranks are replicas."""
    if isinstance(stages, bool) or not isinstance(stages, int) or stages < 1:
        raise ValueError(f"num_stages is {stages!r}: give a whole number of at least 1")
    if grid is None:
        return Grid(pipe=stages)
    if grid.pipe.size != stages:
        raise ValueError(
            f"num_stages is {stages}, and the grid has {grid.pipe.size} ranks on its pipe axis: leave one of them out"
        )
    return grid


def _grid_of_topology(grid: Grid | None, topology: Any) -> tuple[Grid, str]:
    """Return the grid, or make the one that a topology describes, and how it is written.

    Args:
        grid: the grid, or None to make one.
        topology: a ``triax.Topology``, or an object with DeepSpeed's ``get_axis_names`` and ``get_dim``.
    """
    sizes, expert = _sizes(topology), topology.expert if isinstance(topology, Topology) else 1
    order = tuple(name for name in sizes if name != "context" or sizes["context"] > 1)
    named: dict[str, Any] = {**sizes, "expert": expert}
    if grid is None:
        grid = Grid(**named, order=order)
    elif {axis: getattr(grid, axis).size for axis in named} != named:
        raise ValueError(f"the grid is {grid.topology}, and topology= asks for {sizes}: leave one of them out")
    words = [f"{axis}={size}" for axis, size in named.items() if size > 1]
    words += [] if order == tuple(axis for axis in AXES if axis in order) else [f"order={order}"]
    return grid, f"grid=triax.Grid({', '.join(words)})"


def _sizes(topology: Any) -> dict[str, int]:
    """Return the axes of a topology with their sizes, as axis name -> size, outermost axis first."""
    if isinstance(topology, Topology):
        sizes = dict(topology.axes)
    elif hasattr(topology, "get_axis_names") and hasattr(topology, "get_dim"):
        # DeepSpeed's name of the tensor axis is "model".
        sizes = {"tensor" if n == "model" else n: topology.get_dim(n) for n in topology.get_axis_names()}
    else:
        kind = type(topology).__name__
        raise TypeError(f"topology is a {kind}: pass topology=triax.Topology(pipe=2, data=2), or a grid")
    strange = sorted(set(sizes) - set(AXES))
    if strange:
        raise ValueError(
            f"topology has the axes {', '.join(strange)}, but a model can be laid out only over pipe, data, context "
            "and tensor: leave them out"
        )
    return {**{axis: 1 for axis in DEFAULT_AXES if axis not in sizes}, **sizes}
