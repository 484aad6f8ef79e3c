"""``triax.initialize``: DeepSpeed's signature, from a model and a configuration to an engine."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, overload

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from ..grid import Grid
from ..pipe.module import PipelineModule
from ..zero.optimizer import MakeOptimizer
from . import one_bit, optimizers, schedulers
from .checkpoint_auto import attach
from .compression import require_one_momentum
from .config import Config, ConfigError, SchedulerConfig, batch_sizes, read_config
from .config_cli import resolved
from .data import Loader
from .engine import Engine, training_schedule
from .instruments import instrument
from .local import LocalEngine, LocalModuleEngine
from .module_engine import ModuleEngine
from .observe import observe
from .recomputation import set_up
from .same import require_same

Groups = list[tuple[dict[str, Any], list[nn.Parameter]]]


@overload
def initialize(  # type: ignore[overload-overlap]  # a PipelineModule is an nn.Module too
    args: Any = ...,
    *,
    model: PipelineModule,
    optimizer: Any = ...,
    model_parameters: Iterable[Any] | None = ...,
    training_data: Any = ...,
    lr_scheduler: Any = ...,
    collate_fn: Callable[[list[Any]], Any] | None = ...,
    config: Any = ...,
    config_params: Any = ...,
    grid: Grid | None = ...,
    mpu: Any = ...,
    distributed_port: int | None = ...,
    dist_init_required: bool | None = ...,
) -> tuple[Engine, torch.optim.Optimizer | None, DataLoader[Any] | None, LRScheduler | None]: ...


@overload
def initialize(
    args: Any = ...,
    model: nn.Module | None = ...,
    optimizer: Any = ...,
    model_parameters: Iterable[Any] | None = ...,
    training_data: Any = ...,
    lr_scheduler: Any = ...,
    collate_fn: Callable[[list[Any]], Any] | None = ...,
    config: Any = ...,
    config_params: Any = ...,
    *,
    grid: Grid | None = ...,
    mpu: Any = ...,
    distributed_port: int | None = ...,
    dist_init_required: bool | None = ...,
) -> tuple[ModuleEngine, torch.optim.Optimizer | None, Loader | None, LRScheduler | None]: ...


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Config | Mapping[str, Any] | str | Path | None = None,
    config_params: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    grid: Grid | None = None,
    mpu: Any = None,
    distributed_port: int | None = None,
    dist_init_required: bool | None = None,
) -> tuple[Any, torch.optim.Optimizer | None, DataLoader[Any] | None, LRScheduler | None]:
    """Make an engine. Every rank calls this, with the same arguments.

    Args:
        args: an object whose ``deepspeed_config`` is the path of the configuration, where ``config`` is not given.
        model: a ``PipelineModule``, for an ``Engine`` and its ``train_batch``; or any other ``nn.Module``, for a
            ``ModuleEngine`` and DeepSpeed's loop of forward, ``backward`` and ``step``. That one is moved to the
            grid's device.
        optimizer: one of torch's over the model's parameters (another of its class and options is made for the
            flat parameters), or a function from parameter groups to one. None: ``config["optimizer"]``.
        model_parameters: the parameters to train, or parameter groups; by default all that require gradients.
        training_data: a dataset of ``(inputs, labels)``; its order depends on the configuration's seed alone.
        lr_scheduler: a function from the optimizer to a torch scheduler, or a scheduler over ``optimizer``; it is
            stepped after each step. None: ``config["scheduler"]``.
        collate_fn: of the data loader.
        config: a dict, or the path of a JSON file, in DeepSpeed's dialect: docs/config.md.
        config_params: an older name of ``config``.
        grid: on which a plain module trains; None: every process is a replica. A ``PipelineModule`` has its own.
        mpu: refused: ``grid`` says what DeepSpeed asks of it.
        distributed_port, dist_init_required: DeepSpeed's; nothing depends on them. The grid joins the process group,
            if nobody has, as the launcher says.

    Returns:
        engine, optimizer, dataloader, lr_scheduler: the latter three None where there is none.

    Raises:
        ConfigError: the configuration, or its combination with the other arguments, cannot be used.
        TypeError: an argument of the wrong kind; the message says what to pass.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, not an nn.Module: pass model=, a module of torch's")
    if config is not None and config_params is not None:
        raise ConfigError("config_params is an older name of config: give the second alone")
    config = config if config is not None else config_params
    source = config if config is not None else getattr(args, "deepspeed_config", None)
    if source is None:
        raise ConfigError("no configuration: pass config=, a dict or the path of a JSON file")
    checked = read_config(source)
    grid = _grid(model, grid, mpu, checked)
    _held_against(grid, checked)
    batch = batch_sizes(checked, grid.data.size)
    if checked.dump_state and grid.rank == 0:
        print(json.dumps(resolved(checked, batch), indent=2), flush=True)
    schedule = None
    if isinstance(model, PipelineModule):
        schedule = training_schedule(model, checked.pipeline, batch.accumulation)
        model.require_untouched()
        model.move(schedule.placement)
        notes = checked.notes() + set_up(model, checked.recomputation, schedule)
    else:
        notes = checked.notes() + _idle_sections(checked)
        _to_device(model, grid)
    if grid.rank == 0:
        for note in notes:
            logging.getLogger("triax").warning("%s", note)
    groups = _groups(model, optimizer, model_parameters)
    make: MakeOptimizer | None = None
    if isinstance(optimizer, torch.optim.Optimizer):
        make = optimizers.from_instance(optimizer)
        optimizers.require_whole_tensors(type(optimizer).__name__, checked, grid)
    elif optimizer is not None:
        make = _checked(optimizer)
    elif checked.optimizer is not None:
        make = optimizers.from_config(checked.optimizer)
        optimizers.require_whole_tensors(optimizers.resolve(checked.optimizer)[0].__name__, checked, grid)
    if lr_scheduler is not None and not callable(lr_scheduler):
        lr_scheduler = schedulers.over_another(lr_scheduler, optimizer)
    if lr_scheduler is None and checked.scheduler is not None:
        lr_scheduler = _scheduler(checked.scheduler, make)
    require_same(grid, checked, model, groups, optimizer)
    engine: Engine | ModuleEngine
    alone = checked.local_updates is not None
    more = (training_data, lr_scheduler, collate_fn)
    if isinstance(model, PipelineModule):
        assert schedule is not None
        engine = (LocalEngine if alone else Engine)(model, checked, schedule, make, groups, *more)
    else:
        engine = (LocalModuleEngine if alone else ModuleEngine)(model, grid, checked, make, groups, *more)
    require_one_momentum(checked, engine.optimizer)
    instrument(engine)
    attach(engine)
    unmoved = getattr(engine.lr_scheduler, "note", None)
    if unmoved is not None and grid.rank == 0:
        logging.getLogger("triax").warning("%s", unmoved)
    observe(engine)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _grid(model: nn.Module, grid: Grid | None, mpu: Any, config: Config) -> Grid:
    """On which the model trains: its own, the one given, or one of replicas."""
    if mpu is not None:
        raise ConfigError("mpu is Megatron's: leave it out, and pass grid=triax.Grid(tensor=...), which makes the axes")
    if isinstance(model, PipelineModule):
        if grid is not None and grid is not model.grid:
            raise ConfigError("the PipelineModule has a grid already: leave grid= out")
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
            f"the grid has {grid.pipe.size} pipe stages, and a {type(model).__name__} is one: list its layers in a "
            "PipelineModule(layers, grid=grid, loss_fn=...), or make the grid without pipe"
        )
    return grid


