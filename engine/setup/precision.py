"""Dtypes of weights and autocast, and the loss scale, from ``options.precision`` and ``options.reduction``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...base.dtypes import dtype_of
from ...base.errors import no_such
from ...base.option_error import refusal
from ...grid.grid import Grid
from ...options.engine import EngineOptions
from ...options.precision import Precision
from ..optim.loss_scale import LossScaler


def make_loss_scaler(precision: Precision) -> LossScaler | None:
    """Return a new loss scaler. None if the model does not compute in float16."""
    return LossScaler(precision.loss_scale) if precision.scaled else None


def low_precision_parameters(options: EngineOptions, module: nn.Module, grid: Grid) -> frozenset[Tensor] | None:
    """Return the parameters whose gradients are summed over replicas in autocast's dtype.

    The result is None if ``reduction.low_precision_modules`` names no class. If it names classes, the call is
    collective over the grid.

    Raises:
        OptionError: on every rank, if no rank has a module of one of the named classes.
    """
    wanted = set(options.reduction.low_precision_modules or ())
    if not wanted:
        return None
    parameters: set[Tensor] = set()
    here: set[str] = set()
    for submodule in module.modules():
        names = _class_names(type(submodule))
        here |= names
        if names & wanted:
            parameters.update(submodule.parameters(recurse=False))
    everywhere = set().union(*grid.world.all_gather_json(here))
    for name in options.reduction.low_precision_modules or ():
        if name not in everywhere:
            known = sorted(path for path in everywhere if "." in path)
            raise refusal(no_such("<reduction.low_precision_modules>", name, known))
    return frozenset(parameters)


def communication_dtype(options: EngineOptions, low_precision: frozenset[Tensor] | None) -> torch.dtype | None:
    """Return the dtype in which gradients are summed over replicas. None if they are summed in their own dtype."""
    return dtype_of(options.reduction.dtype if low_precision is None else options.precision.autocast)


def _class_names(kind: type) -> set[str]:
    """Return the names that a class can be given by: ``torch.nn.modules.linear.Linear``, ``torch.nn.Linear``."""
    names = {f"{kind.__module__}.{kind.__qualname__}"}
    if getattr(nn, kind.__name__, None) is kind:
        names.add(f"torch.nn.{kind.__name__}")
    return names
