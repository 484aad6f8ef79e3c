"""Dtypes of weights and autocast, and the loss scale: ``bf16``, ``fp16``, ``torch_autocast`` and ``amp``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...config.precision import Fp16Config
from ...config.schema import Config
from ...grid.dtypes import dtype_of
from ...grid.errors import ConfigError, no_such
from ...grid.grid import Grid
from ...optim.loss_scale import LossScaler


def weight_dtype(config: Config) -> torch.dtype | None:
    """Return bf16 or fp16 if the configuration enables it. None if the weights keep their dtype."""
    return torch.bfloat16 if config.bf16.enabled else torch.float16 if config.fp16.enabled else None


def autocast_dtype(config: Config) -> torch.dtype | None:
    """Return the dtype to which ``torch.autocast`` casts in forward passes. None if autocast is off."""
    if config.torch_autocast.enabled:
        return dtype_of(config.torch_autocast.dtype)
    return torch.float16 if config.amp.enabled and config.amp.opt_level == "O1" else None


def make_loss_scaler(config: Config) -> LossScaler | None:
    """Return a new loss scaler with the keys of ``fp16`` or ``amp``. None if the model does not compute in float16.

    Autocast to float16 needs a loss scale too: under ``torch_autocast`` it has the keys of ``fp16``.
    """
    if config.fp16.enabled or (config.torch_autocast.enabled and autocast_dtype(config) is torch.float16):
        return LossScaler(config.fp16)
    if autocast_dtype(config) is not torch.float16:
        return None
    amp = config.amp  # apex: starts at 2^16, doubled after 2000 steps without overflow, halved at each overflow
    section = Fp16Config(
        loss_scale=amp.loss_scale or 0.0,
        loss_scale_window=2000,
        hysteresis=1,
        min_loss_scale=amp.min_loss_scale or 1.0,
    )
    return LossScaler(section)


def low_precision_parameters(config: Config, module: nn.Module, grid: Grid) -> frozenset[Tensor] | None:
    """Return the parameters whose gradients are summed over replicas in autocast's dtype.

    The result is None if ``torch_autocast.lower_precision_safe_modules`` names no class. If it names classes, the call
    is collective over the grid.

    Raises:
        ConfigError: on every rank, if no rank has a module of one of the named classes.
    """
    section = config.torch_autocast
    if not section.enabled or not section.lower_precision_safe_modules:
        return None
    wanted = set(section.lower_precision_safe_modules)
    found: set[Tensor] = set()
    here: set[str] = set()
    for part in module.modules():
        names = _class_names(type(part))
        here |= names
        if names & wanted:
            found.update(part.parameters(recurse=False))
    everywhere = set().union(*grid.world.all_gather_json(here))
    for name in section.lower_precision_safe_modules:
        if name not in everywhere:
            known = sorted(each for each in everywhere if "." in each)
            raise ConfigError(no_such("torch_autocast.lower_precision_safe_modules", name, known))
    return frozenset(found)


def _class_names(kind: type) -> set[str]:
    """Return the names that a class can be given by: ``torch.nn.modules.linear.Linear``, ``torch.nn.Linear``."""
    names = {f"{kind.__module__}.{kind.__qualname__}"}
    if getattr(nn, kind.__name__, None) is kind:
        names.add(f"torch.nn.{kind.__name__}")
    return names
