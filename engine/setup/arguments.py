"""Arguments of ``triax.initialize``: where the configuration comes from, the grid, and the parameter groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ...config.schema import Config
from ...grid.checks import check_kind
from ...grid.errors import ConfigError
from ...grid.grid import Grid
from ...pipe.module import PipelineModule
from ...pipe.program.schedule import Schedule
from ...pipe.schedules.choose import require_schedule

_KINDS: dict[str, tuple[Any, str]] = {
    "optimizer": ((torch.optim.Optimizer, Callable), "an optimizer, or a function from parameter groups to one"),
    "model_parameters": (Iterable, "model.parameters(), or parameter groups"),
    "collate_fn": (Callable, "a function from a list of samples to a batch"),
    "grid": (Grid, "a triax.Grid"),
}
Groups = list[tuple[dict[str, Any], list[nn.Parameter]]]


def check_arguments(**arguments: Any) -> None:
    """Check the classes of arguments of ``triax.initialize``.

    Raises:
        ArgumentError: an argument of another class; the message says what to pass.
    """
    for name, (kinds, wanted) in _KINDS.items():
        if arguments[name] is not None:
            check_kind("initialize", kinds, wanted, **{name: arguments[name]})


def config_source(args: Any, config: Any, config_params: Any) -> Any:
    """Return the configuration that was passed under one of its three names."""
    if config is not None and config_params is not None:
        raise ConfigError("config_params is an older name of config, and both were given: pass config alone")
    given = config if config is not None else config_params
    source = given
    for name in ("deepspeed_config", "deepscale_config"):  # the second is DeepSpeed's own older name
        source = getattr(args, name, None) if source is None else source
    if source is None:
        option = ", or start the script with --deepspeed_config FILE" if hasattr(args, "deepspeed_config") else ""
        raise ConfigError(
            f"initialize was given no configuration: pass config=, a dict or the path of a JSON file{option}"
        )
    return source


def with_schedule(config: Config, schedule: str | Schedule, model: nn.Module) -> Config:
    """Return the configuration with the name of the schedule that was given to ``initialize``.

    Raises:
        ConfigError: there is no such schedule, the configuration names another one, or the model has no stages.
    """
    if not isinstance(schedule, (str, Schedule)):
        raise TypeError(
            f"schedule is a {type(schedule).__name__}: give a name such as '1f1b', or triax.make_schedule(...)"
        )
    name = schedule if isinstance(schedule, str) else schedule.name
    if not isinstance(model, PipelineModule):
        raise ConfigError(
            f"schedule is {name}, but a {type(model).__name__} runs as one stage: list its layers in a "
            "PipelineModule(layers, grid=grid, loss_fn=...), or leave schedule= out"
        )
    section = config.pipeline
    if "schedule" in section.model_fields_set and section.schedule != name:
        raise ConfigError(
            f"schedule is {name}, but the configuration's pipeline.schedule is {section.schedule}: leave one out"
        )
    if isinstance(schedule, str):
        require_schedule("schedule", name)
    return config.model_copy(update={"pipeline": section.model_copy(update={"schedule": name})})


def choose_grid(model: nn.Module, grid: Grid | None, mpu: Any, config: Config) -> Grid:
    """Return the grid to train on: the model's own, the one given, or all processes as replicas."""
    if mpu is not None:
        raise ConfigError("mpu was given, but grid takes its place: pass grid=triax.grid.megatron.grid_of_mpu(mpu)")
    if isinstance(model, PipelineModule):
        if grid is not None and grid is not model.grid:
            raise ConfigError("the PipelineModule was built on another grid than grid=: leave grid= out")
        if not config.managed_gradient_accumulation:
            raise ConfigError(
                "managed_gradient_accumulation is false, but train_batch of a PipelineModule runs all microbatches of "
                "a step: leave the key out"
            )
        return model.grid
    if grid is None:
        sizes = [config.tensor_parallel.autotp_size, config.tensor_parallel.tp_size]
        wanted = max((size for size in sizes if size), default=1)
        if wanted > 1:
            raise ConfigError(
                f"tensor_parallel asks for {wanted} tensor ranks: make grid = triax.Grid(tensor={wanted}), shard the "
                "model with triax.parallelize(model, grid), and pass initialize(grid=grid)"
            )
        return Grid()
    if grid.pipe.size > 1:
        raise ConfigError(
            f"the grid has {grid.pipe.size} pipe stages, but a {type(model).__name__} is not cut into stages: list its "
            "layers in a PipelineModule(layers, grid=grid, loss_fn=...), or make the grid with pipe=1"
        )
    return grid


