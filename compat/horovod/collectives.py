"""Horovod's collectives that move tensors: ``allgather``, ``broadcast``, ``alltoall``, ``reducescatter``.

Gradients follow Horovod's conventions:

| collective | gradient |
|---|---|
| allgather | averaged over the ranks; each rank takes its own rows |
| broadcast | averaged over the ranks; zero on all ranks but the root |
| alltoall | the alltoall back |
| reducescatter | allgathered; for ``Sum`` multiplied by the number of ranks |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...grid import Axis
from .compression import Compression
from .context import ProcessSet, context, require_global
from .negotiation import CollectiveRequest, Handle, gather_counts
from .reductions import (
    Average,
    ReduceOp,
    Reduction,
    Sum,
    allreduce,
    bool_to_uint8,
    describe,
    require_rank,
    require_tensor,
    synchronize,
)

_TAG = 2**20 + 1  # tag of the messages of an alltoall


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet | None = None) -> Tensor:
    """Concatenate the tensors of all ranks along dim 0. Differentiable.

    Args:
        tensor: (n, ...); n may differ between ranks, the other dims and the dtype may not.
        name: for error messages and the timeline.
        process_set: None or ``global_process_set``.

    Raises:
        ValueError: a tensor of 0 dims, ranks that differ.
    """
    require_global(process_set)
    result: Tensor = _Allgather.apply(context().queue.unique_name("allgather", name), tensor)[0]
    return result


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet | None = None) -> Handle:
    """Start ``allgather`` in the background. Not differentiable."""
    require_global(process_set)
    request, work = _allgather(context().queue.unique_name("allgather", name), tensor)
    return context().queue.submit(request, lambda axis: work(axis)[0])


def _allgather(name: str, tensor: Tensor) -> tuple[CollectiveRequest, Callable[[Axis], tuple[Tensor, list[int]]]]:
    """Return the request of an allgather, and the function that runs it: to the result and each rank's rows."""
    require_tensor(tensor, dims=1)

    def work(axis: Axis) -> tuple[Tensor, list[int]]:
        mine = bool_to_uint8(tensor.detach().contiguous())
        counts = [count for (count,) in gather_counts(axis, [tensor.shape[0]], context().grid.device)]
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

    return CollectiveRequest("allgather", name, f"(any{describe(tensor[:0])[2:]}"), work


class _Allgather(torch.autograd.Function):
    """Differentiable allgather: gradients are averaged over the ranks, and each rank takes its own rows."""

    @staticmethod
    def forward(ctx: Any, name: str, tensor: Tensor) -> tuple[Tensor, Tensor]:
        whole, counts = context().queue.run(*_allgather(name, tensor))
        ctx.name, ctx.start, ctx.rows = name, sum(counts[: context().grid.rank]), tensor.shape[0]
        sizes = torch.tensor(counts)
        ctx.mark_non_differentiable(sizes)
        return whole, sizes

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        mean = allreduce(gradients[0], name=f"{ctx.name}.gradient", op=Average)
        return None, mean.narrow(0, ctx.start, ctx.rows)


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None) -> Tensor:
    """Return a copy of rank ``root_rank``'s tensor. Differentiable."""
    require_global(process_set)
    result: Tensor = _Broadcast.apply(context().queue.unique_name("broadcast", name), root_rank, tensor)
    return result


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle:
    """Start ``broadcast`` in the background. Not differentiable."""
    require_global(process_set)
    return context().queue.submit(*_broadcast(context().queue.unique_name("broadcast", name), root_rank, tensor))


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Tensor:
    """``broadcast`` in place. Not differentiable."""
    result: Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return result


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle:
    """Start ``broadcast`` in place in the background: do not use the tensor until ``synchronize(handle)``."""
    require_global(process_set)
    name = context().queue.unique_name("broadcast", name)
    return context().queue.submit(*_broadcast(name, root_rank, tensor, tensor))


