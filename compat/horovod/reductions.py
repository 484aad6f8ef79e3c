"""Horovod's reductions: ``allreduce`` and its variants, their handles, ``barrier`` and ``join``.

Arguments have Horovod's names and order. All functions are collective; negotiation.py says what is checked before.

The forms of a collective (differentiable, asynchronous, in place) share one ``Collective``.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from ...grid import Axis
from .compression import Compression
from .context import ProcessSet, context, require_global
from .negotiation import CollectiveRequest, Handle

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class Collective(Generic[T]):
    """Collective with checked arguments, which can run in the background or as a differentiable function.

    Attributes:
        request: description, compared between the ranks.
        work: runs the collective on the axis and returns its result.
        gradient: function of a name and the gradients of the result. It runs the collective of the backward pass, under
            this name, and returns the gradients of the tensors. It must not refer to the tensors: the autograd graph
            would keep them in memory.
    """

    request: CollectiveRequest
    work: Callable[[Axis], T]
    gradient: Callable[..., Tensor | tuple[Tensor, ...]]

    def start(self) -> Handle:
        """Start the collective in the background, without a gradient."""
        return context().queue.submit(self.request, self.work)

    def differentiable(self, *tensors: Tensor) -> T:
        """Run the collective as a function of ``tensors`` in the autograd graph, and return its result."""
        result: T = _Differentiable.apply(self, *tensors)
        return result


class _Differentiable(torch.autograd.Function):
    """Autograd function of a ``Collective``."""

    @staticmethod
    def forward(ctx: Any, collective: Collective[T], *tensors: Tensor) -> T:
        ctx.name, ctx.gradient = collective.request.name, collective.gradient
        result: T = context().queue.run(collective.request, collective.work)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradients_of_inputs = ctx.gradient(f"{ctx.name}.gradient", *gradients)
        return None, *(gradients_of_inputs if isinstance(gradients_of_inputs, tuple) else (gradients_of_inputs,))


def arguments_of(other: Callable[P, Any]) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """Return a decorator for a function that has the arguments of ``other``, so that they are written once."""

    def decorate(function: Callable[..., T]) -> Callable[P, T]:
        result = inspect.signature(function).return_annotation
        vars(function)["__signature__"] = inspect.signature(other).replace(return_annotation=result)
        return function

    return decorate


class ReduceOp(enum.IntEnum):
    """Reduction over the ranks, with Horovod's numbers."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average, Sum, Adasum, Min, Max, Product = ReduceOp
_AXIS = {Average: "sum", Sum: "sum", Min: "min", Max: "max", Product: "product"}


class Reduction:
    """Reduction operation with its factors, from the arguments of ``allreduce``, which are checked.

    Args:
        op, average: the operation; ``average`` is the deprecated form.
        pre, post: factors of the tensor before and after the reduction.
        process_set: None or ``global_process_set``.

    Raises:
        ValueError: the arguments contradict one another, or ``op`` is Adasum.
    """

    def __init__(self, op: ReduceOp | None, average: bool | None, pre: float, post: float, process_set: Any) -> None:
        require_global(process_set)
        if op is not None and average is not None:
            raise ValueError("op and average are both given: give only op; average is its deprecated form")
        if op is None:
            op = Sum if average is False else Average
        self.op, self.pre, self.post = ReduceOp(op), pre, post
        if self.op is Adasum:
            raise ValueError(NO_ADASUM)

    def check(self, tensor: Tensor) -> None:
        """Raise a ValueError for a tensor that is sparse or boolean, or that has integers while there are factors."""
        require_tensor(tensor)
        if tensor.dtype == torch.bool:
            raise ValueError("a tensor of torch.bool cannot be reduced: reduce tensor.to(torch.uint8)")
        if _is_integer(tensor) and (self.pre, self.post) != (1.0, 1.0):
            raise ValueError(
                f"prescale_factor={self.pre}, postscale_factor={self.post} need a floating-point tensor, not "
                f"{tensor.dtype}: reduce tensor.double()"
            )

    def __call__(self, axis: Axis, tensor: Tensor) -> None:
        """Reduce a contiguous tensor over the axis in place, factors included. Collective."""
        if self.pre != 1.0:
            tensor.mul_(self.pre)
        axis.all_reduce(tensor, op=_AXIS[self.op])
        self.finish(axis, tensor)

    def finish(self, axis: Axis, tensor: Tensor) -> None:
        """Turn the sum over the ranks into the result, in place: divide it for ``Average``, apply the factor ``post``.

        Averages of integers are rounded towards zero, as in Horovod.
        """
        if self.op is Average and _is_integer(tensor):
            torch.div(tensor, axis.size, rounding_mode="trunc", out=tensor)
        elif (factor := self.post / axis.size if self.op is Average else self.post) != 1.0:
            tensor.mul_(factor)

    def __str__(self) -> str:
        return self.op.name.lower() + ("" if self.pre == self.post == 1.0 else f" times {self.pre} and {self.post}")