def check_grid(grid: Grid, config: Config) -> None:
    """Refuse a grid whose axes have other sizes than the configuration says."""
    parallel = config.tensor_parallel
    for key, wanted, axis in (
        ("pipeline.stages", config.pipeline.stages, "pipe"),
        ("tensor_parallel.autotp_size", parallel.autotp_size, "tensor"),
        ("tensor_parallel.tp_size", parallel.tp_size, "tensor"),
        ("data_parallel_size", config.data_parallel_size, "data"),
        ("sequence_parallel_size", config.sequence_parallel_size, "context"),
        ("expert_parallel_size", config.expert_parallel_size, "expert"),
        ("moe.ep_size", config.moe.ep_size, "expert"),
    ):
        size = getattr(grid, axis).size
        if wanted and wanted != size:
            raise ConfigError(
                f"{key} is {wanted}, but the model's grid has {size} on its {axis} axis: make it with "
                f"Grid({axis}={wanted}), or leave the key out"
            )


def unless_all(model: PipelineModule, parameters: Iterable[Any] | None) -> list[Any] | None:
    """Return None in place of all parameters to train, as a schedule may move others to this rank. Collective."""
    given = None if parameters is None else list(parameters)
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    known = {id(parameter) for parameter in {*model.parameters(), *model.parameters_elsewhere}}
    everything = given is None or trained <= {id(parameter) for parameter in given} <= known
    return None if all(model.grid.pipe.all_gather_json(everything)) else given


def parameter_groups(model: nn.Module, optimizer: Any, model_parameters: Iterable[Any] | None) -> Groups:
    """Return parameter groups as (options, parameters): the optimizer's own, those given, or one of everything."""
    if isinstance(optimizer, torch.optim.Optimizer):
        given: list[Any] = optimizer.param_groups
    elif model_parameters is not None:
        given = list(model_parameters)
        if not given and not isinstance(model, PipelineModule) and any(p.requires_grad for p in model.parameters()):
            raise ConfigError(
                "model_parameters is empty, so that nothing would be trained: pass model.parameters() anew, whose "
                "iterator can be read once, or leave it out"
            )
    else:
        given = list(model.parameters())
    if not any(isinstance(item, Mapping) for item in given):
        given = [{"params": given}]
    groups: Groups = []
    seen: set[nn.Parameter] = set()
    known = set(model.parameters())
    elsewhere = model.parameters_elsewhere if isinstance(model, PipelineModule) else set()
    for group in given:
        parameters = group["params"]
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        parameters = [parameter for parameter in parameters if parameter not in elsewhere]
        strangers = sum(parameter not in known for parameter in parameters)
        if strangers:
            where = ""
            if isinstance(model, PipelineModule):
                placement = list(model.placement)
                where = (
                    f". If they are, the schedule moved stages: its stages are on the ranks {placement}, so pass "
                    f"PipelineModule(..., placement={placement}) and take the parameters then"
                )
            raise ConfigError(
                f"{strangers} parameters to train are not the model's: take them from model.parameters(){where}"
            )
        twice = sum(parameter in seen for parameter in parameters)
        if twice:
            raise ConfigError(f"{twice} parameters are in more than one parameter group: put each into one")
        seen.update(parameters)
        groups.append(({key: value for key, value in group.items() if key != "params"}, parameters))
    return groups
