"""``triax.initialize``: DeepSpeed's signature, from a model and a configuration to an engine."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from ..grid import Grid
from ..pipe.module import PipelineModule
from ..zero.optimizer import MakeOptimizer
from . import optimizers, schedulers
from .config import Config, ConfigError, SchedulerConfig, batch_sizes, read_config
from .config_cli import resolved
from .engine import Engine, training_schedule
from .recomputation import set_up

Groups = list[tuple[dict[str, Any], list[nn.Parameter]]]


def initialize(
    args: Any = None,
    model: PipelineModule | None = None,
    optimizer: torch.optim.Optimizer | Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Config | Mapping[str, Any] | str | Path | None = None,
    config_params: Config | Mapping[str, Any] | str | Path | None = None,
) -> tuple[Engine, torch.optim.Optimizer | None, DataLoader[Any] | None, LRScheduler | None]:
    """Make an engine. Every rank calls this, with the same arguments.

    Args:
        args: an object whose ``deepspeed_config`` is the path of the configuration, where ``config`` is not given.
        model: a ``PipelineModule``. A model that is one ``nn.Module`` is a list of one layer.
        optimizer: one of torch's over the model's parameters (another of its class and options is made for the
            flat parameters), or a function from parameter groups to one. None: ``config["optimizer"]``.
        model_parameters: the parameters to train, or parameter groups; by default all that require gradients.
        training_data: a dataset of ``(inputs, labels)``; its order depends on the configuration's seed alone.
        lr_scheduler: a function from the optimizer to a torch scheduler; it is stepped after each batch. None:
            ``config["scheduler"]``.
        collate_fn: of the data loader.
        config: a dict, or the path of a JSON file, in DeepSpeed's dialect: docs/config.md.
        config_params: an older name of ``config``.

    Returns:
        engine, optimizer, dataloader, lr_scheduler: the latter three None where there is none.

    Raises:
        ConfigError: the configuration, or its combination with the other arguments, cannot be used.
        TypeError: an argument of the wrong kind; the message says what to pass.
    """
    if not isinstance(model, PipelineModule):
        raise TypeError(
            f"model is a {type(model).__name__}, not a PipelineModule: wrap it, PipelineModule([model], "
            "loss_fn=...), or list its layers"
        )
    if config is not None and config_params is not None:
        raise ConfigError("config_params is an older name of config: give the second alone")
    config = config if config is not None else config_params
    source = config if config is not None else getattr(args, "deepspeed_config", None)
    if source is None:
        raise ConfigError("no configuration: pass config=, a dict or the path of a JSON file")
    checked = read_config(source)
    _held_against(model.grid, checked)
    batch = batch_sizes(checked, model.grid.data.size)
    if checked.dump_state and model.grid.rank == 0:
        print(json.dumps(resolved(checked, batch), indent=2), flush=True)
    schedule = training_schedule(model, checked.pipeline, batch.accumulation)
    model.require_untouched()
    model.move(schedule.placement)
    notes = checked.notes() + set_up(model, checked.recomputation, schedule)
    if model.grid.rank == 0:
        for note in notes:
            logging.getLogger("triax").warning("%s", note)
    groups = _groups(model, optimizer, model_parameters)
    make: MakeOptimizer | None = None
    if isinstance(optimizer, torch.optim.Optimizer):
        make = optimizers.from_instance(optimizer)
        optimizers.require_whole_tensors(type(optimizer).__name__, checked, model.grid)
    elif optimizer is not None:
        make = _checked(optimizer)
    elif checked.optimizer is not None:
        make = optimizers.from_config(checked.optimizer)
        optimizers.require_whole_tensors(optimizers.resolve(checked.optimizer)[0].__name__, checked, model.grid)
    if lr_scheduler is not None and not callable(lr_scheduler):
        raise TypeError(
            "lr_scheduler is a scheduler over another optimizer than the engine's: pass a function instead, such as "
            "lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)"
        )
    if lr_scheduler is None and checked.scheduler is not None:
        lr_scheduler = _scheduler(checked.scheduler, make)
    engine = Engine(model, checked, schedule, make, groups, training_data, lr_scheduler, collate_fn)
    unmoved = getattr(engine.lr_scheduler, "note", None)
    if unmoved is not None and model.grid.rank == 0:
        logging.getLogger("triax").warning("%s", unmoved)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _groups(model: PipelineModule, optimizer: Any, model_parameters: Iterable[Any] | None) -> Groups:
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
            raise ConfigError(
                f"{strangers} parameters to train are not the model's: take them from model.parameters(). (The "
                f"schedule has its stages on ranks {list(model.placement)}; pass PipelineModule(..., "
                f"placement={list(model.placement)}) and they are there from the start.)"
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
        return optimizer

    return checked