NO_ADASUM = (
    "op=Adasum is not supported: its result depends on the number of ranks and their order, so that another number of "
    "ranks would train differently; use op=Average, and scale the learning rate yourself"
)

# ------------------------------------------------------------------------------------------------------- allreduce


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Tensor:
    """Reduce the tensors of all ranks into a new tensor. Differentiable for ``Average`` and ``Sum``.

    Args:
        tensor: of the same shape and dtype on every rank.
        average: deprecated form of ``op``: True is ``Average``, False is ``Sum``.
        name: for error messages and the timeline.
        compression: ``Compression.fp16`` sends 2 bytes per number.
        op: ``Average`` (of integers: rounded towards zero), ``Sum``, ``Min``, ``Max`` or ``Product``.
        prescale_factor, postscale_factor: factors of the tensor before and after the reduction.
        process_set: None or ``global_process_set``.

    Returns:
        A tensor of the same shape and dtype, equal on all ranks.

    Raises:
        ValueError: ``Adasum``, booleans, sparse tensors, factors with integers, ranks that differ.
    """
    reduction = Reduction(op, average, prescale_factor, postscale_factor, process_set)
    return _allreduce_compressed("allreduce", name, reduction, [tensor], compression)[0]


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Handle:
    """Start ``allreduce`` in the background; ``synchronize(handle)`` returns the result. Not differentiable."""
    options = (average, name, op, prescale_factor, postscale_factor, process_set)
    return _allreduce_async("allreduce", False, [tensor], *options)


@arguments_of(allreduce_async)
def allreduce_(tensor: Tensor, *options: Any, **named: Any) -> Tensor:
    """``allreduce`` in place. Not differentiable."""
    synchronize(allreduce_async_(tensor, *options, **named))
    return tensor


@arguments_of(allreduce_async)
def allreduce_async_(tensor: Tensor, *options: Any, **named: Any) -> Handle:
    """Start ``allreduce`` in place in the background: do not use the tensor until ``synchronize(handle)``."""
    return _allreduce_async("allreduce", True, [tensor], *options, **named)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> list[Tensor]:
    """``allreduce`` of several tensors, in one collective per dtype."""
    reduction = Reduction(op, average, prescale_factor, postscale_factor, process_set)
    return _allreduce_compressed("grouped_allreduce", name, reduction, tensors, compression)


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Handle:
    """Start ``grouped_allreduce`` in the background. Not differentiable."""
    options = (average, name, op, prescale_factor, postscale_factor, process_set)
    return _allreduce_async("grouped_allreduce", False, tensors, *options)


@arguments_of(grouped_allreduce_async)
def grouped_allreduce_(tensors: Sequence[Tensor], *options: Any, **named: Any) -> list[Tensor]:
    """``grouped_allreduce`` in place. Not differentiable."""
    synchronize(grouped_allreduce_async_(tensors, *options, **named))
    return list(tensors)


@arguments_of(grouped_allreduce_async)
def grouped_allreduce_async_(tensors: Sequence[Tensor], *options: Any, **named: Any) -> Handle:
    """Start ``grouped_allreduce`` in place in the background: do not use the tensors until ``synchronize(handle)``."""
    return _allreduce_async("grouped_allreduce", True, tensors, *options, **named)


def _allreduce_compressed(
    kind: str, name: str | None, reduction: Reduction, tensors: Sequence[Tensor], compression: Any
) -> list[Tensor]:
    """Compress, reduce differentiably, decompress."""
    for tensor in tensors:
        require_tensor(tensor)
    pairs = [compression.compress(tensor) for tensor in tensors]
    compressed = [small for small, _ in pairs]
    results = _allreduce(kind, name, reduction, compressed).differentiable(*compressed)
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, pairs, strict=True)]


