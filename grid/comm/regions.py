"""Borders between replicated and sharded tensors: collectives whose backward pass is the transposed collective.

A tensor-parallel layer is local computation between two borders. Each border is a linear map of the tensors of all
ranks of an axis. Its backward pass is the transpose of this map (`<Ax, y> = <x, A^T y>`, summed over the ranks).
The name of a border gives its forward operation, then its backward operation:

    name                    forward             backward            used
    copy_all_reduce         identity            all-reduce          f: into column-parallel layers
    all_reduce_copy         all-reduce          identity            f-bar: out of row-parallel layers
    split_gather            this rank's slice   all-gather          into row-parallel layers, from replicated
    gather_split            all-gather          this rank's slice   what follows is replicated
    gather_reduce_scatter   all-gather          reduce-scatter      g: what follows is sharded
    reduce_scatter_gather   reduce-scatter      all-gather          g-bar: out, into sequence shards

f and f-bar: Shoeybi et al. 2019, arXiv:1909.08053, section 3; g and g-bar: Korthikanti et al. 2022,
arXiv:2205.05198, section 4.2.2. There are two gathers because the backward pass depends on the consumer. If the next
layer is sharded, each rank holds only a partial gradient of the gathered tensor, and the partial gradients must be
summed (reduce-scatter). If it is replicated, every rank holds the whole gradient, and takes its slice.

On the data axis each replica's loss is a term of the sum that is trained, and the backward pass must be the transpose
with respect to this sum, as in ``gather_reduce_scatter`` and ``reduce_scatter_gather``. The other four are for ranks
that compute one loss together. They refuse the data axis, and all others whose ranks train on different samples.

Slices follow ``grid.ranges.split``, so a dim need not be a multiple of the axis's size. If the axis has size 1, each
function returns its input itself. All functions can be differentiated any number of times. Inputs may be
non-contiguous, and are not modified.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from ...base.uncompiled import uncompiled
from ..ranges import split
from .axis import Axis

_TRANSPOSES = (("gather", "reduce_scatter"), ("reduce_scatter", "gather"))
_OF_REPLICAS = ("data", "data_context", "expert", "expert_data", "world")  # axes with ranks of several replicas


def copy_all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Identity forward, all-reduce backward: the paper's f, in front of a column-parallel layer.

    Args:
        x: (...), the same on every rank.
        axis: the ranks that each compute a part from it.

    Returns:
        x, (...). In the backward pass, the partial gradients of all ranks are summed.
    """
    return border("copy", "all_reduce", x, axis)


def all_reduce_copy(x: Tensor, axis: Axis) -> Tensor:
    """All-reduce forward, identity backward: the paper's f-bar, behind a row-parallel layer.

    Args:
        x: (...), on each rank one term of a sum.
        axis: the ranks that hold the terms.

    Returns:
        (...): the sum, the same on every rank.
    """
    return border("all_reduce", "copy", x, axis)


def split_gather(x: Tensor, axis: Axis, dim: int = -1, unit: int = 1) -> Tensor:
    """This rank's slice forward, all-gather backward: from a replicated tensor into a sharded one.

    Args:
        x: (..., N, ...), the same on every rank.
        axis: the ranks over which dim ``dim`` is sharded.
        dim: the dim to slice.
        unit: number of consecutive elements that stay in one slice; it must divide N.

    Returns:
        (..., n, ...): elements ``split(N, axis.size, axis.rank, unit)`` of that dim.
    """
    return border("split", "gather", x, axis, dim, unit=unit)


def gather_split(x: Tensor, axis: Axis, dim: int = -1, length: int | None = None, unit: int = 1) -> Tensor:
    """All-gather forward, this rank's slice backward: from a sharded tensor into a replicated one.

    Every rank must compute the same from the result. Use ``gather_reduce_scatter`` if the next layer is sharded,
    because each rank's gradient is then partial.

    Args:
        x: (..., n, ...), this rank's slice.
        axis: the ranks that hold the slices, in their order.
        dim: the dim that is sharded.
        length: N, the whole length; needed if N / unit is not a multiple of the axis's size.
        unit: number of consecutive elements that stay in one slice; it must divide N.

    Returns:
        (..., N, ...): all slices, the same on every rank.

    Raises:
        ValueError: the size of x is not that of this rank's slice of a dim of length N.
    """
    return border("gather", "split", x, axis, dim, length, unit)


