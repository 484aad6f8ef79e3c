"""DeepSpeed's module ``deepspeed.zero``: ``GatheredParameters`` and the state of a parameter in stage 3."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from ...zero.gathered_parameters import gathered
from ...zero.managed import ZeroParamStatus
from .modules import rest_of

__all__ = ["GatheredParameters", "ZeroParamStatus"]


def GatheredParameters(
    params: nn.Parameter | Iterable[nn.Parameter],
    modifier_rank: int | None = None,
    fwd_module: Any = None,
    enabled: bool = True,
) -> AbstractContextManager[None]:
    """Gather parameters within a context, as ``triax.zero.gathered``. Collective over the data axis.

    Args:
        params: parameters; those that ZeRO does not shard (stages 0 to 2) are whole at any time and left out.
        modifier_rank: rank of the data axis whose values all replicas have afterwards.
        fwd_module: without effect.
        enabled: if False, do nothing.
    """
    listed = [params] if isinstance(params, nn.Parameter) else list(params)
    sharded = [parameter for parameter in listed if hasattr(parameter, "ds_id")]
    return gathered(sharded, modifier_rank) if enabled and sharded else nullcontext()


__getattr__, __path__ = rest_of(__name__)
