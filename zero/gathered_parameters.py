"""Gathering whole parameters in stage 3 outside of a step: to read them, or to write them on every replica."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..base.checks import check_kind
from ..grid import layout_of
from .bucket import Bucket
from .data_axis import ZeroDataAxis, data_axis_of
from .managed import may_be_released
from .sharded_init import ShardedParameter, require_none_written, sharded_parameter, shown


@contextmanager
def gathered(
    parameters: nn.Module | nn.Parameter | Iterable[nn.Parameter], modifier_rank: int | None = None
) -> Iterator[None]:
    """Gather parameters, to be read, or written if ``modifier_rank`` is given; they are released at the end.

    Collective over the data axis: every replica enters and leaves, with the same parameters in the same order. In
    stages 0 to 2 parameters are whole at any time, and only written ones are sent. If results computed from the
    parameters within need a backward pass, run it within too: later it would find them released. Tensors taken from
    them within, such as those of ``module.state_dict()``, stay whole.

    Only the data axis is gathered. A rank of the tensor axis still sees its own shard, and each stage that holds a tie
    has its own copy: write the same to all copies.

    >>> model = nn.Linear(4, 1)
    >>> engine = triax.Engine(model, optimizer=triax.Optimizer("Adam"), batch=1, zero=3)
    >>> with triax.zero.gathered(model, modifier_rank=0):
    ...     model.weight.data.fill_(0.5)
    tensor([[0.5000, 0.5000, 0.5000, 0.5000]])

    Args:
        parameters: of an engine's model or of a ``ShardedOptimizer``, or built in a ``ShardedInit``; a module stands
            for all its parameters.
        modifier_rank: the replica, by its rank on the data axis, whose values all replicas have afterwards. Masters
            of another dtype take them too, where the master does not round to them. None: the parameters are read
            only.

    Raises:
        ValueError: a parameter that neither an engine nor an optimizer holds, or a rank outside the axis.
        RuntimeError: on every replica, if one wrote without ``modifier_rank``.
    """
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    check_kind("gathered", Iterable, "a module, a parameter, or a list of parameters", parameters=parameters)
    listed = [parameters] if isinstance(parameters, nn.Parameter) else list(parameters)
    for parameter in listed:
        check_kind("gathered", Tensor, "parameters of the model", parameters=parameter)
    wanted = list(dict.fromkeys(listed))  # once each
    by_axis: dict[int, tuple[ZeroDataAxis, list[nn.Parameter]]] = {}
    unmanaged: list[ShardedParameter] = []  # built in a ``ShardedInit``, and not given to an engine yet
    for number, parameter in enumerate(wanted):
        if (record := sharded_parameter(parameter)) is not None:
            unmanaged.append(record)
            continue
        data_axis = _data_axis(parameter, number)
        by_axis.setdefault(id(data_axis), (data_axis, []))[1].append(parameter)
    for data_axis, _ in by_axis.values():
        last = data_axis.axis.size - 1
        if modifier_rank is not None and not 0 <= modifier_rank <= last:
            raise ValueError(f"modifier_rank={modifier_rank}, but the data axis has ranks 0 to {last}: give one")
    with ExitStack() as stack:
        for data_axis, some in by_axis.values():
            stack.enter_context(_gathered(data_axis, some, modifier_rank))
        stack.enter_context(shown(unmanaged, modifier_rank))
        yield


def whole_state_dict(module: nn.Module, keep: bool, without: Collection[str] = ()) -> dict[str, Any] | None:
    """Return a module's ``state_dict()`` with whole parameters in host memory. Collective over the data axis.

    Parameters are gathered one after the other, so that a rank that keeps none holds one of them at a time. Only the
    data axis is gathered.

    Args:
        module: of an engine, or under a ``ShardedOptimizer``.
        keep: True on the ranks that want the values; the others get None.
        without: names that are left out.
    """
    values: dict[str, Any] = {}
    copies: dict[Tensor, Tensor] = {}  # a parameter with two names has one copy
    for key, value in module.state_dict(keep_vars=True).items():
        if key not in without:
            if not isinstance(value, Tensor):  # of the module's get_extra_state()
                values[key] = value
                continue
            if value not in copies:
                with gathered(value) if isinstance(value, nn.Parameter) and may_be_released(value) else nullcontext():
                    copies[value] = value.detach().to("cpu", copy=True) if keep else torch.empty(0)
            values[key] = copies[value]
    return values if keep else None


@contextmanager
def _gathered(data_axis: ZeroDataAxis, parameters: list[nn.Parameter], modifier_rank: int | None) -> Iterator[None]:
    """Gather parameters of one data axis."""
    outside = set(parameters)  # frozen, and in no bucket: every replica has them whole
    spans: dict[Bucket, list[tuple[int, int]]] = {}
    for bucket in data_axis.buckets:
        for slot, member in zip(bucket.flat.slots, bucket.members, strict=True):
            if member.parameter in outside:
                outside.discard(member.parameter)
                spans.setdefault(bucket, []).append((slot.start, slot.stop))
    with data_axis.gathered(spans):
        versions = [parameter._version for parameter in parameters]
        yield
        if modifier_rank is None:
            written = sum(p._version != version for p, version in zip(parameters, versions, strict=True))
            require_none_written(written, data_axis.axis, data_axis.device)
            return
        for bucket, parts in spans.items():
            for start, stop in parts:
                data_axis.axis.broadcast(bucket.weights[start:stop], source=modifier_rank)
            bucket.take_written(parts)
        data_axis.changed(spans)
        for parameter in parameters:
            if parameter in outside:
                values = parameter.detach().contiguous()
                data_axis.axis.broadcast(values, source=modifier_rank)
                parameter.data.copy_(values)


def _data_axis(parameter: nn.Parameter, number: int) -> ZeroDataAxis:
    data_axis = data_axis_of(parameter)
    if data_axis is None:
        name = layout_of(parameter).name or f"parameter {number} of {tuple(parameter.shape)}"
        raise ValueError(
            f"{name} belongs to no engine and no ShardedOptimizer that is alive: make triax.Engine(model, ...) or "
            "ShardedOptimizer(...) first, and take the parameters from that model"
        )
    return data_axis
