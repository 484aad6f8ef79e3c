"""The configuration's optimizer and schedule, made once over a number: what cannot be is refused before a start."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from . import optimizers, schedulers
from .arguments import trial
from .config import Config
from .config_sections import OptimizerConfig, SchedulerConfig

_STEPS = 3  # what divides by a parameter does it by the third


def try_out(config: Config) -> None:
    """Make the optimizer and the schedule, and take a few steps with them.

    Raises:
        ConfigError: they cannot be made, or do not step.
    """
    if config.optimizer is not None:
        kind = config.optimizer.type
        cls, _ = optimizers.resolve(config.optimizer)  # whatever is wrong with a name or a type
        optimizers.require_whole_tensors(cls.__name__, config)
        trial("optimizer.params", config.optimizer.params, lambda given: _optimizer(kind, given))
    if config.scheduler is not None:
        chosen = config.scheduler
        schedulers.from_config(chosen)
        trial("scheduler.params", chosen.params, lambda given: _schedule(config.optimizer, chosen.type, given))


def _optimizer(kind: str, params: Mapping[str, Any], groups: int = 1) -> torch.optim.Optimizer:
    shape = (2, 2) if kind.lower() in map(str.lower, optimizers.WHOLE) else (1,)
    parameters = [nn.Parameter(torch.ones(shape)) for _ in range(groups)]
    made = optimizers.from_config(OptimizerConfig(type=kind, params=dict(params)))
    optimizer = made([{"params": [parameter]} for parameter in parameters])
    for parameter in parameters:
        parameter.grad = torch.ones(shape)
    for _ in range(0 if params.get("capturable") else _STEPS):  # which steps on a GPU alone
        optimizer.step()
    return optimizer


def _schedule(optimizer: OptimizerConfig | None, kind: str, params: Mapping[str, Any]) -> None:
    lists = [len(value) for value in params.values() if isinstance(value, list) and value]
    # A list has a value for each parameter group of the real optimizer, or, in torch's, one for each milestone.
    for groups in dict.fromkeys((1, *lists)):
        chosen = optimizer or OptimizerConfig(type="AdamW", params={"lr": 1e-3})
        over = _optimizer(chosen.type, chosen.params, groups)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                scheduler = schedulers.from_config(SchedulerConfig(type=kind, params=dict(params)))(over)
                for _ in range(_STEPS):
                    schedulers.advance(scheduler, torch.ones(()), over)
                return
            except ValueError:
                if groups == [1, *lists][-1]:
                    raise
