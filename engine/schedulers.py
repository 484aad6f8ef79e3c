"""The configuration's scheduler -> a torch scheduler, by DeepSpeed's name or torch's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from .arguments import check_arguments
from .config_base import ConfigError, nearest
from .config_sections import SchedulerConfig
from .lr_schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

OURS: dict[str, type[LRScheduler]] = {
    cls.__name__: cls for cls in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}
_WITHOUT_JSON = {  # what they take cannot be written in JSON
    "LambdaLR": "it takes a function: pass initialize(lr_scheduler=lambda optimizer: LambdaLR(optimizer, ...))",
    "MultiplicativeLR": "it takes a function: pass initialize(lr_scheduler=lambda optimizer: MultiplicativeLR(...))",
}


def known() -> dict[str, type[LRScheduler]]:
    """Every schedule that a configuration can name: DeepSpeed's and torch's."""
    found = {name: getattr(lr_scheduler, name) for name in lr_scheduler.__all__ if name != "LRScheduler"}
    return OURS | {name: cls for name, cls in found.items() if name not in _WITHOUT_JSON}


def from_config(config: SchedulerConfig) -> Callable[[torch.optim.Optimizer], LRScheduler]:
    """A function that makes the schedule of an optimizer.

    Raises:
        ConfigError: a schedule or a parameter that does not exist, or a value that cannot be.
    """
    return _maker("scheduler", config.type, config.params)


def _maker(where: str, kind: str, given: Mapping[str, Any]) -> Callable[[torch.optim.Optimizer], LRScheduler]:
    if kind in _WITHOUT_JSON:
        raise ConfigError(f"{where}.type = {kind!r}: {_WITHOUT_JSON[kind]}")
    classes = known()
    name = {each.lower(): each for each in classes}.get(kind.lower())
    if name is None:
        raise ConfigError(f"{where}.type = {kind!r}: there is no such schedule; {nearest(kind, classes)}")
    cls = classes[name]
    params = {key: value for key, value in given.items() if value != "auto" or not _resolves(where, cls, key)}
    nested = params.pop("schedulers", None) if name in ("SequentialLR", "ChainedScheduler") else None
    skip = ("self", "optimizer", *(("schedulers",) if nested is not None else ()))
    check_arguments(f"{where}.params", name, cls, params, skip)
    if nested is None:
        return lambda optimizer: cls(optimizer, **params)
    if not isinstance(nested, list) or not all(isinstance(each, Mapping) and "type" in each for each in nested):
        raise ConfigError(f'{where}.params.schedulers is a list of schedules, {{"type": ..., "params": ...}} each')
    parts = [
        _maker(f"{where}.params.schedulers.{i}", str(each["type"]), each.get("params", {}))
        for i, each in enumerate(nested)
    ]

    def make(optimizer: torch.optim.Optimizer) -> LRScheduler:
        made = [part(optimizer) for part in parts]
        return cls(made, **params) if name == "ChainedScheduler" else cls(optimizer, made, **params)  # type: ignore[arg-type]

    return make


def _resolves(where: str, cls: type[LRScheduler], key: str) -> bool:
    """Whether a parameter that is "auto" has a value of its own to fall back on.

    Raises:
        ConfigError: it has none, because it depends on how long the run is.
    """
    if key == "warmup_max_lr" and cls is WarmupLR:
        return True  # None: the optimizer's rate
    parameter = inspect.signature(cls).parameters.get(key)
    if key in ("total_num_steps", "warmup_num_steps", "total_iters", "total_steps", "T_max") or (
        parameter is not None and parameter.default is inspect.Parameter.empty
    ):
        raise ConfigError(
            f'{where}.params.{key} is "auto", which only a trainer that knows the run can fill in: write it'
        )
    return parameter is not None


def advance(scheduler: LRScheduler, loss: Tensor | None, optimizer: torch.optim.Optimizer) -> None:
    """After an optimizer step: the next learning rates. ``loss`` is the step's, which ReduceLROnPlateau goes by."""
    if isinstance(scheduler, ReduceLROnPlateau):
        assert loss is not None  # the engine refuses such a schedule where it is not told
        scheduler.step(float(loss))
    else:
        scheduler.step()
    follow(scheduler, optimizer)


def follow(scheduler: LRScheduler, optimizer: torch.optim.Optimizer) -> None:
    """Where the schedule is over the optimizer that the engine's was made from: what it wrote there counts here."""
    source = scheduler.optimizer
    if source is not optimizer:
        for mine, its in zip(optimizer.param_groups, source.param_groups, strict=True):
            mine.update({key: value for key, value in its.items() if key not in ("params", "param_names")})


def over_another(scheduler: Any, optimizer: Any) -> Callable[[torch.optim.Optimizer], LRScheduler]:
    """A function that returns a schedule which is there already, over the optimizer that was passed with it.

    Raises:
        TypeError: it is over another one, or is no schedule.
    """
    if not isinstance(scheduler, LRScheduler) or scheduler.optimizer is not optimizer:
        raise TypeError(
            "lr_scheduler is neither a scheduler over the optimizer that is passed with it nor a function: pass one, "
            "lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)"
        )
    scheduler.optimizer._opt_called = True  # the engine's steps: else torch warns

    def made(_: torch.optim.Optimizer) -> LRScheduler:
        return scheduler

    return made
