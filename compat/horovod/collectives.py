"""Horovod's collectives that move tensors: ``allgather``, ``broadcast``, ``alltoall``, ``reducescatter``.

All functions are collective, also those that run in the background. Gradients follow Horovod's conventions:

| collective | gradient |
|---|---|
| allgather | averaged over the ranks; each rank takes its own rows |
| broadcast | averaged over the ranks; zero on all ranks but the root |
| alltoall | the alltoall back |
| reducescatter | allgathered; for ``Sum`` multiplied by the number of ranks |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...grid import Axis
from .compression import Compression
from .context import ProcessSet, context, require_global
from .negotiation import Handle, gather_counts
from .reductions import (
    Average,
    Collective,
    ReduceOp,
    Reduction,
    Sum,
    allreduce,
    arguments_of,
    describe,
    require_rank,
    require_tensor,
    synchronize,
    to_message,
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
    return _allgather(tensor, name, process_set).differentiable(tensor)


@arguments_of(allgather)
def allgather_async(*args: Any, **named: Any) -> Handle:
    """Start ``allgather`` in the background. Not differentiable."""
    return _allgather(*args, **named).start()


def _allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet | None = None) -> Collective[Tensor]:
    require_global(process_set)
    require_tensor(tensor, dims=1)
    counts: list[int] = []  # rows of each rank

    def work(axis: Axis) -> Tensor:
        own_bytes = to_message(tensor)
        counts[:] = [count for (count,) in gather_counts(axis, [tensor.shape[0]], context().grid.device)]
        gathered = own_bytes.new_empty((sum(counts), *tensor.shape[1:]))
        if len(set(counts)) == 1:
            axis.all_gather(gathered, own_bytes)
        else:
            parts = gathered.split(counts)
            parts[axis.rank].copy_(own_bytes)
            pending = [axis.broadcast(part, source, async_op=True) for source, part in enumerate(parts) if part.numel()]
            for work_handle in pending:
                work_handle.wait()
        return gathered.view(tensor.dtype)

    def gradient(name: str, whole: Tensor) -> Tensor:
        return allreduce(whole, name=name, op=Average).split(counts)[context().grid.rank]

    return Collective(context().queue.request("allgather", name, _any_rows(tensor)), work, gradient)


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None) -> Tensor:
    """Return a copy of rank ``root_rank``'s tensor. Differentiable.

    Args:
        tensor: the tensor to send. On other ranks, a tensor of the same shape and dtype, which does not change.
        root_rank: the rank whose tensor is sent.
        name: for error messages and the timeline.
        process_set: None or ``global_process_set``.
    """
    return _broadcast(tensor, root_rank, name, process_set).differentiable(tensor)


@arguments_of(broadcast)
def broadcast_async(*args: Any, **named: Any) -> Handle:
    """Start ``broadcast`` in the background. Not differentiable."""
    return _broadcast(*args, **named).start()


@arguments_of(broadcast)
def broadcast_(tensor: Tensor, *args: Any, **named: Any) -> Tensor:
    """``broadcast`` in place. Not differentiable."""
    synchronize(broadcast_async_(tensor, *args, **named))
    return tensor


@arguments_of(broadcast)
def broadcast_async_(*args: Any, **named: Any) -> Handle:
    """Start ``broadcast`` in place in the background: do not use the tensor until ``synchronize(handle)``."""
    return _broadcast(*args, **named, in_place=True).start()


def _broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    *,
    in_place: bool = False,
) -> Collective[Tensor]:
    require_global(process_set)
    require_tensor(tensor)
    require_rank(root_rank)

    def work(axis: Axis) -> Tensor:
        result = tensor.detach() if in_place else tensor.detach().clone()
        message = to_message(result)
        axis.broadcast(message, root_rank)
        if message.data_ptr() != result.data_ptr():
            result.copy_(message.view(result.dtype))
        return tensor if in_place else result

    def gradient(name: str, result: Tensor) -> Tensor:
        mean = allreduce(result, name=name, op=Average)
        return mean if context().grid.rank == root_rank else torch.zeros_like(mean)

    what = f"{describe(tensor)} from rank {root_rank}"
    return Collective(context().queue.request("broadcast", name, what), work, gradient)


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
    arrived, received = _alltoall(tensor, splits, name, process_set).differentiable(tensor)
    return arrived if splits is None else (arrived, received)


@arguments_of(alltoall)
def alltoall_async(*args: Any, **named: Any) -> Handle:
    """Start ``alltoall`` in the background; the result is always the pair, as in Horovod. Not differentiable."""
    return _alltoall(*args, **named).start()


def _rows_per_rank(tensor: Tensor, splits: Tensor | Sequence[int] | None) -> list[int]:
    """Return the number of rows that go to each rank."""
    require_tensor(tensor, dims=1)
    size, count = context().grid.size, tensor.shape[0]
    if splits is None:
        if count % size:
            raise ValueError(f"{count} rows cannot be divided evenly among {size} ranks: give splits")
        return [count // size] * size
    rows = [int(split) for split in splits]
    if len(rows) != size or sum(rows) != count or min(rows) < 0:
        raise ValueError(f"splits={rows} for {count} rows: give {size} numbers of at least 0 that add up to {count}")
    return rows


def _alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Collective[tuple[Tensor, Tensor]]:
    require_global(process_set)
    rows = _rows_per_rank(tensor, splits)
    received: list[int] = []  # rows from each rank

    def work(axis: Axis) -> tuple[Tensor, Tensor]:
        outgoing = to_message(tensor)
        received[:] = [row[axis.rank] for row in gather_counts(axis, rows, context().grid.device)]
        incoming = outgoing.new_empty((sum(received), *tensor.shape[1:]))
        exchange(axis, list(outgoing.split(rows)), list(incoming.split(received)))
        return incoming.view(tensor.dtype), torch.tensor(received, dtype=torch.int32)

    def gradient(name: str, whole: Tensor, _: Tensor) -> Tensor:
        back: Tensor = alltoall(whole, received, name)[0]
        return back

    return Collective(context().queue.request("alltoall", name, _any_rows(tensor)), work, gradient)


def exchange(axis: Axis, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
    """Send ``outgoing[r]`` to rank r and receive ``incoming[r]`` from it; both may be empty. Collective."""
    incoming[axis.rank].copy_(outgoing[axis.rank])
    if axis.size == 1:
        return
    if incoming[axis.rank].is_cuda:  # NCCL would need the point-to-point operations in one batch
        axis.traffic.add(axis.name, "send", sum(message.nbytes for message in outgoing) - outgoing[axis.rank].nbytes)
        dist.all_to_all(list(incoming), list(outgoing), group=axis.group)
        return
    pending = []
    for step in range(1, axis.size):
        to, source = (axis.rank + step) % axis.size, (axis.rank - step) % axis.size
        if incoming[source].numel():
            pending.append(axis.receive(incoming[source], source, _TAG))
        if outgoing[to].numel():
            pending.append(axis.send(outgoing[to], to, _TAG))
    for work in pending:
        work.wait()


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
    require_tensor(tensor, dims=1)
    small, ctx = compression.compress(tensor)
    made = _reducescatter(small, name, op, process_set, prescale_factor, postscale_factor)
    decompressed: Tensor = compression.decompress(made.differentiable(small), ctx)
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
    return _reducescatter(tensor, name, op, process_set, prescale_factor, postscale_factor).start()


def _reducescatter(
    tensor: Tensor, name: str | None, op: ReduceOp, process_set: ProcessSet | None, pre: float, post: float
) -> Collective[Tensor]:
    reduction = Reduction(op, None, pre, post, process_set)
    if reduction.op not in (Average, Sum):
        raise ValueError(
            f"reducescatter(op={reduction.op.name}) is not supported: give op=Average or op=Sum, or take this rank's "
            f"rows of allreduce(op={reduction.op.name})"
        )
    reduction.check(tensor)
    require_tensor(tensor, dims=1)

    def work(axis: Axis) -> Tensor:
        source = to_message(tensor)
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

    def gradient(name: str, rows: Tensor) -> Tensor:
        factor = pre * post * (context().grid.size if reduction.op is Sum else 1)
        return allgather(rows, name) * factor

    what = f"{reduction} of {describe(tensor)}"
    return Collective(context().queue.request("reducescatter", name, what), work, gradient)


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


def _any_rows(tensor: Tensor) -> str:
    """Return a tensor's shape and dtype for a message, without the number of rows: ``(any, 3) float32``."""
    return f"(any{describe(tensor[:0])[2:]}"
