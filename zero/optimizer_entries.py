"""Entries of an optimizer's ``state_dict`` beside the state of its parameters: what its groups and the object count.

group["n"] += 1                                     ``group_entries``
self.state["n"] += 1, and keys that a class adds     ``own_entries``
  to ``state_dict()``
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# Options of a parameter group that say how an optimizer computes, and not what: the grid, the machine and the
# optimizer's class decide them.
NOT_SAVED = (
    "params",
    "param_names",
    "fused",
    "foreach",
    "capturable",
    "differentiable",
    "decoupled_weight_decay",
    "decoupled",
)


def group_entries(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the options and numbers of each parameter group that a checkpoint has. Functions are no state."""
    return [
        {key: value for key, value in group.items() if key not in NOT_SAVED and not callable(value)}
        for group in optimizer.param_groups
    ]


def own_entries(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the entries of ``state_dict()`` that belong to no parameter: keys of its own, and text keys of the state.

    They are equal on every rank.
    """
    named = {key: value for key, value in optimizer.state.items() if isinstance(key, str)}
    adds = type(optimizer).state_dict is not torch.optim.Optimizer.state_dict
    every = optimizer.state_dict() if adds else {}
    own = {key: value for key, value in every.items() if key not in ("state", "param_groups")}
    return {**own, "state": named} if named else own


def load_own_entries(optimizer: torch.optim.Optimizer, own: Mapping[str, Any]) -> None:
    """Load what ``own_entries`` returned, by ``load_state_dict``. The groups and the parameters' state stay."""
    state = {key: value for key, value in optimizer.state.items() if isinstance(key, Tensor)}
    with load_in_place(optimizer):
        optimizer.load_state_dict({"state": {}, **own, "param_groups": optimizer.state_dict()["param_groups"]})
    optimizer.state.update(state)


@contextmanager
def load_in_place(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context in which ``optimizer.load_state_dict`` fills the existing groups and state instead of replacing them.

    torch's ``load_state_dict`` replaces ``param_groups`` and ``state`` by new objects. Schedulers and other optimizers
    that share them would still refer to the old ones, and their changes would have no effect on the step.
    """
    groups, state = optimizer.param_groups, optimizer.state
    yield
    loaded_groups, loaded_state = optimizer.param_groups, optimizer.state
    if loaded_groups is not groups:
        for group, new in zip(groups, loaded_groups, strict=True):
            group.clear()
            group.update(new)
        optimizer.param_groups = groups
    if loaded_state is not state:
        state.clear()
        state.update(loaded_state)
        optimizer.state = state
