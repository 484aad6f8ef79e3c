"""``triax.initialize``: from a model and a configuration to an engine, with DeepSpeed's signature."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, overload

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from ..config.config import batch_sizes
from ..config.schema import Config
from ..context.sparse_layers import set_sparse_attention
from ..data.dataloader import Loader, TokenLoader
from ..grid import Grid
from ..grid.errors import ConfigError
from ..pipe.module import PipelineModule
from ..pipe.program.schedule import Schedule
from ..zero.modules.leaf_modules import set_listed_leaf_modules
from .base import TrainingParts
from .instrument import instrument
from .module_engine import ModuleEngine
from .pipeline_engine import PipelineEngine, training_schedule
from .setup.arguments import check_arguments, check_grid, choose_grid, config_source, unless_all, with_schedule
from .setup.check import read_config, resolve_config
from .setup.compression import require_one_momentum
from .setup.lora import add_lora, require_adapters
from .setup.optimizer import choose_optimizer, choose_scheduler, optimizer_groups
from .setup.rank_consistency import require_same_model, require_same_settings
from .setup.recomputation import configure_recomputation
from .setup.tuning import find_sizes
from .setup.zero import one_replica_note, unsharded_note


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
    schedule: str | Schedule | None = ...,
    mpu: Any = ...,
    distributed_port: int | None = ...,
    dist_init_required: bool | None = ...,
) -> tuple[PipelineEngine, torch.optim.Optimizer | None, DataLoader[Any] | TokenLoader | None, LRScheduler | None]: ...


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
) -> tuple[ModuleEngine, torch.optim.Optimizer | None, Loader | TokenLoader | None, LRScheduler | None]: ...


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
    schedule: str | Schedule | None = None,
    mpu: Any = None,
    distributed_port: int | None = None,
    dist_init_required: bool | None = None,
    _classes: tuple[Callable[..., PipelineEngine], Callable[..., ModuleEngine]] = (PipelineEngine, ModuleEngine),
) -> tuple[Any, torch.optim.Optimizer | None, DataLoader[Any] | TokenLoader | None, LRScheduler | None]:
    """Make an engine. Every rank calls this, with the same arguments.

    Args:
        args: object whose ``deepspeed_config`` is the path of the configuration, used if ``config`` is not given.
        model: a ``PipelineModule``, for a ``PipelineEngine`` and its ``train_batch``; or any other ``nn.Module``, for a
            ``ModuleEngine`` and DeepSpeed's loop of forward, ``backward`` and ``step``, which moves to the grid's
            device.
        optimizer: a torch optimizer over the model's parameters (the engine makes another of its class and options for
            flat parameters), or a function from parameter groups to an optimizer. None: ``config["optimizer"]``.
        model_parameters: the parameters to train, or parameter groups; by default all that require gradients.
        training_data: a dataset of ``(inputs, labels)``; its order depends only on the configuration's seed.
        lr_scheduler: a function from the optimizer to a torch scheduler, or a scheduler over ``optimizer``; it is
            stepped after each step. None: ``config["scheduler"]``.
        collate_fn: batches samples in the data loader, as in torch.
        config: a dict, or the path of a JSON file, in DeepSpeed's dialect: docs/config.md.
        config_params: an older name of ``config``.
        grid: the grid of a plain module; None: every process is a replica. A ``PipelineModule`` has its own.
        schedule: the pipeline schedule of a ``PipelineModule``, in place of the configuration's ``pipeline.schedule``:
            a ``Schedule`` for this grid's ranks and microbatches, or a name. If the model was given no ``chunks``, its
            list is cut into the stages that the schedule needs.
        mpu: refused: ``grid`` takes its place.
        distributed_port, dist_init_required: arguments of DeepSpeed without effect. The grid makes the process group
            from the launcher's environment, if there is none yet.

    Returns:
        engine, optimizer, dataloader, lr_scheduler. The last three are None if there is none.

    Raises:
        ConfigError: the configuration, or its combination with the other arguments, cannot be used.
        TypeError: an argument of the wrong kind; the message says what to pass.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, not an nn.Module: pass model=, a module of torch's")
    check_arguments(optimizer=optimizer, model_parameters=model_parameters, collate_fn=collate_fn, grid=grid)
    checked = read_config(config_source(args, config, config_params))
    if schedule is not None:
        checked = with_schedule(checked, schedule, model)
    given_schedule = schedule if isinstance(schedule, Schedule) else None
    if checked.log_level is not None:
        logging.getLogger("triax").setLevel(checked.log_level)
    grid = choose_grid(model, grid, mpu, checked)
    check_grid(grid, checked)
    require_same_settings(grid, checked, given_schedule)
    if isinstance(model, PipelineModule):
        model.take_loss()
    tuned = find_sizes(model, checked, optimizer, training_data, collate_fn, given_schedule)
    checked = checked if tuned is None else tuned.tuner.config
    batch = batch_sizes(checked, grid.data.size)
    if isinstance(model, PipelineModule) and checked.lora is None:
        model_parameters = unless_all(model, model_parameters)
    made_schedule, notes = _place_model(model, grid, checked, batch.accumulation, given_schedule)
    _warn(grid, notes)
    if checked.lora is not None:
        add_lora(model, checked.lora, grid)
    groups = optimizer_groups(model, optimizer, model_parameters, checked)
    if hasattr(model, "lora_options"):
        require_adapters(groups, model)
    make = choose_optimizer(optimizer, checked, grid, groups)
    make_scheduler = choose_scheduler(lr_scheduler, optimizer, checked, make is not None)
    require_same_model(grid, model, groups, optimizer)
    if checked.sparse_attention.mode is not None:
        set_sparse_attention(model, grid, checked.sparse_attention.given)
    data = None if tuned else training_data
    parts = TrainingParts(make, groups, data, make_scheduler, collate_fn, given_schedule)
    engine: PipelineEngine | ModuleEngine
    if isinstance(model, PipelineModule):
        engine = _classes[0](model, checked, made_schedule, parts)
    else:
        engine = _classes[1](model, grid, checked, parts)
    require_one_momentum(checked, engine.optimizer)
    if tuned is not None and isinstance(engine, PipelineEngine):
        _warn(grid, [tuned.finish(engine)])
    if checked.dump_state and grid.rank == 0:
        print(json.dumps(resolve_config(engine.config, engine.batch), indent=2), flush=True)
    instrument(engine)
    engine.start_checkpointing()
    found = (
        getattr(engine.lr_scheduler, "note", None),
        unsharded_note(engine.data_axis),
        one_replica_note(engine.config.zero_optimization, grid.data_context.size),
        _untrained_in_loss(model),
    )
    _warn(grid, [note for note in found if note is not None])
    engine.observer.install()
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _place_model(
    model: nn.Module, grid: Grid, config: Config, microbatches: int, given: Schedule | None
) -> tuple[Schedule | None, list[str]]:
    """Put the model on this rank's device, and a ``PipelineModule``'s stages on the ranks of its schedule.

    Returns:
        The schedule of a ``PipelineModule``, and notes on chunks that follow from it and on keys that do nothing.
    """
    if isinstance(model, PipelineModule):
        chunks = None if model.chunks_follow else model.chunks
        schedule = training_schedule(model, config.pipeline, microbatches, chunks, given)
        model.require_untouched()
        try:
            model.move(schedule.placement)
        except ValueError as error:  # too few layers for its stages
            raise ConfigError(
                f"the schedule {schedule.name} has {schedule.chunks} stages on each of {schedule.pipe} ranks, but "
                f"{error}"
            ) from error
        notes = config.notes() + configure_recomputation(model, config.recomputation, schedule)
        if model.chunks_follow and schedule.chunks > 1:
            notes.append(
                f"the schedule {schedule.name} has {schedule.chunks} stages on each rank, so the model is cut into "
                f"{len(schedule.placement)} stages, as PipelineModule(..., chunks={schedule.chunks}) does"
            )
        return schedule, notes
    notes = config.notes() + _pipeline_notes(config)
    set_listed_leaf_modules(model, **config.zero_optimization.leaf_module.model_dump())
    _to_device(model, grid)
    return None, notes


