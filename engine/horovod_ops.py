"""Horovod's reductions of tensors, ``allreduce`` and its like, and its handles. The others are in ``horovod_moves.py``.

Their arguments are Horovod's, in its order. All are collective; see ``horovod_calls.py`` for what is checked.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..grid import Axis
from .horovod import ProcessSet, job, only_global
from .horovod_calls import Handle, Request
from .horovod_compression import Compression


class Op(enum.IntEnum):
    """How the tensors of all ranks become one; the numbers are Horovod's."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average, Sum, Adasum, Min, Max, Product = Op
_AXIS = {Average: "sum", Sum: "sum", Min: "min", Max: "max", Product: "product"}


class Reduction:
    """Arguments of a reduction, checked.

    Raises:
        ValueError: they do not go together.
    """

    def __init__(self, op: Op | None, average: bool | None, pre: float, post: float, process_set: Any) -> None:
        only_global(process_set)
        if op is not None and average is not None:
            raise ValueError("op and average both say how to reduce: give op alone, average is its old name")
        if op is None:
            op = Sum if average is False else Average
        self.op, self.pre, self.post = Op(op), pre, post
        if self.op is Adasum:
            raise ValueError(NO_ADASUM)

    def check(self, tensor: Tensor) -> None:
        """Whether it can be reduced so."""
        require(tensor)
        if tensor.dtype == torch.bool:
            raise ValueError("booleans are not added up: reduce tensor.to(torch.uint8)")
        if not tensor.is_floating_point() and (self.pre, self.post) != (1.0, 1.0):
            raise ValueError(f"{tensor.dtype} and a factor that is none: reduce tensor.double()")

    def __call__(self, axis: Axis, tensor: Tensor) -> None:
        """Reduce a contiguous tensor in place."""
        if self.pre != 1.0:
            tensor.mul_(self.pre)
        axis.all_reduce(tensor, op=_AXIS[self.op])
        self.finish(axis, tensor)

    def finish(self, axis: Axis, tensor: Tensor) -> None:
        """What follows the sum. Whole numbers are averaged as Horovod does it: towards zero."""
        if self.op is Average and not tensor.is_floating_point():
            torch.div(tensor, axis.size, rounding_mode="trunc", out=tensor)
        elif (factor := self.post / axis.size if self.op is Average else self.post) != 1.0:
            tensor.mul_(factor)

    def __str__(self) -> str:
        return self.op.name.lower() + ("" if self.pre == self.post == 1.0 else f" times {self.pre} and {self.post}")


NO_ADASUM = (
    "op=Adasum: what it makes of gradients depends on the number of ranks and their order, so that no other grid and "
    "no single process trains alike; use op=Average, and scale the learning rate yourself"
)

# ------------------------------------------------------------------------------------------------------- allreduce


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Tensor:
    """The tensors of all ranks, reduced: a new tensor of the same shape; differentiable for ``Average`` and ``Sum``.

    Args:
        tensor: of the same shape and dtype on every rank.
        average: the old name of ``op``: True is ``Average``, False is ``Sum``.
        name: for messages and the timeline.
        compression: ``Compression.fp16`` sends 2 bytes for each number.
        op: ``Average`` (of whole numbers: towards zero), ``Sum``, ``Min``, ``Max`` or ``Product``.
        prescale_factor, postscale_factor: multiply before and after.

    Raises:
        ValueError: ``Adasum``, booleans, sparse tensors, factors of whole numbers, ranks that differ.
    """
    reduction = Reduction(op, average, prescale_factor, postscale_factor, process_set)
    require(tensor)
    small, context = compression.compress(tensor)
    result: Tensor = _Allreduce.apply(reduction, job().calls.name("allreduce", name), small)
    decompressed: Tensor = compression.decompress(result, context)
    return decompressed


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Handle:
    """``allreduce``, beside the script: ``synchronize(handle)`` returns the result. Not differentiable."""
    reduction = Reduction(op, average, prescale_factor, postscale_factor, process_set)
    return job().calls.later(*_allreduce(reduction, job().calls.name("allreduce", name), [tensor], single=True))


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Tensor:
    """``allreduce`` in place."""
    result: Tensor = synchronize(
        allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    )
    return result


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Handle:
    """``allreduce`` in place, beside the script: leave the tensor alone until ``synchronize(handle)``."""
    reduction = Reduction(op, average, prescale_factor, postscale_factor, process_set)
    name = job().calls.name("allreduce", name)
    return job().calls.later(*_allreduce(reduction, name, [tensor], single=True, into=[tensor]))


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> list[Tensor]:
    """``allreduce`` of several tensors in one collective for each dtype."""
    reduction = Reduction(op, average, prescale_factor, postscale_factor, process_set)
    for tensor in tensors:
        require(tensor)
    pairs = [compression.compress(tensor) for tensor in tensors]
    name = job().calls.name("grouped_allreduce", name)
    results = _GroupedAllreduce.apply(reduction, name, *(small for small, _ in pairs))
    return [compression.decompress(result, context) for result, (_, context) in zip(results, pairs, strict=True)]


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Handle:
    """``grouped_allreduce``, beside the script."""
    reduction = Reduction(op, average, prescale_factor, postscale_factor, process_set)
    return job().calls.later(*_allreduce(reduction, job().calls.name("grouped_allreduce", name), tensors))


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> list[Tensor]:
    """``grouped_allreduce`` in place."""
    result: list[Tensor] = synchronize(
        grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    )
    return result


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Handle:
    """``grouped_allreduce`` in place, beside the script."""
    reduction = Reduction(op, average, prescale_factor, postscale_factor, process_set)
    name = job().calls.name("grouped_allreduce", name)
    return job().calls.later(*_allreduce(reduction, name, tensors, into=tensors))


