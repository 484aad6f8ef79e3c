"""Optimizer over ZeRO's flat ranges, and its learning-rate schedule: by name, by instance or by function."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from ...base.errors import ConfigError
from ...base.formulas import optimizer_states
from ...base.option_error import refusal
from ...grid.grid import Grid
from ...grid.layout import layout_of
from ...options.engine import EngineOptions
from ...options.named import LRSchedule, Optimizer
from ...options.zero import Zero
from ...zero.protocols import MakeOptimizer
from ...zero.range_stepper import ELEMENTWISE, OptimizerFactory, needs_whole_tensors, with_own_stepper
from ...zero.whole_tensors import WholeStepper
from ..optim import optimizers, schedulers
from ..optim.layerwise import split_for_muon
from ..optim.schedulers import MakeScheduler
from .arguments import Groups, parameter_groups


def choose_optimizer(
    options: EngineOptions, grid: Grid, groups: Iterable[tuple[dict[str, Any], list[nn.Parameter]]]
) -> OptimizerFactory | None:
    """Return the factory of the optimizer over flat ranges. None if there is no optimizer.

    Args:
        options: the options, whose ``optimizer`` is an instance, a function from parameter groups, or a name.
        grid: the grid, whose tensor axis may shard parameters.
        groups: the parameters to train, in groups with their options.

    Raises:
        ConfigError: if the optimizer cannot be used in this setup.
    """
    optimizer = options.optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        factory = _like_instance(optimizer)
        require_whole_tensors(type(optimizer), options.zero, grid.tensor.size)
        _require_fitting(type(optimizer), groups)
        return factory
    if optimizer is None:
        return None
    if isinstance(optimizer, Optimizer):
        cls, params = optimizers.resolve(optimizer.type, optimizer.arguments)
        if optimizer.state is not None:
            _require_elementwise_state(cls, optimizer)
    elif (resolved := _class_of(optimizer)) is None:
        return _from_function(optimizer)
    else:
        cls, params = resolved
        if cls is torch.optim.Muon:
            raise refusal("<optimizer> torch.optim.Muon steps only matrices: write triax.Optimizer('Muon', lr=...)")
        if cls.__name__ not in optimizers.WHOLE_TENSOR:
            require_elementwise(cls)
    require_whole_tensors(cls, options.zero, grid.tensor.size)
    optimizers.require_steps_on(grid.device.type, params)
    _require_fitting(cls, groups)
    if not isinstance(optimizer, Optimizer):
        return _with_stepper(cls, lambda groups: cls(optimizers.fused(cls, groups, params), **params))
    return _with_stepper(cls, lambda groups: optimizers.make(optimizer.type, optimizer.arguments, groups))


def state_tensors(optimizer: Any) -> int:
    """Return the number of state tensors of an optimizer; of a function that is no class of torch's, AdamW's."""
    if isinstance(optimizer, Optimizer):
        return optimizer_states(optimizer.type, optimizer.arguments)
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer_states(type(optimizer).__name__, optimizer.defaults)
    cls, arguments = (None, {}) if optimizer is None else _class_of(optimizer) or (None, {})
    return optimizer_states("adamw" if cls is None else cls.__name__, arguments)


def optimizer_groups(model: nn.Module, optimizer: Any, parameters: Any) -> Groups:
    """Return the parameter groups, as ``parameter_groups`` does. For Muon, each is split in matrices and the rest."""
    groups = parameter_groups(model, optimizer, parameters)
    named = optimizer.type.lower() if isinstance(optimizer, Optimizer) else ""
    return split_for_muon(model, groups) if named == "muon" else groups


def choose_scheduler(options: EngineOptions) -> MakeScheduler | None:
    """Return a function that makes the learning-rate schedule over the optimizer. None if there is no schedule.

    Raises:
        OptionError: if there is a schedule by name but no optimizer.
        TypeError: if ``lr_scheduler`` is over another optimizer.
    """
    given = options.lr_scheduler
    if not isinstance(given, LRSchedule):
        return given if given is None or callable(given) else schedulers.over_another(given, options.optimizer)
    if options.optimizer is None:
        raise refusal(
            "<lr_scheduler> has no optimizer to set the learning rate of: set <optimizer>, or leave it out",
        )
    return partial(schedulers.make, given.type, given.arguments)


def _class_of(make: MakeOptimizer) -> tuple[type[torch.optim.Optimizer], dict[str, Any]] | None:
    """Return the class and the arguments of ``functools.partial(torch.optim.AdamW, lr=1e-3)``, or of the class itself.

    They are known before there are parameters: the engine then checks them at once, and takes torch's fused kernel, as
    for an optimizer by name. None for another function.
    """
    cls, params = (make.func, make.keywords) if isinstance(make, partial) and not make.args else (make, {})
    return (cls, params) if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) else None


def _like_instance(optimizer: torch.optim.Optimizer) -> OptimizerFactory:
    """Return the factory of an optimizer with the class and options of the given one, for other parameter groups.

    Raises:
        ConfigError: if the optimizer needs unsharded tensors, or if it has already made a step.
    """
    cls, defaults = optimizers.sharded_form(type(optimizer), optimizer.defaults)
    if cls.__name__ not in optimizers.WHOLE_TENSOR:
        require_elementwise(cls)
    if optimizer.state:
        raise ConfigError(
            f"this {cls.__name__} has state already, which does not fit the flat shards that ZeRO makes of its "
            "parameters: pass an optimizer that has not made a step"
        )

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        made = cls(groups, **defaults)
        vars(made).update(settings if cls is type(optimizer) else {})
        return made

    # Settings that a class keeps in its object, and not in its groups.
    known, nests = vars(torch.optim.SGD([torch.zeros(1)])), (torch.Tensor, nn.Module, torch.optim.Optimizer)
    settings = {
        key: value
        for key, value in vars(optimizer).items()
        if key not in known and not isinstance(value, (dict, list, set, *nests)) and not callable(value)
    }
    return _with_stepper(cls, make)


def _from_function(make: MakeOptimizer) -> OptimizerFactory:
    """Return the factory of the user's function, with a check of the optimizer that it makes.

    Raises:
        ConfigError: by the factory's ``make``, if it made an optimizer that needs unsharded tensors, or that has a
            stepper of its own.
    """

    def checked(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        optimizer = make(groups)
        require_elementwise(type(optimizer))
        if hasattr(optimizer, "stepper"):
            name = type(optimizer).__name__
            raise ConfigError(
                f"a function made a {name}, which ZeRO cannot step from a function: pass "
                f"optimizer={name}(model.parameters(), ...) itself, or triax.Optimizer('{name}', ...)"
            )
        return optimizer

    return OptimizerFactory(checked)


def require_whole_tensors(cls: type[torch.optim.Optimizer], zero: Zero, tensor: int = 1) -> None:
    """Refuse an optimizer that needs unsharded tensors if ZeRO or the tensor axis shards them.

    Raises:
        ConfigError: as ``optim.optimizers.require_whole_tensors``.
    """
    weights = zero.offload_parameters.device != "none" and zero.stage == 3  # their optimizer state goes with them
    offload = weights or zero.offload_optimizer.device != "none" or zero.sub_group_size is not None
    optimizers.require_whole_tensors(cls, 1 if zero.stage == "auto" else zero.stage, offload, tensor)


def _require_fitting(
    cls: type[torch.optim.Optimizer], groups: Iterable[tuple[dict[str, Any], list[nn.Parameter]]]
) -> None:
    """Refuse complex parameters for an optimizer on whole tensors (Lamb, Muon, Adafactor), and experts for Adafactor.

    Raises:
        ConfigError: a parameter to train is complex, or holds several experts; the message names it.
    """
    for parameter in (p for _, parameters in groups for p in parameters):
        layout = layout_of(parameter)
        if cls.__name__ in optimizers.WHOLE_TENSOR and layout.expert_dim is not None:
            raise ConfigError(
                f"optimizer {cls.__name__} scales each tensor by its root mean square, and "
                f"{layout.name or 'a parameter'} of shape {list(layout.shape)} holds "
                f"{layout.shape[layout.expert_dim]} experts, which would share one scale: take AdamW, Lion or Lamb, "
                "which steps each expert as a layer of its own"
            )
        if parameter.is_complex() and cls.__name__ in (*optimizers.WHOLE_TENSOR, *optimizers.LAYERWISE):
            raise ConfigError(
                f"optimizer {cls.__name__} steps real tensors, and {layout_of(parameter).name or 'a parameter'} of "
                f"shape {list(parameter.shape)} is {str(parameter.dtype).removeprefix('torch.')}: take AdamW, or make "
                "the parameter of pairs of real numbers, and call torch.view_as_complex on it in the module"
            )


def require_elementwise(cls: type[torch.optim.Optimizer]) -> None:
    """Refuse an optimizer that needs unsharded tensors.

    Raises:
        ConfigError: if the class is an optimizer of torch whose update is not elementwise.
    """
    if needs_whole_tensors(cls):
        raise ConfigError(
            f"{cls.__name__} needs whole tensors, but ZeRO keeps flat ranges of parameters and optimizer state. Use "
            f"one of {', '.join((*ELEMENTWISE, 'Lion'))}"
        )


def _require_elementwise_state(cls: type[torch.optim.Optimizer], optimizer: Optimizer) -> None:
    """Refuse state in fewer bits for an optimizer that has state of another shape than its parameters', or a stepper.

    Raises:
        OptionError: it does.
    """
    if cls.__name__ in optimizers.WHOLE_TENSOR or hasattr(cls, "stepper"):
        raise refusal(
            f"<optimizer.state> is {optimizer.state}, and the state of {cls.__name__} is not one number an element: "
            f"leave state out, or use one of {', '.join((*ELEMENTWISE, 'Lion', *optimizers.LAYERWISE))}"
        )


def _with_stepper(cls: type[torch.optim.Optimizer], make: MakeOptimizer) -> OptimizerFactory:
    """Return the factory of an optimizer class, with the stepper that runs its update.

    Optimizers on unsharded tensors and 1-bit optimizers have steppers of their own. Others step on ZeRO's flat shards.
    """
    whole_tensors = cls.__name__ in optimizers.WHOLE_TENSOR
    return OptimizerFactory(make, WholeStepper) if whole_tensors else with_own_stepper(cls, make)