def gather_reduce_scatter(x: Tensor, axis: Axis, dim: int = -1, length: int | None = None) -> Tensor:
    """All-gather forward, reduce-scatter backward: g, from sequence shards into a tensor-parallel layer.

    Args, returns, raises: as ``gather_split``; here each rank's gradient for the gathered tensor is partial.
    """
    return border("gather", "reduce_scatter", x, axis, dim, length)


def reduce_scatter_gather(x: Tensor, axis: Axis, dim: int = -1) -> Tensor:
    """Reduce-scatter forward, all-gather backward: g-bar, from a tensor-parallel layer into sequence shards.

    Args:
        x: (..., N, ...), on each rank one term of a sum.
        axis: the ranks that hold the terms, and over which dim ``dim`` of the sum is sharded.
        dim: the dim to slice.

    Returns:
        (..., n, ...): elements ``split(N, axis.size, axis.rank)`` of the sum.
    """
    return border("reduce_scatter", "gather", x, axis, dim)


def border(
    forward: str,
    backward: str,
    x: Tensor,
    axis: Axis,
    dim: int | None = None,
    length: int | None = None,
    unit: int = 1,
    ours: bool = False,
) -> Tensor:
    """Apply the operation ``forward`` to x, so that the backward pass applies ``backward`` to the gradient.

    Args:
        forward, backward: names of operations, as for ``begin``.
        x: the input.
        axis: the ranks that take part.
        dim, length, unit: the sharded dim, its whole length and its unit, as for ``gather_split``.
        ours: True if x may be overwritten.

    Raises:
        ValueError: the axis has ranks of several replicas, and the backward operation is not the transpose of the
            forward one.
    """
    if axis.name in _OF_REPLICAS and (forward, backward) not in _TRANSPOSES:
        name = "data" if axis.name == "world" else axis.name
        raise ValueError(
            f"{forward}_{backward} was given the {axis.name} axis, on which its gradient is wrong: each replica's loss "
            "is a term of the sum that is trained, so gradients of the other replicas are missing or count twice. For "
            f"the rows of all replicas in one loss, give gather_reduce_scatter(x, grid.{name}, dim=0); for the sum "
            f"over the replicas, gather_reduce_scatter(x[None], grid.{name}, dim=0).sum(0); for the shards of one "
            "layer, an axis of ranks that compute one loss, such as grid.tensor"
        )
    if axis.size == 1:
        return x
    if has_torch_function_unary(x):  # a mode that types values (plugins/sharding_types) sees the border itself
        seen: Tensor = handle_torch_function(border, (x,), forward, backward, x, axis, dim, length, unit, ours)
        return seen
    return _apply(forward, backward, x, axis, dim, length, unit, ours)


@uncompiled
def _apply(
    forward: str,
    backward: str,
    x: Tensor,
    axis: Axis,
    dim: int | None,
    length: int | None,
    unit: int,
    ours: bool,
) -> Tensor:
    out: Tensor = _Border.apply(x, forward, backward, axis, *_place(forward, x, axis, dim, length, unit), ours)
    return out


def begin(name: str, x: Tensor, axis: Axis, dim: int | None = None, ours: bool = False) -> Callable[[], Tensor]:
    """Start one operation of a border in the background, to overlap it with computation. Not differentiable.

    Args:
        name: ``copy``, ``all_reduce``, ``split``, ``gather`` or ``reduce_scatter``.
        x: the input, which must not be modified until the operation has ended.
        axis: the ranks that take part. All ranks must start and end their collectives in the same order.
        dim: the dim that is sharded. Operations on the whole tensor ignore it.
        ours: True if x may be overwritten because the caller does not need it any more.

    Returns:
        A function that waits for the end of the operation and returns the output. It must be called.
    """
    if axis.size == 1:
        return lambda: x
    return _MAPS[name](x, axis, *_place(name, x, axis, dim, None, 1), True, ours)


