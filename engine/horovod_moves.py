"""Horovod's operations that move tensors: ``allgather``, ``broadcast``, ``alltoall``, ``reducescatter``.

Gradients are those of Horovod: those of an allgather and of a broadcast are averaged over the ranks, not summed; those
of an alltoall go back to where the numbers came from; those of a reducescatter are gathered, and for ``Sum`` multiplied
by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..grid import Axis
from .horovod import ProcessSet, job, only_global
from .horovod_calls import Handle, Request, rows_of
from .horovod_compression import Compression
from .horovod_ops import Average, Op, Reduction, Sum, allreduce, as_numbers, require, require_rank, shape, synchronize

_TAG = 2**20 + 1  # of an alltoall's messages


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet | None = None) -> Tensor:
    """The tensors of all ranks, one behind the other on dim 0, of which each may have another size. Differentiable.

    Args:
        tensor: (n, ...), n this rank's own; the rest and the dtype are the same on all.
        name: for messages and the timeline.

    Raises:
        ValueError: a tensor without dims, ranks that differ.
    """
    only_global(process_set)
    result: Tensor = _Allgather.apply(job().calls.name("allgather", name), tensor)[0]
    return result


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet | None = None) -> Handle:
    """``allgather``, beside the script. Not differentiable."""
    only_global(process_set)
    request, work = _allgather(job().calls.name("allgather", name), tensor)
    return job().calls.later(request, lambda axis: work(axis)[0])


def _allgather(name: str, tensor: Tensor) -> tuple[Request, Callable[[Axis], tuple[Tensor, list[int]]]]:
    """It gathers the tensors, and their sizes."""
    require(tensor, dims=1)

    def work(axis: Axis) -> tuple[Tensor, list[int]]:
        mine = as_numbers(tensor.detach().contiguous())
        counts = [count for (count,) in rows_of(axis, [tensor.shape[0]], job().grid.device)]
        whole = mine.new_empty((sum(counts), *tensor.shape[1:]))
        if len(set(counts)) == 1:
            axis.all_gather(whole, mine)
        else:
            parts = whole.split(counts)
            parts[axis.rank].copy_(mine)
            pending = [axis.broadcast(part, source, async_op=True) for source, part in enumerate(parts) if part.numel()]
            for each in pending:
                each.wait()
        return whole.view(tensor.dtype), counts

    return Request("allgather", name, f"(any{shape(tensor[:0])[2:]}"), work


class _Allgather(torch.autograd.Function):
    """Its gradients are averaged over the ranks, and each takes its own rows of them: Horovod's convention."""

    @staticmethod
    def forward(ctx: Any, name: str, tensor: Tensor) -> tuple[Tensor, Tensor]:
        whole, counts = job().calls.now(*_allgather(name, tensor))
        ctx.name, ctx.start, ctx.rows = name, sum(counts[: job().grid.rank]), tensor.shape[0]
        sizes = torch.tensor(counts)
        ctx.mark_non_differentiable(sizes)
        return whole, sizes

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        mean = allreduce(gradients[0], name=f"{ctx.name}.gradient", op=Average)
        return None, mean.narrow(0, ctx.start, ctx.rows)


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None) -> Tensor:
    """A new tensor: that of rank ``root_rank``. Differentiable."""
    only_global(process_set)
    result: Tensor = _Broadcast.apply(job().calls.name("broadcast", name), root_rank, tensor)
    return result


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle:
    """``broadcast``, beside the script. Not differentiable."""
    only_global(process_set)
    return job().calls.later(*_broadcast(job().calls.name("broadcast", name), root_rank, tensor))


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Tensor:
    """``broadcast`` in place."""
    result: Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return result


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle:
    """``broadcast`` in place, beside the script."""
    only_global(process_set)
    return job().calls.later(*_broadcast(job().calls.name("broadcast", name), root_rank, tensor, tensor))