def _allreduce(
    reduction: Reduction,
    name: str,
    tensors: Sequence[Tensor],
    single: bool = False,
    into: Sequence[Tensor] | None = None,
) -> tuple[Request, Callable[[Axis], Any]]:
    """What to agree on, and what to do then."""
    for tensor in tensors:
        reduction.check(tensor)
    kind = "allreduce" if single else "grouped_allreduce"

    def work(axis: Axis) -> Any:
        results = [tensor.detach() for tensor in into] if into is not None else [t.detach().clone() for t in tensors]
        for dtype in dict.fromkeys(tensor.dtype for tensor in results):
            same = [tensor for tensor in results if tensor.dtype == dtype]
            if len(same) == 1 and same[0].is_contiguous():
                reduction(axis, same[0])
                continue
            flat = torch.cat([tensor.reshape(-1) for tensor in same])
            reduction(axis, flat)
            for tensor, part in zip(same, flat.split([tensor.numel() for tensor in same]), strict=True):
                tensor.copy_(part.view(tensor.shape))
        found = results if into is None else list(into)
        return found[0] if single else found

    return Request(kind, name, f"{reduction} of {', '.join(map(shape, tensors))}"), work


class _Allreduce(torch.autograd.Function):
    """Its gradients are reduced alike."""

    @staticmethod
    def forward(ctx: Any, reduction: Reduction, name: str, tensor: Tensor) -> Tensor:
        ctx.reduction, ctx.name = reduction, name
        result: Tensor = job().calls.now(*_allreduce(reduction, name, [tensor], single=True))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _require_linear(ctx.reduction)
        return None, None, _Allreduce.apply(ctx.reduction, f"{ctx.name}.gradient", gradients[0])


class _GroupedAllreduce(torch.autograd.Function):
    """Of several tensors."""

    @staticmethod
    def forward(ctx: Any, reduction: Reduction, name: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.reduction, ctx.name = reduction, name
        return tuple(job().calls.now(*_allreduce(reduction, name, tensors)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _require_linear(ctx.reduction)
        return None, None, *_GroupedAllreduce.apply(ctx.reduction, f"{ctx.name}.gradient", *gradients)


def _require_linear(reduction: Reduction) -> None:
    if reduction.op not in (Average, Sum):
        raise RuntimeError(
            f"allreduce(op={reduction.op.name}) has no gradient here: call it on tensor.detach(), or use Average or Sum"
        )


# --------------------------------------------------------------------------------------------- handles, and barrier


def synchronize(handle: Handle) -> Any:
    """Wait until what was started is done; returns its result, or raises what it raised."""
    if not isinstance(handle, Handle):
        raise TypeError(f"{handle!r} is no handle: give what allreduce_async and its like return")
    return handle.future.result()


def poll(handle: Handle) -> bool:
    """Whether ``synchronize(handle)`` would return at once."""
    return handle.future.done()


def barrier(process_set: ProcessSet | None = None) -> None:
    """Wait until every rank is here."""
    only_global(process_set)
    job().calls.now(Request("barrier", job().calls.name("barrier", None), "all"), lambda axis: axis.barrier())


def join(device: int = -1) -> int:
    """Horovod's end for a rank that has no more data, while others go on. Alone: 0, at once.

    Raises:
        ValueError: there are several ranks: see there for what to do.
    """
    if job().grid.size == 1:
        return 0
    raise ValueError(
        "join() is not here: the others' averages would still be over all ranks, so those that go on would train with "
        "gradients that are too small. Give every rank as many batches (torch's DistributedSampler does), or let a "
        "rank that has none call optimizer.zero_grad(); optimizer.step() as often as the others: it takes part with "
        "zeros"
    )


def require_rank(root: int) -> None:
    """Refuse what is no rank."""
    if not 0 <= root < job().grid.size:
        raise ValueError(f"root_rank={root} of {job().grid.size} ranks: they count from 0 to {job().grid.size - 1}")


def require(tensor: Any, dims: int = 0) -> None:
    """Refuse what is no tensor that can be sent."""
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{type(tensor).__name__} is no tensor: give torch.tensor(value); for other objects there are "
            "triax.broadcast_object and triax.allgather_object"
        )
    if tensor.layout != torch.strided:
        raise ValueError("a sparse tensor: give tensor.to_dense()")
    if tensor.dim() < dims:
        raise ValueError("a tensor without dims has no rows: give tensor.view(1)")
    if tensor.device.type not in ("cpu", job().grid.device.type):  # beside NCCL there is gloo
        raise ValueError(f"a tensor on {tensor.device}, and the ranks talk on {job().grid.device}: move it there")


def as_numbers(tensor: Tensor) -> Tensor:
    """Booleans travel as bytes."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def shape(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
