"""Lending whole parameters in stage 3: to read them, or to write them on every replica."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..grid import layout_of
from .buckets import Bucket

if TYPE_CHECKING:
    from .replicas import Replicas

_ATTRIBUTE = "triax_home"


class _Link:
    """A parameter's way to what holds it. It keeps nothing alive, and is lost where the parameter is pickled."""

    def __init__(self, home: Replicas | None = None) -> None:
        self.home: Callable[[], Replicas | None] = (lambda: None) if home is None else weakref.ref(home)

    def __reduce__(self) -> tuple[type[_Link], tuple[()]]:
        return _Link, ()


def settle(parameters: Iterable[nn.Parameter], home: Replicas) -> None:
    """Let ``gathered`` find what holds these parameters."""
    link = _Link(home)
    for parameter in parameters:
        setattr(parameter, _ATTRIBUTE, link)


@contextmanager
def gathered(
    parameters: nn.Module | nn.Parameter | Iterable[nn.Parameter], modifier_rank: int | None = None
) -> Iterator[None]:
    """Within it the parameters are whole: to be read, or written where ``modifier_rank`` is given.

    Collective over the data axis: every replica enters and leaves, with the same parameters in the same order. In
    stages 0 to 2 parameters are whole at any time, and only what was written has anything to do. What is computed
    from the parameters within is for looking at: its backward pass would find them released.

    A tensor rank has its shard whole, and each stage that holds a tie its own copy: write all of them alike.

    Args:
        parameters: of an engine's model or of a ``ShardedOptimizer``; a module stands for all that it has.
        modifier_rank: the replica, by its place on the data axis, whose values all replicas have afterwards, as in
            DeepSpeed's ``GatheredParameters``. Masters of another dtype take them too, where they differ from what
            the master rounds to. None: the parameters are read only.

    Raises:
        ValueError: a parameter that neither an engine nor an optimizer holds, or a rank that the axis has not.
        RuntimeError: on every replica, where one wrote without ``modifier_rank``.
    """
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    listed = [parameters] if isinstance(parameters, nn.Parameter) else list(parameters)
    wanted = list(dict.fromkeys(listed))  # once each
    by_home: dict[int, tuple[Replicas, list[nn.Parameter]]] = {}
    for number, parameter in enumerate(wanted):
        home = _home(parameter, number)
        by_home.setdefault(id(home), (home, []))[1].append(parameter)
    for home, _ in by_home.values():
        if modifier_rank is not None and not 0 <= modifier_rank < home.axis.size:
            raise ValueError(f"modifier_rank={modifier_rank}, but the data axis has ranks 0 to {home.axis.size - 1}")
    with ExitStack() as stack:
        for home, some in by_home.values():
            stack.enter_context(_lent(home, some, modifier_rank))
        yield


@contextmanager
def _lent(home: Replicas, parameters: list[nn.Parameter], modifier_rank: int | None) -> Iterator[None]:
    among = set(parameters)
    spans: dict[Bucket, list[tuple[int, int]]] = {}
    for bucket in home.buckets:
        for slot, member in zip(bucket.flat.slots, bucket.members, strict=True):
            if member.parameter in among:
                among.discard(member.parameter)
                spans.setdefault(bucket, []).append((slot.start, slot.stop))
    borrowed = [] if home.gatherer is None else home.gatherer.borrow(spans)
    try:
        versions = [parameter._version for parameter in parameters]
        yield
        if modifier_rank is None:
            written = [p for p, version in zip(parameters, versions, strict=True) if p._version != version]
            _refuse(written, home)
        else:
            for bucket, parts in spans.items():
                for start, stop in parts:
                    home.axis.broadcast(bucket.weights[start:stop], source=modifier_rank)
                bucket.adopt(parts)
            home.changed(spans)
            for parameter in parameters:
                if parameter in among:  # frozen, and in no bucket: every replica has it whole
                    whole = parameter.detach().contiguous()
                    home.axis.broadcast(whole, source=modifier_rank)
                    parameter.data.copy_(whole)
    finally:
        if home.gatherer is not None:
            home.gatherer.give_back(borrowed)


def _home(parameter: nn.Parameter, number: int) -> Replicas:
    link = getattr(parameter, _ATTRIBUTE, None)
    home = link.home() if isinstance(link, _Link) else None
    if home is None:
        name = layout_of(parameter).name or f"parameter {number} of {tuple(parameter.shape)}"
        raise ValueError(
            f"{name} belongs to no engine and no ShardedOptimizer that is alive: call triax.initialize(model=...) or "
            "ShardedOptimizer(...) first, and take the parameters from that model"
        )
    return home


def _refuse(written: list[nn.Parameter], home: Replicas) -> None:
    """Values written by one replica alone would be lost, or leave the replicas unlike: all of them hear of it."""
    count = torch.tensor([len(written)], device=home.device)
    home.axis.all_reduce(count)
    if count:
        raise RuntimeError(
            f"{int(count)} parameters were written (over all replicas) within gathered(...), which lends them to be "
            "read: pass modifier_rank=0, and all replicas have what rank 0 of the data axis wrote"
        )