def _place(name: str, x: Tensor, axis: Axis, dim: int | None, length: int | None, unit: int) -> tuple[int, int, int]:
    """Return (dim, whole length, unit) of the dim that the operation ``name`` shards or gathers."""
    if name in ("copy", "all_reduce"):  # these act on the whole tensor
        return 0, 0, 1
    if dim is None or not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim {dim} is not a dim of a tensor of shape {tuple(x.shape)}")
    dim %= x.dim()
    if length is None:
        length = x.shape[dim] * (axis.size if name == "gather" else 1)
    if name == "gather":
        start, stop = split(length, axis.size, axis.rank, unit)
        if stop - start != x.shape[dim]:
            raise ValueError(
                f"dim {dim} of the shape {tuple(x.shape)} has {x.shape[dim]} elements, but rank {axis.rank} of "
                f"{axis.size} on {axis.name} holds {stop - start} of {length}. Pass length=, the whole dim's."
            )
    return dim, length, unit


class _Border(torch.autograd.Function):
    """Autograd function that applies the linear map of a given name.

    Its backward pass applies this class with forward and backward name swapped. The transpose of the transpose is the
    map itself, so it can be differentiated any number of times.
    """

    @staticmethod
    def forward(
        x: Tensor, forward: str, backward: str, axis: Axis, dim: int, length: int, unit: int, ours: bool
    ) -> Tensor:
        return _MAPS[forward](x, axis, dim, length, unit, False, ours)()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.set_materialize_grads(False)
        x, *ctx.names_and_place, _ = inputs
        if output is x:
            ctx.mark_dirty(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if grads[0] is None:
            return (None,) * 8
        forward, backward, *arguments = ctx.names_and_place
        return _Border.apply(grads[0], backward, forward, *arguments, False), *[None] * 7


Finish = Callable[[], Tensor]


def _copy(x: Tensor, axis: Axis, dim: int, length: int, unit: int, background: bool, ours: bool) -> Finish:
    return lambda: x.view_as(x)


def _all_reduce(x: Tensor, axis: Axis, dim: int, length: int, unit: int, background: bool, ours: bool) -> Finish:
    total = x if ours and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
    pending = axis.all_reduce(total, async_op=background)

    def finish() -> Tensor:
        pending.wait()
        return total

    return finish


def _split(x: Tensor, axis: Axis, dim: int, length: int, unit: int, background: bool, ours: bool) -> Finish:
    start, stop = split(length, axis.size, axis.rank, unit)
    # A copy: a view would keep the whole tensor alive.
    return lambda: x.narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)


def _gather(x: Tensor, axis: Axis, dim: int, length: int, unit: int, background: bool, ours: bool) -> Finish:
    lengths = _lengths(length, axis.size, unit)
    own_slice = _pad(x, dim, max(lengths)).contiguous()  # (..., n, ...), the same n on every rank
    slices = own_slice.new_empty((axis.size, *own_slice.shape))
    pending = axis.all_gather(slices.flatten(0, 1), own_slice, async_op=background)

    def finish() -> Tensor:
        pending.wait()
        if min(lengths) == max(lengths):
            return slices.movedim(0, dim).flatten(dim, dim + 1)  # no copy where dim is 0
        return torch.cat([piece.narrow(dim, 0, n) for piece, n in zip(slices, lengths, strict=True)], dim)

    return finish


def _reduce_scatter(x: Tensor, axis: Axis, dim: int, length: int, unit: int, background: bool, ours: bool) -> Finish:
    lengths = _lengths(length, axis.size, unit)
    slices = torch.stack([_pad(piece, dim, max(lengths)) for piece in x.split(lengths, dim)])
    own_slice = slices.new_empty(slices.shape[1:])
    pending = axis.reduce_scatter(own_slice.view(-1), slices.view(-1), async_op=background)

    def finish() -> Tensor:
        pending.wait()
        return own_slice if lengths[axis.rank] == own_slice.shape[dim] else own_slice.narrow(dim, 0, lengths[axis.rank])

    return finish


_MAPS: dict[str, Callable[[Tensor, Axis, int, int, int, bool, bool], Finish]] = {
    "copy": _copy,
    "all_reduce": _all_reduce,
    "split": _split,
    "gather": _gather,
    "reduce_scatter": _reduce_scatter,
}


def _lengths(length: int, size: int, unit: int) -> list[int]:
    return [stop - start for start, stop in (split(length, size, rank, unit) for rank in range(size))]


def _pad(x: Tensor, dim: int, length: int) -> Tensor:
    """Pad x with zeros at the end of ``dim`` up to ``length``, because collectives need equal shapes on all ranks."""
    missing = length - x.shape[dim]
    return F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, missing]) if missing else x
