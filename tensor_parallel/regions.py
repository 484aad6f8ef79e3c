"""The borders between replicated and sharded tensors: pairs of collectives, each the transpose of the other.

A tensor-parallel layer is plain math between two borders. Each border is a linear map between what the ranks
of an axis hold, and its backward is that map's transpose (`<Ax, y> = <x, A^T y>`, summed over the ranks).
Each is named by what it does (forward, backward):

    name                    forward             backward            used
    copy_all_reduce         identity            all-reduce          f: into column-parallel layers
    all_reduce_copy         all-reduce          identity            f-bar: out of row-parallel layers
    split_gather            this rank's slice   all-gather          into row-parallel layers, from replicated
    gather_split            all-gather          this rank's slice   what follows is replicated
    gather_reduce_scatter   all-gather          reduce-scatter      g: what follows is sharded
    reduce_scatter_gather   reduce-scatter      all-gather          g-bar: out, into sequence shards

f and f-bar: Shoeybi et al. 2019, arXiv:1909.08053, section 3; g and g-bar: Korthikanti et al. 2022,
arXiv:2205.05198, section 4.2.2. "Gather" alone is ambiguous: where each rank goes on to use the gathered
tensor in its own way (a sharded layer), each holds a part of the gradient, and slicing it loses the others'
parts.

Slices follow ``grid.layout.split``, so a dim need not be a multiple of the axis's size. At axis size 1 each
function returns its input itself. All of them differentiate any number of times. Inputs may be
non-contiguous; none is written to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..grid.axis import Axis
from ..grid.layout import split

__all__ = [
    "all_reduce_copy",
    "copy_all_reduce",
    "gather_reduce_scatter",
    "gather_split",
    "reduce_scatter_gather",
    "split_gather",
]


def copy_all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Identity forward, all-reduce backward: the paper's f, in front of a column-parallel layer.

    Args:
        x: (...), the same on every rank.
        axis: the ranks that each compute a part from it.

    Returns:
        (...): x. Each rank's gradient for it is partial; they are summed.
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
        axis: the ranks that share dim ``dim``.
        dim: the dim to slice.
        unit: what is never cut; it divides N.

    Returns:
        (..., n, ...): elements ``split(N, axis.size, axis.rank, unit)`` of that dim.
    """
    return border("split", "gather", x, axis, dim, unit=unit)


def gather_split(x: Tensor, axis: Axis, dim: int = -1, length: int | None = None, unit: int = 1) -> Tensor:
    """All-gather forward, this rank's slice backward: into a replicated tensor that every rank uses alike.

    Not for a sharded consumer: there each rank's gradient is partial, see ``gather_reduce_scatter``.

    Args:
        x: (..., n, ...), this rank's slice.
        axis: the ranks that hold the slices, in their order.
        dim: the dim that is shared.
        length: N, the whole length; needed where N / unit is not a multiple of the axis's size.
        unit: what the slices were never cut in; it divides N.

    Returns:
        (..., N, ...): all slices, the same on every rank.

    Raises:
        ValueError: x is not this rank's slice of a dim of that length.
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
        axis: the ranks that hold the terms, and share dim ``dim`` of the sum.
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
    """The function that does ``forward``, and ``backward`` backward; names and ``ours`` as in ``begin``."""
    if axis.size == 1:
        return x
    out: Tensor = _Border.apply(x, forward, backward, axis, *_place(forward, x, axis, dim, length, unit), ours)
    return out


def begin(name: str, x: Tensor, axis: Axis, dim: int | None = None, ours: bool = False) -> Callable[[], Tensor]:
    """Start one direction of a border, for math that goes on meanwhile; not differentiable.

    Args:
        name: ``copy``, ``all_reduce``, ``split``, ``gather`` or ``reduce_scatter``.
        x: the input, unchanged until the end.
        axis: the ranks that take part; each starts and ends its collectives in the same order.
        dim: as in the borders; those that act on the whole tensor ignore it.
        ours: x may be overwritten: nobody else needs it.

    Returns:
        A function that waits for the end and returns the output. It must be called.
    """
    if axis.size == 1:
        return lambda: x
    return _MAPS[name](x, axis, *_place(name, x, axis, dim, None, 1), True, ours)


def _place(name: str, x: Tensor, axis: Axis, dim: int | None, length: int | None, unit: int) -> tuple[int, int, int]:
    """(dim, whole length, unit) of the dim that ``name`` shares out."""
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
                f"rank {axis.rank} of {axis.size} on {axis.name} holds {stop - start} of {length} elements, "
                f"and dim {dim} of {tuple(x.shape)} has {x.shape[dim]}: pass length=, that dim's whole length"
            )
    return dim, length, unit


class _Border(torch.autograd.Function):
    """A linear map by name. Its backward is this class again with the names swapped: the transpose of the
    transpose is the map itself, to any depth of differentiation."""

    @staticmethod
    def forward(
        x: Tensor, forward: str, backward: str, axis: Axis, dim: int, length: int, unit: int, ours: bool
    ) -> Tensor:
        return _MAPS[forward](x, axis, dim, length, unit, False, ours)()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, *ctx.names_and_place, _ = inputs
        if output is x:
            ctx.mark_dirty(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        forward, backward, *place = ctx.names_and_place
        return _Border.apply(grads[0], backward, forward, *place, False), *[None] * 7


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
    mine = _pad(x, dim, max(lengths)).contiguous()  # (..., n, ...), the same n on every rank
    slices = mine.new_empty((axis.size, *mine.shape))
    pending = axis.all_gather(slices.flatten(0, 1), mine, async_op=background)

    def finish() -> Tensor:
        pending.wait()
        if min(lengths) == max(lengths):
            return slices.movedim(0, dim).flatten(dim, dim + 1)  # no copy where dim is 0
        return torch.cat([part.narrow(dim, 0, n) for part, n in zip(slices, lengths, strict=True)], dim)

    return finish


def _reduce_scatter(x: Tensor, axis: Axis, dim: int, length: int, unit: int, background: bool, ours: bool) -> Finish:
    lengths = _lengths(length, axis.size, unit)
    slices = torch.stack([_pad(part, dim, max(lengths)) for part in x.split(lengths, dim)])
    mine = slices.new_empty(slices.shape[1:])
    pending = axis.reduce_scatter(mine.view(-1), slices.view(-1), async_op=background)

    def finish() -> Tensor:
        pending.wait()
        return mine if lengths[axis.rank] == mine.shape[dim] else mine.narrow(dim, 0, lengths[axis.rank])

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
    """x with zeros behind it on ``dim``, up to ``length``: a collective takes one shape from every rank."""
    missing = length - x.shape[dim]
    return F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, missing]) if missing else x