def _broadcast(
    name: str, root: int, tensor: Tensor, into: Tensor | None = None
) -> tuple[CollectiveRequest, Callable[[Axis], Tensor]]:
    """Return the request of a broadcast, and the function that runs it: into ``into``, or into a new tensor."""
    require_tensor(tensor)
    require_rank(root)

    def work(axis: Axis) -> Tensor:
        result = tensor.detach().clone() if into is None else into.detach()
        whole = bool_to_uint8(result.contiguous())
        axis.broadcast(whole, root)
        if whole.data_ptr() != result.data_ptr():
            result.copy_(whole.view(result.dtype))
        return result if into is None else into

    return CollectiveRequest("broadcast", name, f"{describe(tensor)} from rank {root}"), work


class _Broadcast(torch.autograd.Function):
    """Differentiable broadcast: gradients are averaged over the ranks, and go to the root alone."""

    @staticmethod
    def forward(ctx: Any, name: str, root: int, tensor: Tensor) -> Tensor:
        ctx.name, ctx.root = name, root
        result: Tensor = context().queue.run(*_broadcast(name, root, tensor))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        mean = allreduce(gradients[0], name=f"{ctx.name}.gradient", op=Average)
        return None, None, mean if context().grid.rank == ctx.root else torch.zeros_like(mean)


# ---------------------------------------------------------------------------------------- alltoall, reducescatter


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """Send rows to every rank and return the rows received, in the order of the ranks. Differentiable.

    Args:
        tensor: (n, ...); the other dims and the dtype are the same on all ranks.
        splits: (ranks,) the number of rows for each rank; None: n / ranks for each.
        name: for error messages and the timeline.
        process_set: None or ``global_process_set``.

    Returns:
        The rows received. With ``splits``: a pair of these and the number of rows from each rank, int32 (ranks,).

    Raises:
        ValueError: splits that do not add up to n, n that is no multiple of the number of ranks, ranks that differ.
    """
    require_global(process_set)
    rows = _rows_per_rank(tensor, splits)
    whole, received = _Alltoall.apply(context().queue.unique_name("alltoall", name), rows, tensor)
    return whole if splits is None else (whole, received)


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Handle:
    """Start ``alltoall`` in the background; the result is always the pair, as in Horovod. Not differentiable."""
    require_global(process_set)
    request, work = _alltoall(context().queue.unique_name("alltoall", name), _rows_per_rank(tensor, splits), tensor)

    def pair(axis: Axis) -> tuple[Tensor, Tensor]:
        whole, received = work(axis)
        return whole, torch.tensor(received, dtype=torch.int32)

    return context().queue.submit(request, pair)


