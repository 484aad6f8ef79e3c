"""Ulysses: all-to-alls between shards of the sequence and shards of the heads (Jacobs et al. 2023, arXiv:2309.14509).

Each rank attends over the whole sequence with 1/c of the heads. With fewer key/value heads than ranks these are
repeated; if c does not divide the query heads, heads of zeros are added, so c should divide them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..grid.comm.axis import Axis
from .order import reshard, unshard

Attend = Callable[[Tensor, Tensor, Tensor, slice], Tensor]


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, axis: Axis, length: int, attend: Attend) -> Tensor:
    """Return the attention of this rank's queries with the keys of all ranks. Collective, its backward pass too.

    Args:
        q: (B, H, T_local, dim), this rank's queries in zigzag order.
        k, v: (B, K, T_local, dim or width), this rank's keys and values.
        axis: the context axis.
        length: T, the number of tokens of the whole sequence.
        attend: attention over the whole sequence: called with q, k and v of some heads, (B, heads, T, dim), and with
            the range of these query heads, which may go beyond H.

    Returns:
        (B, H, T_local, width). Padding has the output 0.
    """
    heads, local = q.shape[1], q.shape[2]
    q, k, v = share_heads(q, k, v, axis.size)
    heads_per_rank = q.shape[1] // axis.size
    q, k, v = _ToHeads.apply(axis, length, q, k, v)
    out = attend(q, k, v, slice(axis.rank * heads_per_rank, (axis.rank + 1) * heads_per_rank))
    gathered: Tensor = _ToSequence.apply(axis, local, out)[0]
    return gathered[:, :heads]


def share_heads(q: Tensor, k: Tensor, v: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Repeat key/value heads, and add heads of zeros, until the number of ranks divides both numbers of heads."""
    heads, key_heads = q.shape[1], k.shape[1]
    if heads % size == 0:
        times = size // math.gcd(key_heads, size)
        return (q, k, v) if times == 1 else (q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1))
    k, v = (x.repeat_interleave(heads // key_heads, 1) for x in (k, v))
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, -heads % size)) for x in (q, k, v))
    return q, k, v


class _ToHeads(torch.autograd.Function):
    """(B, heads, T_local, dim) to (B, heads / c, T, dim), for several tensors in one all-to-all."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, length: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.local = axis, tensors[0].shape[2]
        return _to_heads(tensors, axis, length)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (None, None, *_to_sequence(grads, ctx.axis, ctx.local))


class _ToSequence(torch.autograd.Function):
    """(B, heads / c, T, dim) to (B, heads, T_local, dim): the transpose of ``_ToHeads``."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, local: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.length = axis, tensors[0].shape[2]
        return _to_sequence(tensors, axis, local)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (None, None, *_to_heads(grads, ctx.axis, ctx.length))


def _to_heads(tensors: Sequence[Tensor], axis: Axis, length: int) -> tuple[Tensor, ...]:
    # To each rank its heads of this rank's tokens.
    parts = [rearrange(x, "b (ranks heads) t dim -> ranks b heads t dim", ranks=axis.size) for x in tensors]
    outgoing, places = _message(tensors[0], [x.shape for x in parts])
    for view, x in zip(places, parts, strict=True):
        view.copy_(x)
    return tuple(unshard(list(x), length, dim=2) for x in _exchange(outgoing, places, axis))


def _to_sequence(tensors: Sequence[Tensor], axis: Axis, local: int) -> tuple[Tensor, ...]:
    # To each rank its tokens of this rank's heads, (c, B, heads / c, T_local, dim).
    shapes = [(axis.size, *x.shape[:2], local, x.shape[3]) for x in tensors]
    outgoing, places = _message(tensors[0], shapes)
    for view, x in zip(places, tensors, strict=True):
        reshard(x, axis.size, local, dim=2, out=view)
    arrived = _exchange(outgoing, places, axis)
    return tuple(rearrange(x, "ranks b heads t dim -> b (ranks heads) t dim") for x in arrived)


def _message(like: Tensor, shapes: Sequence[Sequence[int]]) -> tuple[Tensor, list[Tensor]]:
    """Return a tensor (c, n) for several tensors in one message to each rank, and their places in it, (c, ...) each."""
    sizes = [math.prod(shape[1:]) for shape in shapes]
    flat = like.new_empty(shapes[0][0], sum(sizes))
    return flat, [flat_view.view(shape) for flat_view, shape in zip(flat.split(sizes, 1), shapes, strict=True)]


def _exchange(outgoing: Tensor, places: Sequence[Tensor], axis: Axis) -> list[Tensor]:
    """All-to-all of a message; return the tensors that arrive."""
    incoming, arrived = _message(outgoing, [view.shape for view in places])
    axis.all_to_all(incoming, outgoing)
    return arrived
