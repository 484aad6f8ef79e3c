"""Parameters as the data axis manages them, and the properties by which they share buckets."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..grid import Layout


class ManagedParameter(NamedTuple):
    """A parameter that the data axis manages: its layout, and where it is used."""

    parameter: nn.Parameter
    layout: Layout
    stages: tuple[int, ...]  # the stages of this rank that use it
    layers: tuple[int, ...]  # the layers of the list that use it
    tie: int | None  # the tie it belongs to, if other pipe ranks hold it too
    counted: bool  # True if this pipe rank counts it in the norm
    group: int | None  # its parameter group in the optimizer; None: it is not trained


_RELEASED = "triax_released"  # attribute of parameters that may be released: True while they are
SHARD = "triax_shard"  # attribute of parameters that were built in a ``ShardedInit``, until a data axis has them


def is_released(parameter: Tensor) -> bool:
    """Return True if this rank holds only its shard of a parameter now, so that the parameter reads as NaN."""
    return getattr(parameter, _RELEASED, False)


def may_be_released(parameter: Tensor) -> bool:
    """Return True for a parameter of stage 3, or one that was built in a ``ShardedInit``."""
    return hasattr(parameter, _RELEASED)


def set_released(parameter: nn.Parameter, released: bool) -> None:
    """Record whether this rank holds only its shard of a parameter."""
    setattr(parameter, _RELEASED, released)


class BucketKey(NamedTuple):
    """Properties shared by all parameters of one bucket."""

    stages: tuple[int, ...]
    layers: tuple[int, ...]  # empty below stage 3, where buckets need not follow the layers
    tie: int | None
    counted: bool
    group: int | None
    dtype: torch.dtype
    persistent: bool  # not sharded in stage 3
    low_precision: bool  # summed in ``communication_dtype``
    own_bucket: int | None  # number of a parameter that has a bucket of its own
    state: str | None  # kind of the optimizer's state, as ``kind_of_state`` returns it
    replicas: str  # the grid's axis over which the parameters are replicated: that of ``Layout.replicas``