def _allreduce_async(
    kind: str,
    in_place: bool,
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Handle:
    """Start an all-reduce in the background. Arguments as ``allreduce_async``, for one tensor or several.

    The handle's result is a list if ``kind`` is ``grouped_allreduce``, otherwise a tensor.
    """
    reduction = Reduction(op, average, prescale_factor, postscale_factor, process_set)
    made = _allreduce(kind, name, reduction, tensors, in_place)
    if kind == "grouped_allreduce":
        return context().queue.submit(made.request, lambda axis: list(made.work(axis)))
    return context().queue.submit(made.request, lambda axis: made.work(axis)[0])


def _allreduce(
    kind: str, name: str | None, reduction: Reduction, tensors: Sequence[Tensor], in_place: bool = False
) -> Collective[tuple[Tensor, ...]]:
    for tensor in tensors:
        reduction.check(tensor)

    def work(axis: Axis) -> tuple[Tensor, ...]:
        results = [tensor.detach() if in_place else tensor.detach().clone() for tensor in tensors]
        for dtype in dict.fromkeys(tensor.dtype for tensor in results):
            group = [tensor for tensor in results if tensor.dtype == dtype]
            if len(group) == 1 and group[0].is_contiguous() and not (group[0].is_conj() or group[0].is_neg()):
                reduction(axis, group[0])
                continue
            flat = torch.cat([tensor.reshape(-1) for tensor in group])
            reduction(axis, flat)
            for tensor, part in zip(group, flat.split([tensor.numel() for tensor in group]), strict=True):
                tensor.copy_(part.view(tensor.shape))
        return tuple(tensors if in_place else results)

    def gradient(name: str, *gradients: Tensor) -> tuple[Tensor, ...]:
        if reduction.op not in (Average, Sum):
            raise RuntimeError(
                f"allreduce(op={reduction.op.name}) has no gradient here: call it on tensor.detach(), or use Average "
                "or Sum"
            )
        return _allreduce(kind, name, reduction, gradients).differentiable(*gradients)

    what = f"{reduction} of {', '.join(map(describe, tensors))}"
    return Collective(context().queue.request(kind, name, what), work, gradient)


# --------------------------------------------------------------------------------------------- handles, and barrier


def synchronize(handle: Handle) -> Any:
    """Wait for an asynchronous operation; return its result, or raise its error."""
    if not isinstance(handle, Handle):
        raise TypeError(f"{handle!r} is not a handle: give the result of allreduce_async or another function in _async")
    return handle.future.result()


def poll(handle: Handle) -> bool:
    """Return True if ``synchronize(handle)`` would return at once."""
    return handle.future.done()


def barrier(process_set: ProcessSet | None = None) -> None:
    """Wait until every rank has called it."""
    require_global(process_set)
    queue = context().queue
    queue.run(queue.request("barrier", None, "all"), lambda axis: axis.barrier())


def join(device: int = -1) -> int:
    """Horovod's call of a rank without further data. Returns 0 on one process; not supported on several.

    Raises:
        ValueError: there are several ranks; the message says what to do instead.
    """
    if context().grid.size == 1:
        return 0
    raise ValueError(
        "join() is not supported on several ranks: the averages of the other ranks would still divide by all ranks, "
        "and their gradients would be too small. Give every rank the same number of batches (torch's "
        "DistributedSampler does so), or on a rank without data "
        "call optimizer.zero_grad(); optimizer.step() as often as the other ranks do: it then contributes zeros"
    )


def require_rank(root: int) -> None:
    """Raise a ValueError if ``root`` is no rank."""
    size = context().grid.size
    if not 0 <= root < size:
        raise ValueError(f"root_rank={root}, but there are {size} ranks: give a rank from 0 to {size - 1}")


def require_tensor(tensor: Any, dims: int = 0) -> None:
    """Raise an error unless the value is a dense tensor of at least ``dims`` dims on the ranks' device."""
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{type(tensor).__name__} is not a tensor: give torch.tensor(value); for other objects use "
            "hvd.broadcast_object or hvd.allgather_object"
        )
    if tensor.layout != torch.strided:
        raise ValueError("sparse tensors cannot be sent: give tensor.to_dense()")
    if tensor.dim() < dims:
        raise ValueError("a tensor of 0 dims has no rows: give tensor.view(1)")
    device = context().grid.device
    if tensor.device.type not in ("cpu", device.type):  # a GPU run has gloo beside NCCL
        raise ValueError(f"a tensor on {tensor.device} cannot be sent: the ranks use {device}, move it there")


def to_message(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory can be sent: contiguous, booleans as bytes, no lazy conjugate or negative bit."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def describe(tensor: Tensor) -> str:
    """Return shape and dtype for a message: ``(2, 3) float32``."""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
