"""``torch_autocast`` and ``amp``: forward passes under ``torch.autocast``, beside weights that stay as they are."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..grid import Grid
from .config import Config, ConfigError, Fp16Config
from .config_base import no_such

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


def autocast_dtype(config: Config) -> torch.dtype | None:
    """What products are narrowed to; None: nothing is."""
    if config.torch_autocast.enabled:
        return _DTYPES[config.torch_autocast.dtype]
    return torch.float16 if config.amp.enabled and config.amp.opt_level == "O1" else None


def scaling(config: Config) -> Fp16Config | None:
    """How the loss is scaled: as ``fp16`` says, under autocast to float16 too; ``amp`` has keys of its own."""
    if config.fp16.enabled:
        return config.fp16
    if autocast_dtype(config) is not torch.float16:
        return None
    if config.torch_autocast.enabled:
        return config.fp16
    amp = config.amp  # apex: from 2^16, doubled after 2000 good steps, halved at each overflow
    return Fp16Config(
        loss_scale=amp.loss_scale or 0.0,
        loss_scale_window=2000,
        hysteresis=1,
        min_loss_scale=amp.min_loss_scale or 1.0,
    )


def narrow_gradients(config: Config, module: nn.Module, grid: Grid) -> frozenset[Tensor] | None:
    """The parameters whose gradients are summed over replicas in autocast's dtype; None: no class was named.

    Collective over the grid, where classes are named.

    Raises:
        ConfigError: on every rank: a class of which the whole model has none.
    """
    section = config.torch_autocast
    if not section.enabled or not section.lower_precision_safe_modules:
        return None
    wanted = set(section.lower_precision_safe_modules)
    found: set[Tensor] = set()
    here: set[str] = set()
    for part in module.modules():
        names = _names(type(part))
        here |= names
        if names & wanted:
            found.update(part.parameters(recurse=False))
    everywhere = set().union(*grid.world.all_gather_object(here))
    for name in section.lower_precision_safe_modules:
        if name not in everywhere:
            known = sorted(each for each in everywhere if "." in each)
            raise ConfigError(no_such("torch_autocast.lower_precision_safe_modules", name, known))
    return frozenset(found)


def _names(kind: type) -> set[str]:
    """What a class goes by: ``torch.nn.modules.linear.Linear``, ``torch.nn.Linear``."""
    names = {f"{kind.__module__}.{kind.__qualname__}"}
    if getattr(nn, kind.__name__, None) is kind:
        names.add(f"torch.nn.{kind.__name__}")
    return names
