"""Learning-rate schedules by name: from a type and its parameters to a torch scheduler."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ...base.entry_points import offered
from ...base.errors import AgreedError, describe, nearest
from ...base.option_error import refusal
from .signature import check_arguments, defaults_of, trial

MakeScheduler = Callable[[torch.optim.Optimizer], LRScheduler]

_OTHERS = "triax.lr_schedules"  # the entry points of classes that torch lacks
_WITHOUT_JSON = {  # their arguments cannot be written in JSON
    "LambdaLR": "it takes a function: pass lr_scheduler=lambda optimizer: LambdaLR(optimizer, ...)",
    "MultiplicativeLR": "it takes a function: pass lr_scheduler=lambda optimizer: MultiplicativeLR(...)",
}


_TORCH = tuple(name for name in lr_scheduler.__all__ if name != "LRScheduler" and name not in _WITHOUT_JSON)


def names() -> list[str]:
    """Return the names of all schedules that options can name: those that packages offer, and torch's."""
    return [*sorted(offered(_OTHERS).names), *_TORCH]


def make_scheduler(kind: str, params: Mapping[str, Any], key: str = "lr_scheduler") -> MakeScheduler:
    """Check a schedule's name and parameters; return a function from an optimizer to the schedule over it.

    Args:
        kind: ``scheduler.type``, in any case of letters.
        params: ``scheduler.params``; ``SequentialLR`` and ``ChainedScheduler`` hold further schedules in
            ``schedulers``, each as ``{"type": ..., "params": ...}``.
        key: path of the option whose arguments these are.

    Raises:
        ConfigError: a schedule or a parameter that does not exist, or a value of the wrong type.
    """
    cls = class_of(kind, key)
    given = {name: value for name, value in params.items() if value != "auto" or not _has_default(key, cls, name)}
    parts = given.pop("schedulers", None) if cls.__name__ in ("SequentialLR", "ChainedScheduler") else None
    check_arguments(key, cls.__name__, cls, given, ("self", "optimizer", *(() if parts is None else ("schedulers",))))
    for name in ("step_size", "T_max"):  # torch takes them, and never steps or divides by 0
        if name in given and given[name] < 1:
            raise refusal(f"<{key}.{name}> = {given[name]}: give a whole number of at least 1")
    if parts is None:
        return lambda optimizer: cls(optimizer, **given)
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) and "type" in part for part in parts):
        raise refusal(f'<{key}.schedulers> is not a list of schedules: write [{{"type": ..., "params": {{...}}}}, ...]')
    makers = [
        make_scheduler(str(part["type"]), part.get("params", {}), f"{key}.schedulers.{i}.params")
        for i, part in enumerate(parts)
    ]

    def make(optimizer: torch.optim.Optimizer) -> LRScheduler:
        made: Any = [maker(optimizer) for maker in makers]
        return cls(made, **given) if cls.__name__ == "ChainedScheduler" else cls(optimizer, made, **given)

    return make