def _idle_sections(config: Config) -> list[str]:
    """What only a ``PipelineModule`` does.

    Raises:
        ConfigError: recomputation, asked for in a way that no script of DeepSpeed's has.
    """
    section = config.activation_checkpointing
    how = "call torch.utils.checkpoint.checkpoint(..., use_reentrant=False) in its forward"
    if section.interval or section.granularity or config.pipeline.activation_checkpoint_interval:
        raise ConfigError(
            f"activation_checkpointing groups the layers of a PipelineModule, and this model is none: list its layers "
            f"in one, or leave interval and granularity out and {how}"
        )
    notes = []
    if section.model_fields_set:
        notes.append(f"activation_checkpointing does nothing for a model that is no PipelineModule: {how}")
    if config.pipeline.model_fields_set - {"stages", "activation_checkpoint_interval"}:
        notes.append("pipeline does nothing: the model is no PipelineModule, and runs as one stage")
    return notes


def _to_device(model: nn.Module, grid: Grid) -> None:
    away = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if away is not None:
        raise ConfigError(
            f"{away} is on the meta device, without values: build the model on {grid.device}, or list its layers in a "
            'PipelineModule(..., device="meta"), which is built shard by shard'
        )
    model.to(grid.device)


def _groups(model: nn.Module, optimizer: Any, model_parameters: Iterable[Any] | None) -> Groups:
    """Parameter groups as (options, parameters): the optimizer's own, those given, or one of everything."""
    if isinstance(optimizer, torch.optim.Optimizer):
        given: list[Any] = optimizer.param_groups
    elif model_parameters is not None:
        given = list(model_parameters)
    else:
        given = list(model.parameters())
    if not any(isinstance(item, Mapping) for item in given):
        given = [{"params": given}]
    groups: Groups = []
    seen: set[nn.Parameter] = set()
    known = set(model.parameters())
    for group in given:
        parameters = group["params"]
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        strangers = sum(parameter not in known for parameter in parameters)
        if strangers:
            where = ""
            if isinstance(model, PipelineModule):
                placement = list(model.placement)
                where = (
                    f" (The schedule has its stages on ranks {placement}; pass PipelineModule(..., "
                    f"placement={placement}) and they are there from the start.)"
                )
            raise ConfigError(
                f"{strangers} parameters to train are not the model's: take them from model.parameters().{where}"
            )
        twice = sum(parameter in seen for parameter in parameters)
        if twice:
            raise ConfigError(f"{twice} parameters are in more than one parameter group: put each into one")
        seen.update(parameters)
        groups.append(({key: value for key, value in group.items() if key != "params"}, parameters))
    return groups


def _scheduler(config: SchedulerConfig, make: MakeOptimizer | None) -> Callable[[torch.optim.Optimizer], LRScheduler]:
    if make is None:
        raise ConfigError("scheduler has no optimizer to set the learning rate of: give optimizer, or leave it out")
    return schedulers.from_config(config)


def _held_against(grid: Grid, config: Config) -> None:
    """What the configuration says of the grid is so."""
    parallel = config.tensor_parallel
    for key, wanted, axis in (
        ("pipeline.stages", config.pipeline.stages, "pipe"),
        ("tensor_parallel.autotp_size", parallel.autotp_size, "tensor"),
        ("tensor_parallel.tp_size", parallel.tp_size, "tensor"),
    ):
        size = getattr(grid, axis).size
        if wanted and wanted != size:
            raise ConfigError(
                f"{key} is {wanted}, but the model's grid has {size} on its {axis} axis: make it with "
                f"Grid({axis}={wanted}), or leave the key out"
            )


def _checked(make: MakeOptimizer) -> MakeOptimizer:
    def checked(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        optimizer = make(groups)
        optimizers.require_elementwise(optimizer)
        one_bit.require_told(optimizer)
        return optimizer

    return checked
