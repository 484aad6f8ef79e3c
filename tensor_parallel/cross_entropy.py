"""Cross entropy of logits whose vocabulary is sharded over the tensor axis, without gathering the logits.

Shoeybi et al. 2019, arXiv:1909.08053, section 3; label smoothing as Szegedy et al. 2015, arXiv:1512.00567,
section 7, over the whole vocabulary. With z the logits, y the label, K the vocabulary's size and s the
smoothing,

    L        = log sum_k exp z_k
    loss     = L  -  (1 - s) z_y  -  s / K sum_k z_k  +  c L^2
    gradient = (1 + 2 c L) softmax(z)_k  -  (1 - s) [k = y]  -  s / K

with the coefficient c of PaLM's z-loss (Chowdhery et al. 2022, arXiv:2204.02311, section 5).

Each rank computes the sums over its own k, and the sums are then all-reduced. There are two all-reduces: one for the
maximum (for numerical stability) and one for all the sums at once. The gradient needs no communication. The logits
(without a copy) and one number per row are saved for the backward pass, which recomputes the softmax from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..grid import Grid
from ..grid.comm.axis import Axis
from ..grid.ranges import check_units, split
from .embedding import check_ids

# Rows are worked through in blocks of about this many logits: temporaries in float32 stay small beside logits
# in bfloat16, and on a CPU in cache (0.5 to 0.65 of F.cross_entropy's time at V = 50,257; 1.2 at V = 256).
_BLOCK = {"cpu": 2**18}
_BLOCK_ELSEWHERE = 2**26


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    grid: Grid,
    vocab_size: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """Compute ``F.cross_entropy`` of sharded logits, with an equal result on every rank of the tensor axis. Collective.

    Args:
        logits: (..., V_local), the logits of this rank's ids, ``split(vocab_size, axis.size, axis.rank)`` with the
            tensor axis. They are not modified.
        labels: integers (...), equal on every tensor-parallel rank.
        grid: grid whose tensor axis shards the vocabulary.
        vocab_size: V, the size of the whole vocabulary.
        ignore_index: label value that counts neither in the loss nor in the mean.
        label_smoothing: s in [0, 1], spread over the whole vocabulary.
        z_loss: c, the coefficient of the squared logarithm of the softmax's denominator.
        softcap: if given, compute the loss of ``softcap * tanh(logits / softcap)``, without storing these logits.
        reduction: ``mean`` over the labels that count (nan if there are none, as in torch), ``sum``,
            ``none``.

    Returns:
        The loss, of shape () or, with ``none``, (...). The dtype is the logits', but float32 for float16 and bfloat16
        logits, because sums in these dtypes are too inaccurate. Second derivatives are not supported.

    Raises:
        ValueError: the shapes do not fit each other or the vocabulary, the smoothing is outside [0, 1], or z_loss is
            negative.
        IndexError: a label other than ``ignore_index`` is outside [0, V). On CUDA this is a device-side assertion.
    """
    axis = grid.tensor
    check_units("vocab_size", vocab_size, 1, axis.size)
    start, stop = split(vocab_size, axis.size, axis.rank)
    if logits.shape[:-1] != labels.shape or logits.shape[-1:] != (stop - start,):
        raise ValueError(
            f"logits {tuple(logits.shape)} do not fit labels {tuple(labels.shape)}, because tensor rank {axis.rank} of "
            f"{axis.size} holds {stop - start} ids of a vocabulary of {vocab_size}. Give logits "
            f"{(*labels.shape, stop - start)}."
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing}. Give a number in [0, 1].")
    if not z_loss >= 0.0:
        raise ValueError(f"z_loss is {z_loss}. Give a coefficient of at least 0, such as 1e-4.")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}. Give 'mean', 'sum' or 'none'.")
    flat = labels.reshape(-1).long()  # (N,)
    counts = flat != ignore_index
    check_ids(flat.masked_fill(~counts, 0), vocab_size, "label")
    losses, _ = _CrossEntropy.apply(
        logits.reshape(-1, stop - start), flat, counts, axis, start, vocab_size, label_smoothing, z_loss, softcap
    )
    if reduction == "none":
        return losses.view(labels.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum()


class _CrossEntropy(torch.autograd.Function):
    """Autograd function from logits (N, V_local) to losses (N,); the loss is 0 for labels that are ignored."""

    @staticmethod
    def forward(
        logits: Tensor,
        labels: Tensor,
        counts: Tensor,
        axis: Axis,
        start: int,
        vocab_size: int,
        smoothing: float,
        z_loss: float,
        cap: float | None,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.float32 if logits.dtype in (torch.float16, torch.bfloat16) else logits.dtype
        rows, owned = logits.shape[0], _owned(labels, counts, start, logits.shape[1])
        top = _capped(logits.amax(-1).to(dtype), cap)  # (N,)
        axis.all_reduce(top, op="max")

        # Of exp z, of z at the label and, to smooth, of z.
        sums = logits.new_zeros((3 if smoothing else 2, rows), dtype=dtype)
        for block in blocks(logits):
            z = _capped(logits[block].to(dtype), cap) - top[block, None]  # (n, V_local)
            at = (labels[block] - start).masked_fill(~owned[block], 0)[:, None]  # (n, 1)
            sums[1, block] = z.gather(1, at)[:, 0].masked_fill(~owned[block], 0.0)
            if smoothing:
                sums[2, block] = z.sum(-1)
            sums[0, block] = z.exp_().sum(-1)
        axis.all_reduce(sums)  # exact for the label's logit: the other ranks add zeros

        log_sum = sums[0].log()
        losses = log_sum - (1.0 - smoothing) * sums[1] if smoothing != 1.0 else log_sum.clone()
        if smoothing:
            losses -= smoothing / vocab_size * sums[2]
        log_sum += top
        if z_loss:
            losses += z_loss * log_sum.square()
        return losses.masked_fill_(~counts, 0.0), log_sum

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        logits, labels, counts, _, ctx.start, ctx.vocab_size, ctx.smoothing, ctx.z_loss, ctx.cap = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(logits, labels, counts, output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, counts, log_sum = ctx.saved_tensors
        owned = _owned(labels, counts, ctx.start, logits.shape[1])
        scale = grads[0].masked_fill(~counts, 0.0)[:, None]  # (N, 1)
        grad = torch.empty_like(logits)
        for block in blocks(logits):
            z = _capped(logits[block].to(log_sum.dtype), ctx.cap)  # (n, V_local)
            g = (z - log_sum[block, None]).exp_()  # the softmax
            if ctx.z_loss:
                g *= 1.0 + 2.0 * ctx.z_loss * log_sum[block, None]
            if ctx.smoothing:
                g -= ctx.smoothing / ctx.vocab_size
            at = (labels[block] - ctx.start).masked_fill(~owned[block], 0)[:, None]  # (n, 1)
            g.scatter_add_(1, at, (ctx.smoothing - 1.0) * owned[block, None].to(g.dtype))
            if ctx.cap is not None:
                g *= 1.0 - (z / ctx.cap).square()
            grad[block] = g.mul_(scale[block])
        return (grad, *[None] * 8)


def _capped(z: Tensor, cap: float | None) -> Tensor:
    return z if cap is None else (z / cap).tanh_().mul_(cap)


def _owned(labels: Tensor, counts: Tensor, start: int, length: int) -> Tensor:
    """Return the mask (N,) of the labels that count and lie in this rank's shard of the vocabulary."""
    return counts & (labels >= start) & (labels < start + length)


def blocks(logits: Tensor) -> Iterator[slice]:
    """Yield ranges of rows of logits (N, V_local), whose temporaries are small beside all of them."""
    rows, length = logits.shape
    step = max(1, _BLOCK.get(logits.device.type, _BLOCK_ELSEWHERE) // length)
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))