def _rows_per_rank(tensor: Tensor, splits: Tensor | Sequence[int] | None) -> list[int]:
    """Return the number of rows that go to each rank."""
    require_tensor(tensor, dims=1)
    size, count = context().grid.size, tensor.shape[0]
    if splits is None:
        if count % size:
            raise ValueError(f"{count} rows cannot be divided evenly among {size} ranks: give splits")
        return [count // size] * size
    rows = [int(each) for each in splits]
    if len(rows) != size or sum(rows) != count or min(rows) < 0:
        raise ValueError(f"splits={rows} for {count} rows: give {size} numbers of at least 0 that add up to {count}")
    return rows


def _alltoall(
    name: str, rows: list[int], tensor: Tensor
) -> tuple[CollectiveRequest, Callable[[Axis], tuple[Tensor, list[int]]]]:
    """Return the request of an alltoall, and the function that runs it: to the result and the rows from each rank."""

    def work(axis: Axis) -> tuple[Tensor, list[int]]:
        outgoing = bool_to_uint8(tensor.detach().contiguous())
        table = gather_counts(axis, rows, context().grid.device)
        received = [row[axis.rank] for row in table]
        whole = outgoing.new_empty((sum(received), *tensor.shape[1:]))
        exchange(axis, list(outgoing.split(rows)), list(whole.split(received)))
        return whole.view(tensor.dtype), received

    return CollectiveRequest("alltoall", name, f"(any{describe(tensor[:0])[2:]}"), work


def exchange(axis: Axis, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
    """Send ``outgoing[r]`` to rank r and receive ``incoming[r]`` from it; both may be empty. Collective."""
    incoming[axis.rank].copy_(outgoing[axis.rank])
    if axis.size == 1:
        return
    if incoming[axis.rank].is_cuda:  # NCCL would need the point-to-point operations in one batch
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
    """Differentiable alltoall: gradients go back to the ranks that the rows came from."""

    @staticmethod
    def forward(ctx: Any, name: str, rows: list[int], tensor: Tensor) -> tuple[Tensor, Tensor]:
        whole, received = context().queue.run(*_alltoall(name, rows, tensor))
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
    op: ReduceOp = Average,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce the tensors of all ranks, and return this rank's rows of the result. Differentiable.

    Args:
        tensor: (n, ...), of the same shape and dtype on every rank. A rank gets n / ranks rows; if there is a
            remainder m, the first m ranks get one more.
        name, compression, prescale_factor, postscale_factor, process_set: as ``allreduce``.
        op: ``Average`` or ``Sum``.

    Raises:
        ValueError: another ``op``, and the errors of ``allreduce``.
    """
    reduction = _sum_or_average(op, prescale_factor, postscale_factor, process_set)
    require_tensor(tensor, dims=1)
    small, ctx = compression.compress(tensor)
    result: Tensor = _Reducescatter.apply(reduction, context().queue.unique_name("reducescatter", name), small)
    decompressed: Tensor = compression.decompress(result, ctx)
    return decompressed


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start ``reducescatter`` in the background. Not differentiable."""
    reduction = _sum_or_average(op, prescale_factor, postscale_factor, process_set)
    name = context().queue.unique_name("reducescatter", name)
    return context().queue.submit(*_reducescatter(reduction, name, tensor))


def _sum_or_average(op: ReduceOp, pre: float, post: float, process_set: ProcessSet | None) -> Reduction:
    """Return the reduction; ValueError for an operation other than Sum and Average."""
    reduction = Reduction(op, None, pre, post, process_set)
    if reduction.op not in (Average, Sum):
        raise ValueError(f"reducescatter(op={reduction.op.name}): give Average or Sum, or slice an allreduce")
    return reduction


def _reducescatter(
    reduction: Reduction, name: str, tensor: Tensor
) -> tuple[CollectiveRequest, Callable[[Axis], Tensor]]:
    """Return the request of a reducescatter, and the function that runs it."""
    reduction.check(tensor)
    require_tensor(tensor, dims=1)

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

    return CollectiveRequest("reducescatter", name, f"{reduction} of {describe(tensor)}"), work


class _Reducescatter(torch.autograd.Function):
    """Differentiable reducescatter: gradients are allgathered, and for ``Sum`` multiplied by the number of ranks."""

    @staticmethod
    def forward(ctx: Any, reduction: Reduction, name: str, tensor: Tensor) -> Tensor:
        ctx.name, ctx.factor = name, reduction.pre * reduction.post
        ctx.factor *= context().grid.size if reduction.op is Sum else 1
        result: Tensor = context().queue.run(*_reducescatter(reduction, name, tensor))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        whole = allgather(gradients[0], name=f"{ctx.name}.gradient")
        return None, None, whole * ctx.factor


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet | None = None
) -> list[Tensor]:
    """``allgather`` of each tensor, one after the other."""
    name = context().queue.unique_name("grouped_allgather", name)
    return [allgather(tensor, f"{name}.{i}", process_set) for i, tensor in enumerate(tensors)]


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """``reducescatter`` of each tensor, one after the other."""
    name, factors = context().queue.unique_name("grouped_reducescatter", name), (prescale_factor, postscale_factor)
    return [
        reducescatter(tensor, f"{name}.{i}", compression, op, process_set, *factors) for i, tensor in enumerate(tensors)
    ]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
