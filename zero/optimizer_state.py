"""Entries of an optimizer's state, elementwise or numbers, and copies of an optimizer for other tensors."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

Groups = list[dict[str, Any]]


def worker_of(optimizer: torch.optim.Optimizer, groups: Groups, state: Any) -> torch.optim.Optimizer:
    """Return a copy of an optimizer over other parameters, without its step hooks and its step counter."""
    worker: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(worker).update({key: value for key, value in vars(optimizer).items() if key != "step"})
    worker._optimizer_step_pre_hooks, worker._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    worker.param_groups, worker.state = groups, state
    return worker


def in_training(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Switch an optimizer to its train mode, if it has modes, as schedule-free ones do; return it."""
    if callable(train := getattr(optimizer, "train", None)):
        train()
    return optimizer


def is_elementwise(value: Any, master: Tensor) -> bool:
    """Return True if a state value has one number for each element of a stepped tensor."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == master.shape


def is_number(value: Any, master: Tensor) -> bool:
    """Return True if a state value is one number for the whole stepped tensor, such as a count of steps."""
    return not isinstance(value, Tensor) or (value.numel() == 1 and not is_elementwise(value, master))


def copied(value: Any) -> Any:
    """Return a copy of a number of an optimizer's state."""
    return value.clone() if isinstance(value, Tensor) else value
