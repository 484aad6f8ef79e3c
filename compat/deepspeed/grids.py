"""The grid that a script for DeepSpeed describes: Megatron's ``mpu``, ``mesh_param``, ``pipeline.stages``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import permutations
from typing import Any

import torch.distributed as dist
from torch import nn

from ...grid import Grid, layout_of
from ...grid.layout import Layout, set_layout
from ...grid.topology import Topology
from ...pipe.module import PipelineModule
from .engine import DeepSpeedConfigError

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
        DeepSpeedConfigError: the sizes do not fit the number of processes, or no order of the axes has these groups.
    """
    sizes = {axis: _ask(mpu, names, "world_size") or 1 for axis, names in _AXES.items()}
    groups = {axis: _ranks(_ask(mpu, names, "group")) for axis, names in _AXES.items()}
    world, product = dist.get_world_size() if dist.is_initialized() else 1, 1
    for size in sizes.values():
        product *= size
    said = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    if product != world:
        raise DeepSpeedConfigError(
            f"mpu describes {said} = {product} ranks, but there are {world} processes: give an mpu for all of them"
        )
    rank = dist.get_rank() if world > 1 else 0
    named = [axis for axis in _AXES if axis != "context" or sizes["context"] > 1]
    for order in permutations(named):
        topology = Topology(**{axis: sizes[axis] for axis in order})
        found = {axis: next(sorted(group) for group in topology.groups(axis) if rank in group) for axis in named}
        if all(groups[axis] in (None, found[axis]) for axis in named):
            context = sizes["context"]
            return Grid(sizes["pipe"], sizes["data"], sizes["tensor"], context=context, order=order)
    known = ", ".join(f"{axis} {ranks}" for axis, ranks in groups.items() if ranks is not None)
    raise DeepSpeedConfigError(
        f"mpu describes {said} with the groups {known} of rank {rank}, which no order of the axes gives: leave mpu "
        "out, and pass grid=triax.Grid(...)"
    )


def lay_out_megatron(model: nn.Module, grid: Grid) -> None:
    """Give Megatron's sharded parameters a layout: those with ``tensor_model_parallel`` or ``model_parallel`` set.

    Raises:
        DeepSpeedConfigError: the dim that is sharded is not known.
    """
    size = grid.tensor.size
    for name, parameter in model.named_parameters() if size > 1 else ():
        marked = getattr(parameter, "tensor_model_parallel", False) or getattr(parameter, "model_parallel", False)
        if not marked or layout_of(parameter).sharded:
            continue
        dim = getattr(parameter, "partition_dim", 0 if parameter.dim() == 1 else -1)
        if dim < 0 or getattr(parameter, "partition_stride", 1) != 1:
            stride = getattr(parameter, "partition_stride", 1)
            raise DeepSpeedConfigError(
                f"{name} of shape {list(parameter.shape)} is a shard of one of {size} tensor ranks, with "
                f"partition_dim={dim} and partition_stride={stride}: set parameter.partition_dim to the dim that is "
                "sharded, in one contiguous part"
            )
        shape = list(parameter.shape)
        shape[dim] *= size
        set_layout(parameter, Layout(tuple(shape), shard_dim=dim))


def grid_of_mesh(mesh_param: tuple[int, ...]) -> Grid:
    """Make the grid of DeepSpeed's ``mesh_param``: the sizes of the data axis and of the sequence axis. Collective."""
    data, sequence = mesh_param
    return Grid(data=data, context=sequence)


def restage(model: PipelineModule, stages: int, parameters: Iterable[Any] | None) -> tuple[PipelineModule, Any]:
    """Cut a model that was built without a grid into the stages that the configuration asks for. Collective.

    Args:
        model: a model on the default grid, of one stage.
        stages: size of the pipe axis.
        parameters: ``model_parameters`` of ``initialize``, or None.

    Returns:
        The model over ``Grid(pipe=stages)``, and the parameters or groups of it that this rank holds.
    """
    made = PipelineModule(
        model.specs,
        Grid(pipe=stages),
        model.loss_fn,
        model.partition,
        chunks=model.chunks,
        seed=model.seed,
        dtype=model.dtype,
        device="meta" if model.has_placeholders else None,
        output_fn=model.output_fn,
        activation_checkpoint_interval=model.activation_checkpoint_interval,
        checkpointable_layers=model.checkpointable_layers,
    )
    held = {layout_of(parameter).name: parameter for parameter in made.parameters()}

    def here(given: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        return [held[name] for name in (layout_of(p).name for p in given) if name in held]

    if parameters is None:
        return made, None
    groups = list(parameters)
    if not any(isinstance(group, Mapping) for group in groups):
        return made, here(groups)
    return made, [{**group, "params": here(group["params"])} for group in groups]


def _ask(mpu: Any, names: tuple[str, ...], what: str) -> Any:
    """Return the result of the first of the mpu's methods ``get_NAME_WHAT`` that it has; None if it has none."""
    method = next((found for name in names if (found := getattr(mpu, f"get_{name}_{what}", None)) is not None), None)
    return None if method is None else method()


def _ranks(group: Any) -> list[int] | None:
    if group is None or not dist.is_initialized():
        return None
    return sorted(dist.get_process_group_ranks(group))
