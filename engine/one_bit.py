"""The optimizers that compress their momentum, in DeepSpeed's dialect, and where they can be."""

from __future__ import annotations

from typing import Any

import torch

from ..grid import Grid
from ..zero.onebit_adam import OneBit, OneBitAdam, ZeroOneAdam
from ..zero.onebit_lamb import OneBitLamb
from .config import Config
from .config_base import ConfigError, describe

ONE_BIT: dict[str, type[OneBit]] = {"OneBitAdam": OneBitAdam, "ZeroOneAdam": ZeroOneAdam, "OneBitLamb": OneBitLamb}

# DeepSpeed's arguments that are no optimizer's here: what each may be.
_IDLE = {"cuda_aware": bool, "comm_backend_name": str}
_OFF = {
    "eps_inside_sqrt": "eps is added to the root of the variance, in the papers too, and DeepSpeed does so whatever is "
    "given: leave it out",
    "amsgrad": "a variance that stands still has no maximum to follow: leave it out",
}


def take_out(params: dict[str, Any]) -> None:
    """Take DeepSpeed's further arguments out of an optimizer's own.

    Raises:
        ConfigError: one asks for what there is not, or is of another type.
    """
    for key, kind in _IDLE.items():
        value = params.pop(key, kind())
        if not isinstance(value, kind):
            wanted = "true or false" if kind is bool else "a text in quotes"
            raise ConfigError(f"optimizer.params.{key}: give {wanted}, not {describe(value)}")
    for key, reason in _OFF.items():
        value = params.pop(key, False)
        if value is not False and value != "auto":
            raise ConfigError(f"optimizer.params.{key}: {reason}")


def require_replicas(name: str, config: Config, grid: Grid | None) -> None:
    """Refuse one of them where not every replica has all of it.

    Args:
        name: of its class.
        config: stage 0 of ZeRO, and no offload, leave it whole.
        grid: and for ``OneBitLamb`` so does a tensor axis of 1; None: not known yet.
    """
    zero = config.zero_optimization
    why = f"optimizer.type = {name!r}: every replica has all of its state, and errors of compression that are its own"
    if zero.stage > 0:
        raise ConfigError(
            f"{why}, so zero_optimization.stage {zero.stage} has nothing to shard: set stage 0, or use AdamW"
        )
    if zero.offload_optimizer.device != "none" or zero.sub_group_size is not None:
        raise ConfigError(
            f"{why}, all in one step: leave zero_optimization.offload_optimizer and sub_group_size out, or use AdamW"
        )
    if name == "OneBitLamb" and grid is not None and grid.tensor.size > 1:
        raise ConfigError(
            f"optimizer.type = {name!r}: its coefficients are of whole tensors, and the grid's tensor axis of "
            f"{grid.tensor.size} shards tensors: use OneBitAdam"
        )


def require_told(optimizer: torch.optim.Optimizer) -> None:
    """Refuse one of them that a function made: what steps it has to be known before."""
    if isinstance(optimizer, OneBit):
        name = type(optimizer).__name__
        raise ConfigError(
            f"a function made a {name}, which is stepped in a way of its own: pass optimizer={name}"
            f"(model.parameters(), ...) itself, or name it in the configuration"
        )
