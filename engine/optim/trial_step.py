"""Trial steps: a named optimizer and schedule, made once over one number, so that wrong arguments fail at once."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .optimizers import LAYERWISE, WHOLE_TENSOR, fused, resolve
from .schedulers import advance_schedule, make_scheduler
from .signature import trial

_STEPS = 3  # an argument that something is divided by shows an error by the third step


def try_optimizer(kind: str, params: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Make an optimizer over one parameter, take a few steps, and return it.

    Args:
        kind: ``optimizer.type``.
        params: ``optimizer.params``.

    Raises:
        ConfigError: the optimizer cannot be made or stepped. The message names the argument that causes the error.
    """
    resolve(kind, params)  # refuses wrong names and types
    return trial("optimizer", params, lambda given: _stepped(kind, given))


def try_scheduler(
    kind: str,
    params: Mapping[str, Any],
    optimizer: tuple[str, Mapping[str, Any]] | None,
) -> None:
    """Make a schedule over an optimizer, and take a few steps.

    Args:
        kind: ``scheduler.type``.
        params: ``scheduler.params``.
        optimizer: name and arguments of the optimizer. If None, the schedule is tried over an AdamW.

    Raises:
        ConfigError: the schedule cannot be made or stepped. The message names the parameter that causes the error.
    """
    make_scheduler(kind, params)  # refuses wrong names and types
    over = optimizer or ("AdamW", {"lr": 1e-3})
    trial("lr_scheduler", params, lambda given: _scheduled(kind, given, over))


def _stepped(kind: str, params: Mapping[str, Any], groups: int = 1) -> torch.optim.Optimizer:
    cls, given = resolve(kind, params)
    shape = (2, 2) if cls.__name__ in (*WHOLE_TENSOR, *LAYERWISE) else (1,)
    parameters = [nn.Parameter(torch.ones(shape)) for _ in range(groups)]
    optimizer = cls(fused(cls, [{"params": [parameter]} for parameter in parameters], given), **given)
    for parameter in parameters:
        parameter.grad = torch.ones(shape)
    for _ in range(0 if params.get("capturable") else _STEPS):  # capturable optimizers step on a GPU only
        optimizer.step()
    return optimizer


def _scheduled(kind: str, params: Mapping[str, Any], over: tuple[str, Mapping[str, Any]]) -> None:
    # A list has a value for each parameter group of the real optimizer, or, in torch's, one for each milestone.
    sizes = list(dict.fromkeys((1, *(len(value) for value in params.values() if isinstance(value, list) and value))))
    for groups in sizes:
        optimizer = _stepped(*over, groups)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                scheduler = make_scheduler(kind, params)(optimizer)
                for _ in range(_STEPS):
                    advance_schedule(scheduler, optimizer, torch.ones(()))
                return
            except ValueError:
                if groups == sizes[-1]:
                    raise