def _broadcast(
    name: str, root: int, tensor: Tensor, into: Tensor | None = None
) -> tuple[Request, Callable[[Axis], Tensor]]:
    require(tensor)
    require_rank(root)

    def work(axis: Axis) -> Tensor:
        result = tensor.detach().clone() if into is None else into.detach()
        whole = as_numbers(result.contiguous())
        axis.broadcast(whole, root)
        if whole.data_ptr() != result.data_ptr():
            result.copy_(whole.view(result.dtype))
        return result if into is None else into

    return Request("broadcast", name, f"{shape(tensor)} from rank {root}"), work


class _Broadcast(torch.autograd.Function):
    """Its gradients are averaged, and all the source's: Horovod's convention."""

    @staticmethod
    def forward(ctx: Any, name: str, root: int, tensor: Tensor) -> Tensor:
        ctx.name, ctx.root = name, root
        result: Tensor = job().calls.now(*_broadcast(name, root, tensor))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        mean = allreduce(gradients[0], name=f"{ctx.name}.gradient", op=Average)
        return None, None, mean if job().grid.rank == ctx.root else torch.zeros_like(mean)


# ---------------------------------------------------------------------------------------- alltoall, reducescatter


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """Rows for every rank, and what every rank has for this one, in the order of the ranks. Differentiable.

    Args:
        tensor: (n, ...); the rest of its shape and its dtype are the same on all ranks.
        splits: how many rows go to each rank; by default as many to each.
        name: for messages and the timeline.

    Returns:
        The tensor; where ``splits`` are given, the tensor and how many of its rows came from each rank.

    Raises:
        ValueError: splits that do not add up to n, or n that cannot be split evenly; ranks that differ.
    """
    only_global(process_set)
    rows = _rows(tensor, splits)
    whole, received = _Alltoall.apply(job().calls.name("alltoall", name), rows, tensor)
    return whole if splits is None else (whole, received)


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Handle:
    """``alltoall``, beside the script; its result is always the pair, as Horovod's. Not differentiable."""
    only_global(process_set)
    request, work = _alltoall(job().calls.name("alltoall", name), _rows(tensor, splits), tensor)

    def pair(axis: Axis) -> tuple[Tensor, Tensor]:
        whole, received = work(axis)
        return whole, torch.tensor(received, dtype=torch.int32)

    return job().calls.later(request, pair)