def _pipeline_notes(config: Config) -> list[str]:
    """Return notes on the keys that have no effect on a model that is not a ``PipelineModule``."""
    if config.pipeline.model_fields_set - {"stages", "activation_checkpoint_interval"}:
        return ["pipeline has no effect, because the model is not a PipelineModule and runs as one stage"]
    return []


def _untrained_in_loss(model: nn.Module) -> str | None:
    """Return a note if a loss function that is no module holds parameters, of which the model does not know."""
    loss_fn = getattr(model, "loss_fn", None)
    if not isinstance(model, PipelineModule) or isinstance(loss_fn, nn.Module):
        return None
    entries = [entry for entry in model.layer_specs if isinstance(entry, nn.Module)]
    known = {*model.parameters(), *(parameter for entry in entries for parameter in entry.parameters())}
    function = getattr(loss_fn, "func", loss_fn)  # of a functools.partial
    held = [getattr(function, "__self__", None), *getattr(function, "__dict__", {}).values()]
    held += [*getattr(loss_fn, "args", ()), *getattr(loss_fn, "keywords", {}).values(), function]
    held += inspect.getclosurevars(function).nonlocals.values() if inspect.isfunction(function) else ()
    for each in held:
        parameters = each.parameters() if isinstance(each, nn.Module) else (each,)
        if any(isinstance(p, nn.Parameter) and p.requires_grad and p not in known for p in parameters):
            return (
                f"loss_fn uses parameters of a {type(each).__name__} that this engine does not train, because loss_fn "
                "is not a module: pass an nn.Module that holds them, and they are trained as loss_fn's"
            )
    return None


def _to_device(model: nn.Module, grid: Grid) -> None:
    away = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if away is not None:
        raise ConfigError(
            f"{away} is on the meta device, which has no memory for values: build the model on {grid.device}, or list "
            'its layers in a PipelineModule(..., device="meta"), which is built shard by shard'
        )
    model.to(grid.device)


def _warn(grid: Grid, notes: Iterable[str]) -> None:
    """Log notes as warnings, on rank 0."""
    for note in notes if grid.rank == 0 else ():
        logging.getLogger("triax").warning("%s", note)
