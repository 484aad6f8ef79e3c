"""The configuration's optimizer -> torch's, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ..zero.optimizer import ELEMENTWISE, needs_whole_tensors
from .config import ConfigError, OptimizerConfig


def from_config(config: OptimizerConfig) -> Callable[[list[dict[str, Any]]], torch.optim.Optimizer]:
    """A function that makes the optimizer from parameter groups.

    As in DeepSpeed, ``Adam`` decouples its weight decay (it is AdamW) unless ``adam_w_mode`` is false.

    Raises:
        ConfigError: an optimizer or an argument that does not exist.
    """
    names = {name.lower(): name for name in ELEMENTWISE}
    name = names.get(config.type.lower())
    if name is None:
        raise ConfigError(f"optimizer.type = {config.type!r}: known are {', '.join(ELEMENTWISE)}")
    params = dict(config.params)
    if name in ("Adam", "AdamW") and params.pop("adam_w_mode", True):
        name = "AdamW"
    cls: type[torch.optim.Optimizer] = getattr(torch.optim, name)
    known = list(inspect.signature(cls).parameters)[1:]
    unknown = [key for key in params if key not in known]
    if unknown:
        raise ConfigError(f"optimizer.params: {name} has no {', '.join(unknown)}; it takes {', '.join(known)}")
    if "betas" in params:
        params["betas"] = tuple(params["betas"])
    return lambda groups: cls(_fused(cls, groups, params), **params)


def from_instance(optimizer: torch.optim.Optimizer) -> Callable[[list[dict[str, Any]]], torch.optim.Optimizer]:
    """A function that makes another of the same class, with the same options, from other parameter groups.

    Raises:
        ConfigError: it does not treat every element alone.
    """
    cls = type(optimizer)
    require_elementwise(optimizer)
    if optimizer.state:
        raise ConfigError(
            f"this {cls.__name__} has state already, which cannot follow its parameters into flat shards: pass one "
            "that has not stepped"
        )
    known = inspect.signature(cls).parameters
    defaults = {key: value for key, value in optimizer.defaults.items() if key in known}
    return lambda groups: cls(groups, **defaults)


def require_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that needs whole tensors."""
    if needs_whole_tensors(type(optimizer)):
        raise ConfigError(
            f"{type(optimizer).__name__} needs whole tensors, but optimizer state lives on flat ranges here; use one "
            f"of {', '.join(ELEMENTWISE)}"
        )


def _fused(cls: type[torch.optim.Optimizer], groups: list[dict[str, Any]], params: dict[str, Any]) -> Any:
    """Ask for torch's fused kernel where there is one and the user did not choose: one pass over a flat range."""
    choices = ("fused", "foreach", "capturable", "differentiable")
    if "fused" in inspect.signature(cls).parameters and not any(key in params for key in choices):
        return [{**group, "fused": True} for group in groups]
    return groups
