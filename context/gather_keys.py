"""Attention with gathered keys: each rank gathers the keys and values of the whole sequence (Llama 3,
arXiv:2407.21783, section 3.3.2).

The backward pass gathers them again, and sums their gradients by a reduce-scatter. The bytes are those of ring
attention; the communication does not overlap the computation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..grid.comm.axis import Axis
from .block import Merged, Scores, sinks_gradient
from .mask import Mask
from .order import all_gather, reduce_scatter, reshard, runs, unshard
from .pair import Gradients, Queries, pack, unpack


def gather_attention(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis, mask: Mask, scores: Scores, sinks: Tensor | None = None
) -> Tensor:
    """Return the attention of this rank's queries with the keys of all ranks. Collective, its backward pass too.

    Args, returns: as for ``ring.ring_attention``. With an axis of size 1 nothing is communicated.
    """
    out: Tensor = _Gathered.apply(q, k, v, axis, mask, scores, sinks)
    return out


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: Axis, mask: Mask, scores: Scores, sinks: Tensor | None
    ) -> Tensor:
        queries = Queries(q, runs(mask.length, q.shape[2], axis.size, axis.rank), mask, scores)
        total = Merged((*q.shape[:3], v.shape[3]), q, sinks)
        queries.forward(total, *_whole(k, v, axis, mask.length), ((0, mask.length),))
        out = total.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, total.lse, sinks)
        ctx.axis, ctx.mask, ctx.scores = axis, mask, scores
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        axis, length = ctx.axis, ctx.mask.length
        keys, values = _whole(k, v, axis, length)
        queries = Queries(q, runs(length, q.shape[2], axis.size, axis.rank), ctx.mask, ctx.scores)
        grads = Gradients(q, keys, values)
        lse = lse.masked_fill(lse == -torch.inf, 0)
        queries.backward(dout, out, lse, keys, values, ((0, length),), grads)
        dk, dv = grads.dk, grads.dv
        if axis.size > 1:
            parts = [reshard(x, axis.size, k.shape[2], dim=2).flatten(1) for x in (dk, dv)]
            dk, dv = unpack(reduce_scatter(torch.cat(parts, 1), axis), k, v)
        dsinks = sinks_gradient(sinks, dout, out, lse)
        return grads.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, dsinks


def _whole(k: Tensor, v: Tensor, axis: Axis, length: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values of the whole sequence in the order of positions, without padding."""
    if axis.size == 1:
        return k, v
    pairs = [unpack(message, k, v) for message in all_gather(pack(k, v), axis)]
    keys, values = (unshard(parts, length, dim=2) for parts in zip(*pairs, strict=True))
    return keys, values
