"""Arguments of an engine: its options, the grid, and the parameter groups."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ...base.accelerators import move_module
from ...base.checks import check_kind
from ...base.errors import ConfigError, no_such
from ...base.option_error import refusal
from ...grid.grid import Grid
from ...options.base import declared
from ...options.engine import EngineOptions
from ...options.named import Optimizer
from ...pipe.module import PipelineModule

_KINDS: dict[str, tuple[Any, str]] = {
    "optimizer": (
        (torch.optim.Optimizer, Callable, Optimizer),
        "an optimizer, or a function from parameter groups to one",
    ),
    "model_parameters": (Iterable, "model.parameters(), or parameter groups"),
    "parameters": (Iterable, "model.parameters(), or parameter groups"),
    "collate_fn": (Callable, "a function from a list of samples to a batch"),
    "grid": (Grid, "a triax.Grid"),
}
Groups = list[tuple[dict[str, Any], list[nn.Parameter]]]


def given_options(options: EngineOptions | None, keywords: Mapping[str, Any]) -> EngineOptions:
    """Return the options of an engine: those given, with the keywords in place of some of them."""
    if options is not None and not isinstance(options, EngineOptions):
        raise TypeError(f"options is a {type(options).__name__}: pass triax.EngineOptions(...), or options by keywords")
    if options is None:
        return EngineOptions.of(keywords)
    known = [option.name for option in declared(EngineOptions)]
    for name in keywords:
        if name not in known:
            raise refusal(no_such("Engine", name, known))
    return options.changed(**keywords)


def check_arguments(call: str, **arguments: Any) -> None:
    """Check the classes of arguments of a call that makes an engine.

    Raises:
        ArgumentError: an argument of another class; the message says what to pass.
    """
    for name, value in arguments.items():
        kinds, wanted = _KINDS[name]
        if value is not None:
            check_kind(call, kinds, wanted, **{name: value})


def choose_grid(model: nn.Module, grid: Grid | None, options: EngineOptions) -> Grid:
    """Return the grid to train on: the model's own, the one given, or all processes as replicas."""
    if isinstance(model, PipelineModule):
        if grid is not None and grid is not model.grid:
            raise ConfigError("the PipelineModule was built on another grid than grid=: leave grid= out")
        if not options.batch.counted:
            raise refusal(
                "<batch.counted> is false, but train_batch of a PipelineModule runs all microbatches of a step: "
                "leave it out",
            )
        return model.grid
    if options.schedule.value is not None:
        raise refusal(
            f"schedule is {options.schedule.name}, but a {type(model).__name__} runs as one stage: list its "
            "layers in a PipelineModule(layers, grid=grid, loss_fn=...), or leave schedule= out",
        )
    if options.batch.labels == "sent":
        raise refusal(
            f"<batch.labels> is sent, but a {type(model).__name__} has no stages to send labels to: leave it out",
        )
    if grid is None:
        return Grid()
    if grid.pipe.size > 1:
        raise ConfigError(
            f"the grid has {grid.pipe.size} pipe stages, but a {type(model).__name__} is not cut into stages: list its "
            "layers in a PipelineModule(layers, grid=grid, loss_fn=...), or make the grid with pipe=1"
        )
    return grid


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
                "model_parameters is empty, so nothing would be trained: pass a new model.parameters(), because its "
                "iterator can be read only once, or leave it out"
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
                    f". If they are the model's, the schedule moved stages: its stages are on the ranks {placement}, "
                    f"so pass PipelineModule(..., placement={placement}) and take the parameters then"
                )
            raise ConfigError(
                f"{strangers} parameters to train are not the model's: take them from model.parameters(), or pass as "
                f"optimizer a function of them, such as partial(torch.optim.AdamW, lr=1e-3){where}"
            )
        twice = sum(parameter in seen for parameter in parameters)
        if twice:
            raise ConfigError(f"{twice} parameters are in more than one parameter group: put each into one")
        seen.update(parameters)
        groups.append(({key: value for key, value in group.items() if key != "params"}, parameters))
    return groups


def untrained_in_loss(model: nn.Module) -> str | None:
    """Return a note if a loss function that is no module holds parameters: the model does not train them."""
    loss_fn = getattr(model, "loss_fn", None)
    if not isinstance(model, PipelineModule) or isinstance(loss_fn, nn.Module):
        return None
    entries = [entry for entry in model.layer_specs if isinstance(entry, nn.Module)]
    known = {*model.parameters(), *(parameter for entry in entries for parameter in entry.parameters())}
    function = getattr(loss_fn, "func", loss_fn)  # of a functools.partial
    held = [getattr(function, "__self__", None), *getattr(function, "__dict__", {}).values()]
    held += [*getattr(loss_fn, "args", ()), *getattr(loss_fn, "keywords", {}).values(), function]
    held += inspect.getclosurevars(function).nonlocals.values() if inspect.isfunction(function) else ()
    for owner in held:
        parameters = owner.parameters() if isinstance(owner, nn.Module) else (owner,)
        if any(isinstance(p, nn.Parameter) and p.requires_grad and p not in known for p in parameters):
            return (
                f"loss_fn uses parameters of a {type(owner).__name__} that this engine does not train, because loss_fn "
                "is not a module: pass an nn.Module that holds them, and they are trained as loss_fn's"
            )
    return None


def to_device(model: nn.Module, grid: Grid) -> None:
    """Move a plain module to the grid's device.

    Raises:
        ConfigError: a parameter is on the meta device.
    """
    away = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if away is not None:
        raise ConfigError(
            f"{away} is on the meta device, which has no memory for values: build the model on {grid.device}, or list "
            'its layers in a PipelineModule(..., device="meta"), which is built shard by shard'
        )
    move_module(model, grid.device)