def _rows(tensor: Tensor, splits: Tensor | Sequence[int] | None) -> list[int]:
    """How many go to each rank."""
    require(tensor, dims=1)
    size, count = job().grid.size, tensor.shape[0]
    if splits is None:
        if count % size:
            raise ValueError(f"{count} rows are not as many for each of {size} ranks: give splits")
        return [count // size] * size
    rows = [int(each) for each in splits]
    if len(rows) != size or sum(rows) != count or min(rows) < 0:
        raise ValueError(f"splits={rows} of {count} rows: give {size} numbers that add up to {count}")
    return rows


def _alltoall(name: str, rows: list[int], tensor: Tensor) -> tuple[Request, Callable[[Axis], tuple[Tensor, list[int]]]]:
    """It exchanges the rows, and how many."""

    def work(axis: Axis) -> tuple[Tensor, list[int]]:
        outgoing = as_numbers(tensor.detach().contiguous())
        table = rows_of(axis, rows, job().grid.device)
        received = [row[axis.rank] for row in table]
        whole = outgoing.new_empty((sum(received), *tensor.shape[1:]))
        exchange(axis, list(outgoing.split(rows)), list(whole.split(received)))
        return whole.view(tensor.dtype), received

    return Request("alltoall", name, f"(any{shape(tensor[:0])[2:]}"), work


def exchange(axis: Axis, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
    """Send each rank its tensor and receive its own; both may be empty."""
    incoming[axis.rank].copy_(outgoing[axis.rank])
    if axis.size == 1:
        return
    if incoming[axis.rank].is_cuda:  # NCCL's messages would have to be started together
        axis.traffic.add(axis.name, "send", sum(map(_bytes, outgoing)) - _bytes(outgoing[axis.rank]))
        dist.all_to_all(list(incoming), list(outgoing), group=axis.group)
        return
    pending = []
    for step in range(1, axis.size):
        to, source = (axis.rank + step) % axis.size, (axis.rank - step) % axis.size
        if incoming[source].numel():
            pending.append(axis.receive(incoming[source], source, _TAG))
        if outgoing[to].numel():
            pending.append(axis.send(outgoing[to], to, _TAG))
    for each in pending:
        each.wait()


class _Alltoall(torch.autograd.Function):
    """Its gradients go back."""

    @staticmethod
    def forward(ctx: Any, name: str, rows: list[int], tensor: Tensor) -> tuple[Tensor, Tensor]:
        whole, received = job().calls.now(*_alltoall(name, rows, tensor))
        ctx.name, ctx.received = name, received
        counts = torch.tensor(received, dtype=torch.int32)
        ctx.mark_non_differentiable(counts)
        return whole, counts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, _Alltoall.apply(f"{ctx.name}.gradient", ctx.received, gradients[0])[0]


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Op = Average,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """The tensors of all ranks, reduced, and of the result this rank's rows: as many for each, the first ones one more.

    Args:
        tensor: (n, ...), of the same shape and dtype on every rank.
        name, compression, prescale_factor, postscale_factor: as ``allreduce``.
        op: ``Average`` or ``Sum``.

    Raises:
        ValueError: another ``op``, and what ``allreduce`` refuses.
    """
    reduction = _summing(op, prescale_factor, postscale_factor, process_set)
    require(tensor, dims=1)
    small, context = compression.compress(tensor)
    result: Tensor = _Reducescatter.apply(reduction, job().calls.name("reducescatter", name), small)
    decompressed: Tensor = compression.decompress(result, context)
    return decompressed


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: Op = Average,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """``reducescatter``, beside the script. Not differentiable."""
    reduction = _summing(op, prescale_factor, postscale_factor, process_set)
    return job().calls.later(*_reducescatter(reduction, job().calls.name("reducescatter", name), tensor))


def _summing(op: Op, pre: float, post: float, process_set: ProcessSet | None) -> Reduction:
    reduction = Reduction(op, None, pre, post, process_set)
    if reduction.op not in (Average, Sum):
        raise ValueError(f"reducescatter(op={reduction.op.name}): it adds up or averages; use allreduce and take rows")
    return reduction


def _reducescatter(reduction: Reduction, name: str, tensor: Tensor) -> tuple[Request, Callable[[Axis], Tensor]]:
    reduction.check(tensor)
    require(tensor, dims=1)

    def work(axis: Axis) -> Tensor:
        source = tensor.detach().contiguous()
        source = source * reduction.pre if reduction.pre != 1.0 else source.clone()
        count = tensor.shape[0]
        rows = [count // axis.size + (rank < count % axis.size) for rank in range(axis.size)]
        result = source.new_empty((rows[axis.rank], *tensor.shape[1:]))
        if count % axis.size == 0:
            axis.reduce_scatter(result.view(-1), source.view(-1))
        else:
            received = source.new_empty((axis.size, *result.shape))
            exchange(axis, list(source.split(rows)), list(received))
            torch.sum(received, 0, out=result)
        reduction.finish(axis, result)
        return result

    return Request("reducescatter", name, f"{reduction} of {shape(tensor)}"), work


class _Reducescatter(torch.autograd.Function):
    """Its gradients are gathered; those of a sum, times the number of ranks: Horovod's convention."""

    @staticmethod
    def forward(ctx: Any, reduction: Reduction, name: str, tensor: Tensor) -> Tensor:
        ctx.name, ctx.factor = name, reduction.pre * reduction.post
        ctx.factor *= job().grid.size if reduction.op is Sum else 1
        result: Tensor = job().calls.now(*_reducescatter(reduction, name, tensor))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        whole = allgather(gradients[0], name=f"{ctx.name}.gradient")
        return None, None, whole * ctx.factor


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet | None = None
) -> list[Tensor]:
    """``allgather`` of each."""
    name = job().calls.name("grouped_allgather", name)
    return [allgather(tensor, f"{name}.{i}", process_set) for i, tensor in enumerate(tensors)]


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: Op = Average,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """``reducescatter`` of each."""
    name, factors = job().calls.name("grouped_reducescatter", name), (prescale_factor, postscale_factor)
    return [
        reducescatter(tensor, f"{name}.{i}", compression, op, process_set, *factors) for i, tensor in enumerate(tensors)
    ]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
