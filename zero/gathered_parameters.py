"""Gathering whole parameters in stage 3 outside of a step: to read them, or to write them on every replica."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..grid import layout_of
from .bucket import Bucket
from .data_axis import ZeroDataAxis, data_axis_of
from .managed import is_released


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

    Args:
        parameters: of an engine's model or of a ``ShardedOptimizer``; a module stands for all its parameters.
        modifier_rank: the replica, by its rank on the data axis, whose values all replicas have afterwards, as in
            DeepSpeed's ``GatheredParameters``. Masters of another dtype take them too, where the master does not
            round to them. None: the parameters are read only.

    Raises:
        ValueError: a parameter that neither an engine nor an optimizer holds, or a rank outside the axis.
        RuntimeError: on every replica, if one wrote without ``modifier_rank``.
    """
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    listed = [parameters] if isinstance(parameters, nn.Parameter) else list(parameters)
    wanted = list(dict.fromkeys(listed))  # once each
    by_axis: dict[int, tuple[ZeroDataAxis, list[nn.Parameter]]] = {}
    for number, parameter in enumerate(wanted):
        data_axis = _data_axis(parameter, number)
        by_axis.setdefault(id(data_axis), (data_axis, []))[1].append(parameter)
    for data_axis, _ in by_axis.values():
        last = data_axis.axis.size - 1
        if modifier_rank is not None and not 0 <= modifier_rank <= last:
            raise ValueError(f"modifier_rank={modifier_rank}, but the data axis has ranks 0 to {last}: give one")
    with ExitStack() as stack:
        for data_axis, some in by_axis.values():
            stack.enter_context(_gathered(data_axis, some, modifier_rank))
        yield


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
            written = [p for p, version in zip(parameters, versions, strict=True) if p._version != version]
            _require_none_written(written, data_axis)
            return
        for bucket, parts in spans.items():
            for start, stop in parts:
                data_axis.axis.broadcast(bucket.weights[start:stop], source=modifier_rank)
            bucket.take_written(parts)
        data_axis.changed(spans)
        for parameter in parameters:
            if parameter in outside:
                whole = parameter.detach().contiguous()
                data_axis.axis.broadcast(whole, source=modifier_rank)
                parameter.data.copy_(whole)


def _data_axis(parameter: nn.Parameter, number: int) -> ZeroDataAxis:
    data_axis = data_axis_of(parameter)
    if data_axis is None:
        name = layout_of(parameter).name or f"parameter {number} of {tuple(parameter.shape)}"
        raise ValueError(
            f"{name} belongs to no engine and no ShardedOptimizer that is alive: call triax.initialize(model=...) or "
            "ShardedOptimizer(...) first, and take the parameters from that model"
        )
    return data_axis


def _require_none_written(written: list[nn.Parameter], data_axis: ZeroDataAxis) -> None:
    """Refuse writes of single replicas: the values would be lost, or differ between replicas. Collective."""
    count = torch.tensor([len(written)], device=data_axis.device)
    data_axis.axis.all_reduce(count)
    if count:
        raise RuntimeError(
            f"{int(count)} parameters were written (over all replicas) within gathered(...), which gathers them to be "
            "read only: pass modifier_rank=0, and all replicas have what rank 0 of the data axis wrote"
        )


def guard_state_dict(module: nn.Module) -> None:
    """Make ``state_dict()`` and ``load_state_dict()`` of a module and its submodules refuse released parameters.

    They are not gathered instead: that is collective, and scripts save under ``if rank == 0``. Under
    ``keep_vars=True`` the result holds the parameters themselves, which the caller can gather.
    """
    for part in module.modules():
        part.register_state_dict_pre_hook(_refuse_read)
        part.register_load_state_dict_pre_hook(_refuse_write)


def _refuse_read(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Hook before ``state_dict()``."""
    released = [] if keep_vars else _released(module)
    if released:
        raise RuntimeError(
            f"state_dict() was called while {len(released)} parameters ({prefix}{released[0]}, ...) are released, as "
            "in stage 3 of ZeRO they are outside of their layer's run: they would be saved as NaN. Call "
            "engine.module_state_dict() on every rank, or call state_dict() on every rank within "
            "triax.zero.gathered(module)"
        )


def _refuse_write(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Hook before ``load_state_dict()``."""
    released = [name for name in _released(module) if prefix + name in state_dict]
    if released:
        raise RuntimeError(
            f"load_state_dict() was called while {len(released)} parameters ({prefix}{released[0]}, ...) are released, "
            "as in stage 3 of ZeRO they are outside of their layer's run: their new values would be lost. Call it on "
            "every rank within triax.zero.gathered(module, modifier_rank=0), or load before the engine is made"
        )


def _released(module: nn.Module) -> list[str]:
    return [name for name, parameter in module.named_parameters() if is_released(parameter)]
