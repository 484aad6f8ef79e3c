"""Ring attention: keys and values travel around the context axis (Liu et al. 2023, arXiv:2310.01889).

At step i, rank r attends to the keys of rank r - i, while the keys of rank r - i - 1 arrive. The outputs of the steps
are merged by their log-sum-exp. In the backward pass keys and values travel once more, and their gradients travel one
step behind them: the sum for the keys of rank s begins on rank s + 1 and arrives on rank s after c - 1 messages.

With S the bytes of the keys of the whole sequence, and values alike, a rank sends 2 S (c-1)/c bytes forward and twice
as many backward. (Gradients of 16-bit tensors are summed and sent in float32.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..grid.comm.axis import Axis
from ..grid.comm.pending import All, Pending
from .block import Merged, Scores, sinks_gradient
from .mask import Mask
from .order import runs
from .pair import Gradients, Queries, pack, unpack

_KEYS, _GRADIENTS = 2, 3  # tags


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis, mask: Mask, scores: Scores, sinks: Tensor | None = None
) -> Tensor:
    """Return the attention of this rank's queries with the keys of all ranks. Collective, its backward pass too.

    Args:
        q: (B, H, T_local, dim), this rank's queries in zigzag order.
        k, v: (B, K, T_local, dim or width), this rank's keys and values.
        axis: the context axis.
        mask: the rule by which a query sees a key.
        scores: factor and cap of the scores.
        sinks: (H,), for each of these heads the score of a key with the value 0 that every query sees; None: no such
            key.

    Returns:
        (B, H, T_local, width). Padding has the output 0 and no gradient.
    """
    out: Tensor = _Ring.apply(q, k, v, axis, mask, scores, sinks)
    return out


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: Axis, mask: Mask, scores: Scores, sinks: Tensor | None
    ) -> Tensor:
        held = [runs(mask.length, q.shape[2], axis.size, rank) for rank in range(axis.size)]
        queries = Queries(q, held[axis.rank], mask, scores)
        total, flat = Merged((*q.shape[:3], v.shape[3]), q, sinks), pack(k, v)
        for step in range(axis.size):
            arriving, pending = _pass_on(axis, flat, _KEYS) if step < axis.size - 1 else (flat, All([]))
            queries.forward(total, *unpack(flat, k, v), held[axis.rank - step])
            pending.wait()
            flat = arriving
        out = total.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, total.lse, sinks)
        ctx.axis, ctx.mask, ctx.scores = axis, mask, scores
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        axis: Axis = ctx.axis
        last = axis.size - 1
        held = [runs(ctx.mask.length, q.shape[2], axis.size, rank) for rank in range(axis.size)]
        queries, grads = Queries(q, held[axis.rank], ctx.mask, ctx.scores), Gradients(q, k, v)
        lse = lse.masked_fill(lse == -torch.inf, 0)
        flat, own = pack(k, v), grads.flat
        travelling: tuple[Tensor, Pending] | None = None
        for step in range(axis.size):
            arriving, pending = _pass_on(axis, flat, _KEYS) if step < last else (flat, All([]))
            if step:
                grads.begin(k, v)
            queries.backward(dout, out, lse, *unpack(flat, k, v), held[axis.rank - step], grads)
            if travelling is not None:
                sums, behind = travelling
                behind.wait()
                grads.flat += sums
            if step:
                travelling = _pass_on(axis, grads.flat, _GRADIENTS)
            pending.wait()
            flat = arriving
        assert travelling is not None
        sums, behind = travelling
        behind.wait()
        dk, dv = unpack(own + sums, k, v)
        dsinks = sinks_gradient(sinks, dout, out, lse)
        return grads.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, dsinks


def _pass_on(axis: Axis, tensor: Tensor, tag: int) -> tuple[Tensor, Pending]:
    """Start sending a tensor to the next rank, and receiving one from the rank before; return that and the handle."""
    arriving, to, source = torch.empty_like(tensor), (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    if axis.rank % 2:  # On NCCL both messages run in order: of two neighbours one has to receive first.
        received = axis.receive(arriving, source, tag)
        return arriving, All([axis.send(tensor, to, tag), received])
    sent = axis.send(tensor, to, tag)
    return arriving, All([sent, axis.receive(arriving, source, tag)])
