"""DeepSpeed's modules ``deepspeed.utils`` and ``deepspeed.runtime.utils``: log, memory, random seed, devices."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from logging import INFO, Logger, getLogger  # the name `logging` is the module deepspeed.utils.logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...base.nest import map_tensors
from ...grid.environment import host_memory
from ...grid.layout import layout_of
from .accelerator import get_accelerator
from .modules import rest_of

logger = getLogger("triax")
GIB = 2**30


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = INFO) -> None:
    """Log a message on some ranks.

    Args:
        message: the message.
        ranks: the ranks that log it; None or -1: all.
        level: level of Python's logging.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not ranks or rank in ranks or -1 in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


@functools.cache
def _once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = INFO) -> None:
    """Log a message, as ``log_dist``, the first time that it is given."""
    _once(message, None if ranks is None else tuple(ranks), level)


def set_log_level_from_string(log_level_str: str, custom_logger: Logger | None = None) -> None:
    """Set the level of triax's logger, or of another one: ``debug``, ``info``, ``warning``, ``error``, ``critical``."""
    (custom_logger or logger).setLevel(log_level_str.upper())


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the memory of the device and of the host on rank 0, with a message, if ``force`` is set."""
    if force and (not dist.is_initialized() or dist.get_rank() == 0):
        device = get_accelerator()
        now, peak = device.memory_allocated() / GIB, device.max_memory_allocated() / GIB
        free = host_memory(free=True) / GIB
        logger.info("%s: %.2f GiB allocated, %.2f GiB at most, %.2f GiB of the host free", message, now, peak, free)


def set_random_seed(seed: int) -> None:
    """Seed the generators of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  # the scripts' generator
    torch.manual_seed(seed)


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Return a nest of tensors on a device: all of them, or those for which ``criterion_func`` returns True."""
    return map_tensors(lambda leaf: leaf.to(device) if criterion_func is None or criterion_func(leaf) else leaf, item)


def clone_tensors_for_torch_save(item: Any, device: Any = "cpu") -> Any:
    """Return a copy of a nest whose tensors are whole tensors of their own on a device."""
    return map_tensors(lambda tensor: tensor.detach().to(device, copy=True).clone(), item)


def ensure_directory_exists(filename: str) -> None:
    """Make the folder of a file."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def instrument_w_nvtx(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function: each call is a range of NVTX on a GPU."""

    @functools.wraps(func)
    def called(*args: Any, **kwargs: Any) -> Any:
        get_accelerator().range_push(func.__qualname__)
        try:
            return func(*args, **kwargs)
        finally:
            get_accelerator().range_pop()

    return called


def recursive_getattr(model: Any, module_name: str) -> Any:
    """Return the attribute at a dotted path."""
    return functools.reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Set the attribute at a dotted path."""
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)


class OnDevice:
    """Context in which torch makes tensors of a dtype on a device.

    Args:
        dtype: dtype of floating-point tensors.
        device: such as ``meta``.
        enabled: False: no effect.
    """

    def __init__(self, dtype: torch.dtype, device: str = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, device, enabled
        self._stack = ExitStack()

    def __enter__(self) -> None:
        if self.enabled:
            self._stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.dtype)
            self._stack.enter_context(torch.device(self.device))

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def is_model_parallel_parameter(p: Tensor) -> bool:
    """Return True if tensor ranks hold different shards of a parameter."""
    marks = (getattr(p, name, False) for name in ("model_parallel", "tensor_model_parallel"))
    return layout_of(p).sharded or any(marks)


def is_moe_param(param: Tensor) -> bool:
    """Return True if a parameter belongs to one expert of a mixture."""
    return layout_of(param).expert_dim is not None


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return True and the number of experts of the first layer with experts; False and 0 if the module has none."""
    experts = [layout_of(param).shape[0] for param in m.parameters() if is_moe_param(param)]
    return bool(experts), experts[0] if experts else 0


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Iterable[dict[str, Any]], max_group_size: float | None = None
) -> list[dict[str, Any]]:
    """Return the parameter groups as they are: an engine knows experts by their layout, in any group.

    Args:
        param_groups: a parameter group, or several.
        max_group_size: without effect.
    """
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)


__getattr__, __path__ = rest_of(__name__)
