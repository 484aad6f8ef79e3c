"""DeepSpeed's ``safe_get_*`` and ``safe_set_*``: fp32 weights, gradients and optimizer state of one parameter.

``full``: whole, in the parameter's shape, on every rank; collective. ``local``: this rank's part, a 1-dim tensor;
another rank may hold all of a parameter, and this one none. A gradient is the mean over the batch: between the last
``engine.backward`` of a step and ``engine.step()``, and after it, clipped, until the next forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ...engine.module_engine import ModuleEngine
from .context import CONTEXT
from .parameter_values import GRADIENT, WEIGHTS, ParameterValues


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return the master weights of a parameter. None if no engine has it."""
    return _whole(param, WEIGHTS)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return the optimizer's state of a parameter, such as ``exp_avg``. None before the first step."""
    return _whole(param, optim_state_key)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Return the mean gradient of a parameter; in ``no_sync`` this replica's own, over the microbatches so far.

    None in a step before its last backward pass, outside of ``no_sync``.
    """
    for engine in CONTEXT.engines.values():
        if getattr(engine, "in_no_sync", False) and (bucket := engine.data_axis.bucket_of(param)) is not None:
            own = bucket.unreduced(param)
            return None if own is None else own / (engine.batch.accumulation * engine.optimizer_step.scale)
    divisor = _divisor(param)
    return None if divisor is None or (gradient := _whole(param, GRADIENT)) is None else gradient.div_(divisor)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set the master weights of a parameter, and with them the weights that the model computes with."""
    _assign(param, value, WEIGHTS)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set the optimizer's state of a parameter."""
    _assign(param, value, optim_state_key)


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set the mean gradient of a parameter, before ``engine.step()``."""
    _assign(param, value * _divisor(param, require=True), GRADIENT)


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return this rank's part of the master weights of a parameter."""
    return _local(param, WEIGHTS)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return this rank's part of the optimizer's state of a parameter. None before the first step."""
    return _local(param, optim_state_key)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """Return this rank's part of the mean gradient of a parameter."""
    divisor = _divisor(param)
    return None if divisor is None or (gradient := _local(param, GRADIENT)) is None else gradient / divisor


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's part of the master weights of a parameter. Collective."""
    _assign(param, value, WEIGHTS, local=True)


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set this rank's part of the optimizer's state of a parameter."""
    _assign(param, value, optim_state_key, local=True)


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's part of the mean gradient of a parameter, before ``engine.step()``."""
    _assign(param, value * _divisor(param, require=True), GRADIENT, local=True)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace the mean gradient of each parameter by ``update_func(gradient, parameter)``. Collective."""
    for param in param_list:
        if param.requires_grad and (gradient := safe_get_full_grad(param)) is not None:
            updated = update_func(gradient.clone(), param)
            if not torch.equal(updated, gradient):  # else one without a gradient would have one of zeros
                safe_set_full_grad(param, updated)


def _whole(param: nn.Parameter, kind: str) -> Tensor | None:
    values = ParameterValues(param, kind)
    return values.whole() if values.exists else None


def _local(param: nn.Parameter, kind: str) -> Tensor | None:
    values = ParameterValues(param, kind)
    return values.local if values.exists else None


def _assign(param: nn.Parameter, value: Tensor, kind: str, local: bool = False) -> None:
    values = ParameterValues(param, kind)
    if not values.exists:
        raise ValueError(
            f"the parameter of shape {tuple(param.shape)} has no {kind} to set: give one that an engine trains, "
            "and set the optimizer's state after the first step"
        )
    values.assign_local(value) if local else values.assign(value)


def _divisor(param: nn.Parameter, require: bool = False) -> Any:
    """Return the number by which the parameter's summed gradient must be divided now; None if it is not complete yet.

    Collective: it ends the reduction of the gradients.
    """
    for engine in CONTEXT.engines.values():
        if engine.data_axis.bucket_of(param) is not None:
            if engine.data_axis.stepped:
                return 1.0
            if not isinstance(engine, ModuleEngine) or engine.in_no_sync:
                break
            if engine.backward_passes.count and engine.is_last_microbatch():
                reduced = engine.backward_passes.reduced
                with engine.spans("reduce"):
                    engine.backward_passes.end_reductions()
                engine.data_axis.access.take_back(look=reduced)  # what user code has assigned to ``.grad`` before
                weight = engine.grid.data.size * engine.batch.accumulation * engine.data_axis.access.applied
                return weight * engine.data_axis.options.divisor * engine.optimizer_step.scale
    if require:
        raise ValueError(
            f"the parameter of shape {tuple(param.shape)} has no gradient to set: call this after the last "
            "engine.backward(loss) of a step, and before engine.step()"
        )
    return None
