"""Attention of one block of queries with one block of keys: forward with log-sum-exp, and backward.

Outputs of several blocks of keys are merged by their log-sum-exp (``Merged``). The backward pass of a block takes the
merged output and log-sum-exp, and so gives the block's part of the gradients.

    forward      out, lse = softmax(q k^T scale) v, logsumexp(q k^T scale)
    merge        lse = logaddexp(lse_a, lse_b);  out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b
    backward     p = exp(q k^T scale - lse);  dv = p^T dout
                 ds = p (dout v^T - rowsum(dout out));  dq = ds k scale;  dk = ds^T q scale

On a CPU and, without a mask and in 16 bits, on a GPU (in a dry run the meta device) the flash kernels of torch compute
it, elsewhere the equations above, a few rows of scores at a time. With a cap c, s = q k^T scale becomes c tanh(s / c),
and ds has the factor 1 - tanh(s / c)^2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base.torch_private import flash_cpu, flash_cpu_backward, flash_gpu, flash_gpu_backward

_CHUNK = 2**24  # scores held at a time by the plain computation


class Scores(NamedTuple):
    """Factor of the scores, and their cap c, with which they become c tanh(scores / c); None: no cap."""

    scale: float
    softcap: float | None = None


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums over blocks are held: float32 for 16-bit tensors, else the same."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of one block.

    Args:
        q: (B, H, m, dim).
        k: (B, K, n, dim); K divides H.
        v: (B, K, n, width).
        scale: factor of the scores.
        causal: query i sees keys up to i. Only with m = n and without a mask.
        mask: added to the scores, (B or 1, H or 1, m, n), of q's dtype: 0 or -inf.
        softcap: cap of the scores, before the mask; None: no cap.

    Returns:
        (B, H, m, width) of q's dtype, and (B, H, m) of ``accumulation_dtype``. A query that sees no key has the output
        0 and the log-sum-exp -inf.
    """
    if softcap is None and _flash(q, mask):
        width = v.shape[-1]
        q, k, v = _same_width(q, k, v)
        if not q.is_cuda:
            out, lse = flash_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        else:
            out, lse = flash_gpu(q, k, v, 0.0, causal, False, scale=scale)[:2]
        out = out[..., :width]
        if mask is not None:  # the kernel gives such queries the log-sum-exp 0
            lse = lse.masked_fill((mask == -torch.inf).all(-1), -torch.inf)
        return out, lse
    outs, sums = [], []
    for _, scores in _scores(q, k, scale, causal, mask, softcap):
        lse = scores.logsumexp(-1)
        p = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0)[..., None])
        outs.append(_grouped(p.to(q.dtype), k.shape[1]) @ v[:, :, None])
        sums.append(lse)
    return torch.cat([out.flatten(1, 2) for out in outs], 2), torch.cat(sums, 2)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return one block's parts of dq, dk and dv.

    Args:
        dout: gradient of the merged output, (B, H, m, width).
        out: the merged output, (B, H, m, width).
        lse: the merged log-sum-exp, (B, H, m); any finite number where a query sees no key.
        q, k, v, scale, causal, mask, softcap: as for ``forward``.

    Returns:
        Gradients of the shapes of q, k and v.
    """
    if softcap is None and _flash(q, mask):
        dim, width = q.shape[-1], v.shape[-1]
        q, k, v, dout, out = _same_width(q, k, v, dout, out)
        dout, out, lse = dout.to(q.dtype), out.to(q.dtype), lse.contiguous()
        if not q.is_cuda:
            dq, dk, dv = flash_cpu_backward(dout, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale)
        else:
            # The kernel reads the state of the random generator for dropout only.
            state = torch.zeros(2, dtype=torch.uint64, device=q.device)
            sizes = (None, None, q.shape[2], k.shape[2])
            dq, dk, dv = flash_gpu_backward(
                dout, q, k, v, out, lse, *sizes, 0.0, causal, state, state.new_empty(()), scale=scale
            )
        return dq[..., :dim], dk[..., :dim], dv[..., :width]
    heads, dqs = k.shape[1], []
    wide = accumulation_dtype(q.dtype)
    dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for rows, scores in _scores(q, k, scale, causal, mask, softcap):
        p = _grouped(torch.exp(scores - lse[:, :, rows, None]), heads)  # (B, K, H/K, rows, n)
        own_q, grad = (_grouped(x[:, :, rows], heads) for x in (q, dout))
        delta = (grad.to(wide) * _grouped(out[:, :, rows], heads)).sum(-1, keepdim=True)
        ds = p * ((grad.to(v.dtype) @ v[:, :, None].mT).to(wide) - delta) * scale
        if softcap is not None:
            ds = ds * _grouped(1 - (scores.masked_fill(scores == -torch.inf, 0) / softcap) ** 2, heads)
        dv += (p.to(v.dtype).mT @ grad.to(v.dtype)).sum(2)
        dqs.append((ds.to(k.dtype) @ k[:, :, None]).flatten(1, 2))
        dk += (ds.to(q.dtype).mT @ own_q).sum(2)
    return torch.cat(dqs, 2), dk, dv


class Merged:
    """Sum of the outputs of several blocks of keys, weighted by their log-sum-exp.

    Args:
        shape: shape of the outputs.
        like: tensor whose dtype and device the outputs have.
        sinks: (H,), for each head the score of one more key, which every query sees, and whose value is 0; or None.

    Attributes:
        out: (B, H, m, width), in ``accumulation_dtype``.
        lse: (B, H, m).
        empty: True until the first block is added.
    """

    def __init__(self, shape: tuple[int, ...], like: Tensor, sinks: Tensor | None = None) -> None:
        dtype = accumulation_dtype(like.dtype)
        self.out = like.new_zeros(shape, dtype=dtype)
        self.lse = like.new_full(shape[:-1], -torch.inf, dtype=dtype)
        self.empty = sinks is None
        if sinks is not None:
            self.lse.copy_(sinks[:, None])

    def add(self, queries: slice, out: Tensor, lse: Tensor) -> None:
        """Merge the output of one block for some of the queries."""
        if self.empty and out.shape == self.out.shape:
            self.out, self.lse, self.empty = out.to(self.out.dtype), lse, False
            return
        self.empty = False
        total, before = self.out[:, :, queries], self.lse[:, :, queries]
        both = torch.logaddexp(before, lse)
        # No key so far: -inf - -inf is not a number, and the weight is 0.
        old, new = (torch.exp(x - both).nan_to_num_(0.0)[..., None] for x in (before, lse))
        total.mul_(old).add_(out * new)
        before.copy_(both)


def sinks_gradient(sinks: Tensor | None, dout: Tensor, out: Tensor, lse: Tensor) -> Tensor | None:
    """Return the gradient of the sinks of ``Merged``, (H,), from the merged output and log-sum-exp; None for None."""
    if sinks is None:
        return None
    delta = (dout.to(lse.dtype) * out).sum(-1)  # (B, H, m); the sinks' values are 0, so that they have no dout v^T
    return -(torch.exp(sinks[:, None] - lse) * delta).sum((0, 2)).to(sinks.dtype)


def _flash(q: Tensor, mask: Tensor | None) -> bool:
    """Return True if a flash kernel computes this."""
    if q.device.type == "cpu":
        return q.dtype != torch.float16 or mask is None
    return q.device.type in ("cuda", "meta") and mask is None and q.dtype.itemsize == 2 and q.shape[-1] <= 256


def _same_width(*tensors: Tensor) -> list[Tensor]:
    """Pad tensors with zeros at the end of the last dim to one width, because the kernels take one only."""
    width = max(x.shape[-1] for x in tensors)
    width += -width % 8 if tensors[0].is_cuda else 0
    padded = [x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in tensors]
    return [x if x.stride(-1) == 1 else x.contiguous() for x in padded]


def _scores(
    q: Tensor, k: Tensor, scale: float, causal: bool, mask: Tensor | None, softcap: float | None
) -> Iterator[tuple[slice, Tensor]]:
    """Yield ranges of queries, and their masked scores (B, H, rows, n)."""
    batch, heads, m, _ = q.shape
    n = k.shape[2]
    step = max(1, _CHUNK // max(1, batch * heads * n))
    for start in range(0, m, step):
        rows = slice(start, min(start + step, m))
        scores = (_grouped(q[:, :, rows], k.shape[1]) @ k[:, :, None].mT).flatten(1, 2)
        scores = scores.to(accumulation_dtype(q.dtype)) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if mask is not None:
            scores = scores + mask[:, :, rows]
        if causal:
            ahead = torch.ones(m, n, dtype=torch.bool, device=q.device).triu(1)[rows]
            scores = scores.masked_fill(ahead, -torch.inf)
        yield rows, scores


def _grouped(x: Tensor, heads: int) -> Tensor:
    """View (B, H, ...) as (B, K, H/K, ...): the query heads of each of K key/value heads."""
    return x.unflatten(1, (heads, -1))
