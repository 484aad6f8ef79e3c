"""Parameters as the data axis manages them, and the properties by which they share buckets."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
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


class ZeroParamStatus(Enum):
    """DeepSpeed's states of a parameter in stage 3, which scripts find in ``parameter.ds_status``."""

    AVAILABLE = 1  # whole
    NOT_AVAILABLE = 2  # released: it reads as NaN
    INFLIGHT = 3  # never found here: a parameter is released until its gather has ended


def is_released(parameter: Tensor) -> bool:
    """Return True if this rank holds only its shard of a parameter now, so that the parameter reads as NaN."""
    return getattr(parameter, "ds_status", None) is ZeroParamStatus.NOT_AVAILABLE


def mark_as_deepspeed(members: Iterable[ManagedParameter]) -> None:
    """Set on parameters the attributes by which scripts recognize those of DeepSpeed's stage 3, and gather them."""
    for number, member in enumerate(members):
        parameter = member.parameter
        marks: dict[str, object] = {"ds_id": number, "ds_shape": parameter.shape, "ds_numel": parameter.numel()}
        marks["triax_name"] = f"{member.layout.name or 'a parameter'} of {tuple(parameter.shape)}"  # for errors
        for name, value in {**marks, "ds_status": ZeroParamStatus.AVAILABLE}.items():
            setattr(parameter, name, value)


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
    replicas: str  # the grid's axis over which the parameters are replicated: that of ``Layout.replicas``
