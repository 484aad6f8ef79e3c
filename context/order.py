"""Zigzag order: which tokens of a sequence each rank of the context axis holds.

A sequence of T tokens is padded and cut into 2c chunks, c the size of the context axis. Rank r holds chunks r and
2c-1-r, as in Llama 3 (arXiv:2407.21783, section 3.3.2). Under a causal mask each rank then has the same work:

    c = 2, T = 8     chunk      0    1    2    3
                     tokens     0 1  2 3  4 5  6 7
                     rank       0    1    1    0

Every part of a model that depends on the position of a token takes its order from here: position embeddings, labels,
document numbers, dropout, attention. With c = 1 nothing is padded, cut or copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function_unary

from ..base.uncompiled import uncompiled
from ..grid.comm.axis import Axis

Runs = tuple[tuple[int, int], ...]  # ranges of consecutive positions, (start, stop) each, in increasing order


def local_length(length: int, size: int, multiple: int = 1) -> int:
    """Return the number of tokens that each rank holds, padding included.

    Args:
        length: T, the number of tokens of the whole sequence.
        size: c, the number of ranks of the context axis.
        multiple: a number that must divide the result: the size of the tensor axis under sequence parallelism. It has
            no effect if ``size`` is 1.
    """
    if size == 1:
        return length
    step = math.lcm(2, multiple)
    return math.ceil(length / (size * step)) * step


def positions(length: int, size: int, rank: int, multiple: int = 1) -> Tensor:
    """Return the positions in the whole sequence of a rank's tokens, int64 (T_local,), in increasing order.

    Positions from ``length`` on are padding.

    >>> [triax.context.positions(8, size=2, rank=rank).tolist() for rank in range(2)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]

    Args:
        length, size, multiple: as for ``local_length``.
        rank: rank on the context axis.
    """
    if size == 1:
        return torch.arange(length)
    chunk = local_length(length, size, multiple) // 2
    return torch.cat([torch.arange(first * chunk, (first + 1) * chunk) for first in _chunks(size, rank)])


def runs(length: int, local: int, size: int, rank: int) -> Runs:
    """Return the ranges of consecutive positions of a rank's tokens, without padding.

    The tokens of these ranges are the first tokens that the rank holds, because padding is at the end of the sequence.

    Args:
        length: T, the number of tokens of the whole sequence.
        local: the number of tokens that each rank holds, padding included.
        size, rank: size of the context axis, and rank on it.
    """
    if size == 1:
        return ((0, length),)
    chunk = local // 2
    cut = [(min(first * chunk, length), min((first + 1) * chunk, length)) for first in _chunks(size, rank)]
    return tuple((start, stop) for start, stop in cut if start < stop)


def shard(x: Tensor, axis: Axis, dim: int = 1, fill: float = 0, multiple: int = 1) -> Tensor:
    """Return this rank's tokens of a whole sequence. Differentiable: each rank's gradient has its own tokens only.

    >>> ids = torch.arange(8).reshape(1, 8)
    >>> triax.context.shard(ids, triax.Grid().context)  # with context=2, rank 0 has the tokens 0, 1, 6 and 7
    tensor([[0, 1, 2, 3, 4, 5, 6, 7]])

    Args:
        x: (..., T, ...), the whole sequence, the same on every rank.
        axis: the context axis. At size 1 the result is x itself.
        dim: the dim of the tokens.
        fill: value of padding.
        multiple: as for ``local_length``.

    Returns:
        (..., T_local, ...).
    """
    if axis.size == 1:
        return x
    dim %= x.dim()
    length = x.shape[dim]
    local = local_length(length, axis.size, multiple)
    held = runs(length, local, axis.size, axis.rank)
    # A rank with nothing but padding stays in the graph, with a gradient of 0, so that it takes part in collectives.
    parts = [x.narrow(dim, start, stop - start) for start, stop in held or ((0, 0),)]
    missing = local - sum(piece.shape[dim] for piece in parts)
    if missing:
        shape = [missing if d == dim else n for d, n in enumerate(x.shape)]
        parts.append(x.new_full(shape, fill))
    return torch.cat(parts, dim)


def unshard(parts: Sequence[Tensor], length: int, dim: int = 1) -> Tensor:
    """Return the whole sequence, from the parts of all ranks of the context axis. The inverse of ``shard``.

    Args:
        parts: (..., T_local, ...) each, in rank order.
        length: T, the number of tokens without padding.
        dim: the dim of the tokens.
    """
    if len(parts) == 1:
        return parts[0]
    halves = [shard_of_rank.chunk(2, dim) for shard_of_rank in parts]
    sequence = torch.cat([*(first for first, _ in halves), *(second for _, second in reversed(halves))], dim)
    return sequence.narrow(dim, 0, length)


def reshard(x: Tensor, size: int, local: int, dim: int = 1, out: Tensor | None = None) -> Tensor:
    """Return the parts of all ranks, (c, ..., T_local, ...), from the whole sequence, padded with zeros.

    Args:
        x: (..., T, ...), the whole sequence.
        size: c, the size of the context axis.
        local: the number of tokens that each rank holds, padding included.
        dim: the dim of the tokens.
        out: the result, if given.
    """
    dim %= x.dim()
    length = x.shape[dim]
    if out is None:
        out = x.new_empty(size, *x.shape[:dim], local, *x.shape[dim + 1 :])
    for rank, shard_of_rank in enumerate(out):
        at = 0
        for start, stop in runs(length, local, size, rank):
            shard_of_rank.narrow(dim, at, stop - start).copy_(x.narrow(dim, start, stop - start))
            at += stop - start
        shard_of_rank.narrow(dim, at, local - at).zero_()
    return out


@uncompiled
def gather(x: Tensor, axis: Axis, length: int, dim: int = 1, partial: bool = False) -> Tensor:
    """Return the whole sequence on every rank, from each rank's tokens. Collective; differentiable once.

    Args:
        x: (..., T_local, ...), this rank's tokens.
        axis: the context axis. At size 1 the result is x itself.
        length: T, the number of tokens without padding.
        dim: the dim of the tokens.
        partial: how the backward pass treats the gradients of the whole sequence on the ranks. False: they are equal,
            because every rank computes the same from the result; each rank takes its tokens. True: each is a part of
            the gradient, because each rank computes something else; they are summed (reduce-scatter).

    Returns:
        (..., T, ...), the same on every rank.
    """
    if axis.size == 1:
        return x
    if has_torch_function_unary(x):  # as in ``border``
        seen: Tensor = handle_torch_function(gather, (x,), x, axis, length, dim, partial)
        return seen
    gathered: Tensor = _Gather.apply(x, axis, length, dim % x.dim(), partial)
    return gathered


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """Return the tensors of all ranks of an axis, stacked: (c, ...). Collective; not differentiable."""
    parts = x.new_empty((axis.size, *x.shape))
    axis.all_gather(parts.flatten(0, 1) if x.dim() else parts, x.contiguous())
    return parts


def reduce_scatter(parts: Tensor, axis: Axis) -> Tensor:
    """Return the sum over the ranks of the part of this rank: (...) from (c, ...). Collective; not differentiable."""
    own_sum = parts.new_empty(parts.shape[1:])
    axis.reduce_scatter(own_sum.view(-1), parts.contiguous().view(-1))
    return own_sum


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, length: int, dim: int, partial: bool) -> Tensor:
        ctx.axis, ctx.dim, ctx.partial, ctx.local = axis, dim, partial, x.shape[dim]
        return unshard(list(all_gather(x, axis)), length, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        parts = reshard(grad, ctx.axis.size, ctx.local, ctx.dim)
        gradient = reduce_scatter(parts, ctx.axis) if ctx.partial else parts[ctx.axis.rank]
        return gradient, None, None, None, None


def _chunks(size: int, rank: int) -> tuple[int, int]:
    return rank, 2 * size - 1 - rank