def make(kind: str, params: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Make a schedule by name over an optimizer.

    Raises:
        ConfigError: as ``make_scheduler``, or a value that the class refuses; the message names the parameter.
    """
    return trial("lr_scheduler", params, lambda given: make_scheduler(kind, given)(optimizer))


def resolved(kind: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a learning-rate schedule by name in full: the class's name and all its parameters.

    Parameters that are left out get their defaults.
    """
    cls = class_of(kind)
    given = {name: value for name, value in params.items() if value != "auto"}
    return {"type": cls.__name__, "params": defaults_of(cls, "optimizer") | given}


def class_of(kind: str, key: str = "lr_scheduler") -> type[LRScheduler]:
    """Return the class of a schedule by name, in any case of letters.

    Raises:
        ConfigError: there is no such schedule, or its arguments cannot be written in JSON.
    """
    if kind in _WITHOUT_JSON:
        raise refusal(f"<{key.removesuffix('.params')}.type> = {kind!r}: {_WITHOUT_JSON[kind]}")
    name = {known.lower(): known for known in names()}.get(kind.lower(), "")
    if not name:
        raise refusal(
            f"<{key.removesuffix('.params')}.type> = {describe(kind)}: there is no such schedule; "
            f"{nearest(kind, names())}"
        )
    cls: type[LRScheduler] = getattr(lr_scheduler, name) if name in _TORCH else offered(_OTHERS)[name].load()
    return cls


def _has_default(key: str, cls: type[LRScheduler], name: str) -> bool:
    """Return True if a parameter whose value is "auto" has a default; False if the class has no such parameter.

    Raises:
        ConfigError: the parameter has no default, because its value depends on the length of the run.
    """
    parameter = inspect.signature(cls).parameters.get(name)
    if name in ("total_num_steps", "warmup_num_steps", "total_iters", "total_steps", "T_max") or (
        parameter is not None and parameter.default is inspect.Parameter.empty
    ):
        raise refusal(f'<{key}.{name}> is "auto", which depends on the length of the run: write a value')
    return parameter is not None


def advance_schedule(
    schedule: LRScheduler | None,
    optimizer: torch.optim.Optimizer,
    loss: Tensor | None,
    arguments: Mapping[str, Any] | None = None,
) -> None:
    """Advance a learning-rate schedule by one step, and set the optimizer's learning rates.

    Args:
        schedule: the schedule. If it is None, nothing is done.
        optimizer: the engine's optimizer, whose learning rate the schedule sets.
        loss: the step's loss, which ReduceLROnPlateau needs. None if the engine was not given a loss.
        arguments: arguments of the schedule's ``step`` method, in place of the loss.

    Raises:
        AgreedError: if the schedule depends on the loss, and there is no loss.
    """
    if schedule is None:
        return
    before = [dict(group) for group in schedule.optimizer.param_groups]
    if arguments:
        schedule.step(**arguments)
    elif not isinstance(schedule, ReduceLROnPlateau):
        schedule.step()
    elif loss is None:
        raise AgreedError(
            "ReduceLROnPlateau needs the loss, which the engine knows only from engine.backward(loss): call that, or "
            'pass the loss to engine.step(lr_kwargs={"metrics": loss})'
        )
    else:
        schedule.step(float(loss))
    follow(schedule, optimizer, before)


def follow(
    scheduler: LRScheduler, optimizer: torch.optim.Optimizer, before: Sequence[Mapping[str, Any]] | None = None
) -> None:
    """Copy learning rates and other options of the parameter groups from a schedule's own optimizer to another one.

    A user's schedule sets them on the user's optimizer, but the engine steps ``optimizer``. No effect if both are one.

    Args:
        scheduler: the schedule.
        optimizer: the engine's optimizer.
        before: the groups before the schedule's step. Options that are as before are not copied, because the engine's
            optimizer may have changed its own: a count of steps, for instance.
    """
    source = scheduler.optimizer
    for number, group in enumerate(() if source is optimizer else source.param_groups):
        old: Mapping[str, Any] = {} if before is None else before[number]
        for key, value in group.items():
            unlike = isinstance(value, Tensor) or key not in old or old[key] is not value
            if unlike and key not in ("params", "param_names"):
                optimizer.param_groups[number][key] = value


def over_another(scheduler: Any, optimizer: Any) -> Callable[[torch.optim.Optimizer], LRScheduler]:
    """Check a schedule that the user passes as an object; return a function that returns it for any optimizer.

    Args:
        scheduler: the user's schedule.
        optimizer: the user's optimizer, over which the schedule must be.

    Raises:
        TypeError: the schedule is over another optimizer, or is not a schedule.
    """
    if not isinstance(scheduler, LRScheduler) or scheduler.optimizer is not optimizer:
        raise TypeError(
            "lr_scheduler= is neither a function nor a schedule of the optimizer that is passed with it: pass a "
            "function, lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)"
        )
    scheduler.optimizer._opt_called = True  # the engine steps: without this torch warns
    return lambda _: scheduler
