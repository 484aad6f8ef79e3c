"""Refusal of ``state_dict()`` and ``load_state_dict()`` while parameters are released."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from .managed import SHARD, is_released

_EMPTY = "_triax_empty_entries"  # attribute of the modules of ``allow_empty_entries``


def guard_state_dict(module: nn.Module) -> None:
    """Make ``state_dict()`` and ``load_state_dict()`` of a module and its submodules refuse released parameters.

    They are not gathered instead: that is collective, and scripts save under ``if rank == 0``. Under
    ``keep_vars=True`` the result holds the parameters themselves, which the caller can gather.
    """
    for part in module.modules():
        part.register_state_dict_pre_hook(_refuse_read)
        part.register_load_state_dict_pre_hook(_refuse_write)


def allow_empty_entries(module: nn.Module) -> None:
    """Make ``state_dict()`` of a guarded module return empty tensors for released parameters, with a warning.

    Some scripts call it on one rank, and replace the file by one with gathered weights.
    """
    for part in module.modules():
        vars(part)[_EMPTY] = True
        part.register_state_dict_post_hook(_empty)


def _refuse_read(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Hook before ``state_dict()``."""
    # transformers reads the names of a model that is built in shards, before an engine has it.
    named = [] if keep_vars else module.named_parameters()
    released = [name for name, p in named if is_released(p) and not hasattr(p, SHARD)]
    if released and vars(module).get(_EMPTY):
        if not prefix:
            logging.getLogger("triax").warning(
                "state_dict() was called while %d parameters (%s, ...) are released, as in stage 3 of ZeRO they are "
                "outside of their layer's run: their entries are empty tensors. For their values call "
                "engine.module_state_dict() on every rank",
                len(released),
                released[0],
            )
    elif released:
        raise RuntimeError(
            f"state_dict() was called while {len(released)} parameters ({prefix}{released[0]}, ...) are released, as "
            "in stage 3 of ZeRO they are outside of their layer's run: they would be saved as NaN. Call "
            "engine.module_state_dict() on every rank, or call state_dict() on every rank within "
            "triax.zero.gathered(module)"
        )


def _refuse_write(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Hook before ``load_state_dict()`` loads one module; its submodules have this hook too.

    transformers loads one module at a time, and gathers the parameters of this module alone.
    """
    own = module.named_parameters(recurse=False)
    released = [name for name, parameter in own if prefix + name in state_dict and is_released(parameter)]
    if released:
        raise RuntimeError(
            f"load_state_dict() was called while {len(released)} parameters ({prefix}{released[0]}, ...) are released, "
            "as in stage 3 of ZeRO they are outside of their layer's run: their new values would be lost. Call it on "
            "every rank within triax.zero.gathered(module, modifier_rank=0), or load before the engine is made"
        )


def _empty(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Hook after ``state_dict()``: put empty tensors in the places of the module's own released parameters."""
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        value = state_dict.get(prefix + name)
        if value is not None and not isinstance(value, nn.Parameter) and is_released(parameter):
            state_dict[prefix + name] = value.new_empty(0)
