"""The configuration's optimizer -> torch's, by DeepSpeed's name or torch's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ..grid import Grid
from ..zero.onebit_step import stepped_by
from ..zero.optimizer import ELEMENTWISE, needs_whole_tensors
from ..zero.whole import WholeTensors
from . import one_bit
from .arguments import check_arguments
from .config import Config
from .config_base import ConfigError, nearest
from .config_sections import OptimizerConfig
from .elementwise import Lion, UncorrectedAdam
from .one_bit import ONE_BIT

_ADAM = ("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam")
_OTHER_NAMES = {"DeepSpeedCPUAdagrad": "Adagrad", "DeepSpeedCPULion": "Lion", "FusedLion": "Lion"}
KNOWN = (*ELEMENTWISE, "Lion", "Adafactor", "Muon", *ONE_BIT, "FusedAdam", "DeepSpeedCPUAdam", *_OTHER_NAMES)

# What cannot be stepped on flat ranges, or is not here, and what comes nearest.
_REFUSED = {
    "Lamb": ("its trust ratio is of a whole tensor", "AdamW, or OneBitLamb in stage 0"),
    "FusedLamb": ("its trust ratio is of a whole tensor", "AdamW, or OneBitLamb in stage 0"),
    "LBFGS": ("it evaluates the loss several times a step", "AdamW"),
    "SparseAdam": ("it steps sparse gradients, and gradients are dense here", "Adam"),
    "MuAdam": ("its rates depend on the width of each layer", "Adam, with parameter groups of their own rates"),
    "MuAdamW": ("its rates depend on the width of each layer", "AdamW, with parameter groups of their own rates"),
    "MuSGD": ("its rates depend on the width of each layer", "SGD, with parameter groups of their own rates"),
}
# What needs whole tensors, and is stepped where every rank has them.
WHOLE = {
    "Adafactor": ("its second moments are sums over rows and columns of a tensor", "Lion, with half of Adam's state"),
    "Muon": ("it makes a whole matrix orthogonal", "AdamW"),
}
MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def from_config(config: OptimizerConfig) -> MakeOptimizer:
    """A function that makes the optimizer from parameter groups.

    As in DeepSpeed, ``Adam`` decouples its weight decay (it is AdamW) unless ``adam_w_mode`` is false; and so do
    ``FusedAdam`` and ``DeepSpeedCPUAdam``, which are names for it: an update runs fused where torch has a kernel,
    and on the CPU where the state is offloaded.

    Raises:
        ConfigError: an optimizer or an argument that does not exist, or one that is not for flat ranges.
    """
    cls, params = resolve(config)
    return _maker(cls, lambda groups: cls(_fused(cls, groups, params), **params))


def resolve(config: OptimizerConfig) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class that a configuration names, and its arguments under the class's own names.

    Raises:
        ConfigError: as ``from_config``.
    """
    given = config.type.lower()
    for name, (reason, instead) in _REFUSED.items():
        if name.lower() == given:
            raise ConfigError(
                f"optimizer.type = {config.type!r}: {reason}, and optimizer state lives on flat ranges here; use "
                f"{instead}"
            )
    name = {each.lower(): each for each in KNOWN}.get(given, "")
    if not name:
        hint = nearest(config.type, KNOWN)
        raise ConfigError(f"optimizer.type = {config.type!r}: there is no such optimizer; {hint}")
    params = dict(config.params)
    if "max_grad_norm" in params:
        raise ConfigError("optimizer.params.max_grad_norm: write gradient_clipping, outside of optimizer, instead")
    cls = _adam(name, params) if name in _ADAM else _class(_OTHER_NAMES.get(name, name))
    if name in ONE_BIT:
        one_bit.take_out(params)
    _drop(params, "set_grad_none", bool)
    if _drop(params, "fp32_optimizer_states", bool) is False:
        raise ConfigError(
            "optimizer.params.fp32_optimizer_states: the state has the masters' dtype, fp32: leave it out"
        )
    for key in [key for key, value in params.items() if isinstance(value, str) and value == "auto"]:
        if key == "lr":
            raise ConfigError('optimizer.params.lr is "auto", which a trainer fills in: write the learning rate')
        del params[key]  # the optimizer's own default
    check_arguments("optimizer.params", name, cls, params, ("self", "params"))
    if "betas" in params:
        params["betas"] = tuple(params["betas"])
    return cls, params


