"""DeepSpeed's marks of parameters in stage 3, by which scripts recognize and gather them: ``ds_id``, ``ds_status``."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any, cast

from torch import nn

from ...zero.data_axis import ZeroDataAxis
from ...zero.managed import BucketKey, is_released
from ...zero.sharded_init import ShardedInit, ShardedParameter


class ZeroParamStatus(Enum):
    """States of a parameter in stage 3, which scripts find in ``parameter.ds_status``."""

    AVAILABLE = 1  # whole
    NOT_AVAILABLE = 2  # released: it reads as NaN
    INFLIGHT = 3  # never found here: a parameter is released until its gather has ended


def mark_parameters(parameters: Iterable[nn.Parameter], data_axis: ZeroDataAxis) -> None:
    """Mark the parameters of an engine in stage 3, and keep ``ds_status`` up to date from now on."""
    for number, parameter in enumerate(parameters):
        _mark(parameter, number, is_released(parameter))
        bucket, marked = data_axis.bucket_of(parameter), cast(Any, parameter)
        marked.ds_persist = bucket is None or cast(BucketKey, bucket.flat.key).persistent
    for bucket in data_axis.buckets:
        bucket.release_hook = _set_status


def _mark(parameter: nn.Parameter, number: int, released: bool) -> None:
    marked: Any = parameter
    marked.ds_id, marked.ds_shape, marked.ds_numel = number, parameter.shape, parameter.numel()
    _set_status(parameter, released)


def _set_status(parameter: nn.Parameter, released: bool) -> None:
    marked: Any = parameter
    marked.ds_status = ZeroParamStatus.NOT_AVAILABLE if released else ZeroParamStatus.AVAILABLE


class MarkedParameter(ShardedParameter):
    """Shard of a parameter, which has DeepSpeed's marks; ``ds_tensor`` is the shard."""

    def release(self) -> None:
        """Let the parameter read as NaN."""
        super().release()
        _mark(self.parameter, id(self.parameter), released=True)
        self.parameter.ds_tensor = self.shard  # type: ignore[attr-defined]  # a Parameter does not declare it

    def show(self) -> None:
        """Make the parameter whole. Collective."""
        super().show()
        _set_status(self.parameter, released=False)

    def hand_over(self) -> None:
        """End the parameter's life as a shard of its own; an engine of ``initialize`` marks it again."""
        super().hand_over()
        for name in ("ds_id", "ds_shape", "ds_numel", "ds_status", "ds_tensor"):
            delattr(self.parameter, name)


class MarkedInit(ShardedInit):
    """``ShardedInit`` whose parameters have DeepSpeed's marks."""

    record_class = MarkedParameter