def _adam(name: str, params: dict[str, Any]) -> type[torch.optim.Optimizer]:
    """One of Adam's forms; takes DeepSpeed's switches out of the arguments."""
    _drop(params, "torch_adam", bool)  # it always is
    modes = {key: value for key in ("adam_w_mode", "adamw_mode") if (value := _drop(params, key, bool)) is not None}
    if len(set(modes.values())) > 1:
        raise ConfigError("optimizer.params.adam_w_mode and adamw_mode are one switch, and differ: give one of them")
    decoupled = name == "AdamW" or next(iter(modes.values()), True)
    if name != "AdamW":
        params.setdefault("weight_decay", 0.0)  # torch's AdamW has another default
    if _drop(params, "bias_correction", bool) is False:
        if params.pop("amsgrad", False):
            raise ConfigError("optimizer.params.amsgrad needs bias_correction: leave out one of them")
        params["decoupled"] = decoupled
        return UncorrectedAdam
    return torch.optim.AdamW if decoupled else torch.optim.Adam


def _class(name: str) -> type[torch.optim.Optimizer]:
    if name == "Lion":
        return Lion
    if name in ONE_BIT:
        return ONE_BIT[name]
    cls: type[torch.optim.Optimizer] = getattr(torch.optim, name)
    return cls


def _drop(params: dict[str, Any], key: str, kind: type) -> Any:
    """Take a switch of DeepSpeed's out of the arguments; None where it is not given."""
    value = params.pop(key, None)
    if value is not None and value != "auto" and not isinstance(value, kind):
        raise ConfigError(f"optimizer.params.{key}: give true or false, not {value!r}")
    return None if value == "auto" else value


def from_instance(optimizer: torch.optim.Optimizer) -> MakeOptimizer:
    """A function that makes another of the same class, with the same options, from other parameter groups.

    Raises:
        ConfigError: it cannot be stepped here, or has stepped already.
    """
    cls = type(optimizer)
    if cls.__name__ not in WHOLE:
        require_elementwise(optimizer)
    if optimizer.state:
        raise ConfigError(
            f"this {cls.__name__} has state already, which cannot follow its parameters into flat shards: pass one "
            "that has not stepped"
        )
    known = inspect.signature(cls).parameters
    defaults = {key: value for key, value in optimizer.defaults.items() if key in known}
    return _maker(cls, lambda groups: cls(groups, **defaults))


def require_whole_tensors(name: str, config: Config, grid: Grid | None = None) -> None:
    """Refuse an optimizer for whole tensors where no rank has them.

    Args:
        name: of its class.
        config: stage 0 of ZeRO, and no offload, leave them whole.
        grid: and so does a tensor axis of 1; None: not known yet.
    """
    if name in ONE_BIT:
        one_bit.require_replicas(name, config, grid)
    if name not in WHOLE:
        return
    reason, instead = WHOLE[name]
    zero = config.zero_optimization
    why = f"optimizer.type = {name!r}: {reason}, and "
    if zero.stage > 0:
        raise ConfigError(f"{why}zero_optimization.stage {zero.stage} steps flat ranges: set stage 0, or use {instead}")
    if zero.offload_optimizer.device != "none" or zero.sub_group_size is not None:
        raise ConfigError(
            f"{why}zero_optimization.offload_optimizer and sub_group_size step flat ranges: leave them out, or use "
            f"{instead}"
        )
    if grid is not None and grid.tensor.size > 1:
        raise ConfigError(f"{why}the grid's tensor axis of {grid.tensor.size} shards tensors: use {instead}")


def require_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that needs whole tensors."""
    if needs_whole_tensors(type(optimizer)):
        raise ConfigError(
            f"{type(optimizer).__name__} needs whole tensors, but optimizer state lives on flat ranges here; use one "
            f"of {', '.join((*ELEMENTWISE, 'Lion'))}"
        )


def _maker(cls: type[torch.optim.Optimizer], make: MakeOptimizer) -> MakeOptimizer:
    return WholeTensors(make) if cls.__name__ in WHOLE else stepped_by(cls, make)


def _fused(cls: type[torch.optim.Optimizer], groups: list[dict[str, Any]], params: dict[str, Any]) -> Any:
    """Ask for torch's fused kernel where there is one and the user did not choose: one pass over a flat range."""
    choices = ("fused", "foreach", "capturable", "differentiable")
    if "fused" in inspect.signature(cls).parameters and not any(key in params for key in choices):
        return [{**group, "fused": True} for group in groups]
    return groups
