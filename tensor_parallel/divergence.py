"""Divergence of a student's distribution from a teacher's, over a vocabulary sharded over the tensor axis.

With s the student's probabilities, t the teacher's, both softmax(z / temperature) of their logits z, and b in [0, 1],
the generalized Jensen-Shannon divergence (Agarwal et al. 2023, arXiv:2306.13649, equation 1) and its two limits are

    b = 0      KL(t || s)                               forward      gradient  s - t
    0 < b < 1  b KL(t || m) + (1 - b) KL(s || m)                     gradient  (1 - b) s (log s - log m - KL(s || m))
               with m = (1 - b) s + b t
    b = 1      KL(s || t)                               reverse      gradient  s (log s - log t - KL(s || t))

where the gradient is by z / temperature. (The divergence itself tends to 0 at both ends; divided by b, or 1 - b, it
tends to the two limits, which the paper and TRL take there.)

Each rank computes the sums over its own words, and the sums are then all-reduced. There are three all-reduces of a few
numbers for each row: of the maxima, of the softmaxes' denominators and of the divergences. The gradient needs no
communication. The logits (without copies) and three numbers per row are saved for the backward pass.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..grid.comm.axis import Axis
from ..grid.comm.regions import gather_split
from ..grid.ranges import split
from .cross_entropy import blocks
from .embedding import check_ids

_LEAST_REST = 1e-7  # probability of a teacher's other words, at least: of rounded log-probabilities it may be below 0


def vocab_parallel_divergence(
    logits: Tensor, teacher: Tensor, axis: Axis, beta: float, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute the divergence of each row, with an equal result on every rank of the axis. Collective.

    Args:
        logits: (N, V_local), the student's logits of this rank's words.
        teacher: (N, V_local), the teacher's logits or log-probabilities of the same words, without a gradient.
        axis: the axis that shards the vocabulary.
        beta: b: 0 is the forward divergence, 1 the reverse one.
        temperature: divisor of both logits.

    Returns:
        The divergences (N,), and without a gradient the student's entropies (N,); in the logits' dtype, but at least
        float32.
    """
    values: tuple[Tensor, Tensor, Tensor, Tensor] = _Divergence.apply(logits, teacher, axis, beta, temperature)
    return values[0], values[1]


def top_divergence(
    logits: Tensor, values: Tensor, ids: Tensor, axis: Axis, vocab_size: int, beta: float, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute the divergence of each row from a teacher that is known at k words. Collective.

    All other words are one, the rest, whose probability is 1 less those of the k words: the divergence is that of two
    distributions over k + 1 words, as in TRL's ``ServerDistillationTrainer`` with ``loss_add_tail``, its default. It is
    at most the divergence over the whole vocabulary. The student's rest is summed over the words that it has; the
    teacher's is at least 1e-7.

    Args:
        logits: (N, V_local), the student's logits of this rank's words.
        values: (N, k), the teacher's log-probabilities of the k words, at the temperature; the same on every rank.
        ids: integers (N, k), the words, all different; the same on every rank.
        axis: the axis that shards the vocabulary.
        vocab_size: V, the size of the whole vocabulary.
        beta: b: 0 is the forward divergence, 1 the reverse one.
        temperature: divisor of the student's logits.

    Returns:
        As ``vocab_parallel_divergence``.
    """
    check_ids(ids, vocab_size, "teacher's token id")
    start, stop = split(vocab_size, axis.size, axis.rank)
    ids = ids.long()
    at = torch.where((ids >= start) & (ids < stop), ids - start, stop - start)  # behind the shard: another rank's
    student, entropies, _ = _LogProbsAndRest.apply(logits, at, axis, temperature)
    known = values.to(student.dtype)
    rest = known.logsumexp(-1, keepdim=True).clamp(max=-_LEAST_REST)
    target = torch.cat([known, torch.log(-torch.expm1(rest))], -1)  # (N, k + 1)
    return _divergences(student, target, beta).sum(-1), entropies


def top_log_probs(logits: Tensor, k: int, axis: Axis, vocab_size: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the k largest log-probabilities of each row, and their words, equal on every rank. Collective.

    Each rank sends its k largest to the t - 1 others.

    Args:
        logits: (N, V_local), the logits of this rank's words.
        k: number of words, at most V.
        axis: the axis that shards the vocabulary, of size t.
        vocab_size: V, the size of the whole vocabulary.
        temperature: divisor of the logits.

    Returns:
        Log-probabilities (N, k), at least float32; integers (N, k).
    """
    log_sum = _log_sums([logits], axis, temperature)[0]
    z, at = logits.topk(min(k, logits.shape[1]), -1)
    missing = min(k, -(-vocab_size // axis.size)) - z.shape[1]  # other ranks may have a word more
    own_log_probs = F.pad(z.to(log_sum.dtype) / temperature - log_sum[:, None], (0, missing), value=-torch.inf)
    words = F.pad(at.int() + split(vocab_size, axis.size, axis.rank)[0], (0, missing))
    gathered, theirs = (gather_split(own, axis) for own in (own_log_probs, words))  # (N, t k) at most
    best, places = gathered.topk(k, -1)
    return best, theirs.gather(1, places)


def _divergences(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return each word's part of the divergence, (N, V), of log-probabilities (N, V)."""
    s, t = student, teacher
    if beta == 0:
        return t.exp() * (t - s)
    if beta == 1:
        return s.exp() * (s - t)
    m = _mixture(s, t, beta)
    return beta * t.exp() * (t - m) + (1 - beta) * s.exp() * (s - m)


def _mixture(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return log((1 - b) s + b t)."""
    return torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))


def _target(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return the log-probabilities with which the student's are compared in the gradient, for b above 0."""
    return teacher if beta == 1 else _mixture(student, teacher, beta)


def _log_sums(several: list[Tensor], axis: Axis, temperature: float) -> Tensor:
    """Return log sum_k exp(z_k / temperature) of each row of several logits (N, V_local): (several, N). Collective."""
    first = several[0].dtype
    dtype = torch.float32 if first in (torch.float16, torch.bfloat16) else first
    tops = torch.stack([z.amax(-1).to(dtype) for z in several]) / temperature
    axis.all_reduce(tops, op="max")
    sums = torch.empty_like(tops)
    for index, z in enumerate(several):
        for block in blocks(z):
            sums[index, block] = (z[block].to(dtype) / temperature - tops[index, block, None]).exp_().sum(-1)
    axis.all_reduce(sums)
    return sums.log_().add_(tops)


class _Divergence(torch.autograd.Function):
    """Autograd function from logits (N, V_local) to divergences (N,), and numbers without a gradient.

    These are the entropies (N,), the student's divergence (N,) from the target of the gradient, and both logarithms of
    the softmaxes' denominators (2, N).
    """

    @staticmethod
    def forward(
        logits: Tensor, teacher: Tensor, axis: Axis, beta: float, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        log_sums = _log_sums([logits, teacher], axis, temperature)
        values = log_sums.new_zeros(3, len(logits))
        for block in blocks(logits):
            s, t = _log_probs(logits, teacher, log_sums, temperature, block)
            values[0, block] = _divergences(s, t, beta).sum(-1)
            values[1, block] = -(s.exp() * s).sum(-1)
            if beta:
                values[2, block] = (s.exp() * (s - _target(s, t, beta))).sum(-1)
        axis.all_reduce(values)
        return values[0].clone(), values[1].clone(), values[2].clone(), log_sums

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        logits, teacher, _, ctx.beta, ctx.temperature = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(logits, teacher, *output[2:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, teacher, means, log_sums = ctx.saved_tensors
        beta, grad = ctx.beta, torch.empty_like(logits)
        scale = (grads[0] * ((1 - beta) if 0 < beta < 1 else 1.0) / ctx.temperature)[:, None]  # (N, 1)
        for block in blocks(logits):
            s, t = _log_probs(logits, teacher, log_sums, ctx.temperature, block)
            g = s.exp() * (s - _target(s, t, beta) - means[block, None]) if beta else s.exp() - t.exp()
            grad[block] = g.mul_(scale[block])
        return grad, *[None] * 4


def _log_probs(
    logits: Tensor, teacher: Tensor, log_sums: Tensor, temperature: float, block: slice
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities (n, V_local) of student and teacher in a block of rows."""
    s, t = (
        (z[block].to(log_sums.dtype) / temperature).sub_(own[block, None])
        for z, own in zip((logits, teacher), log_sums)
    )
    return s, t


class _LogProbsAndRest(torch.autograd.Function):
    """Autograd function from logits (N, V_local) to log-probabilities (N, k + 1) of k words and of all others as one.

    The words are places (N, k) in this rank's shard; V_local stands for a word of another rank. Further results are,
    without a gradient, the entropies (N,), and the logarithms (2, N) of the sums of exp z over all words and the rest.
    """

    @staticmethod
    def forward(logits: Tensor, at: Tensor, axis: Axis, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.float32 if logits.dtype in (torch.float16, torch.bfloat16) else logits.dtype
        top = logits.amax(-1).to(dtype) / temperature  # (N,)
        axis.all_reduce(top, op="max")
        sums = top.new_zeros(3 + at.shape[1], len(top))  # of exp z, of exp z of the rest, of z exp z; z of the k words
        for block in blocks(logits):
            z = (logits[block].to(dtype) / temperature).sub_(top[block, None])  # (n, V_local)
            columns, foreign = _places(at[block], z)
            sums[3:, block] = z.gather(1, columns).masked_fill_(foreign, 0.0).t()
            e = z.exp()
            sums[0, block], sums[2, block] = e.sum(-1), (e * z).sum(-1)
            sums[1, block] = e.masked_fill_(_listed(at[block], z), 0.0).sum(-1)
        axis.all_reduce(sums)
        log_all, log_rest = sums[0].log(), sums[1].clamp(min=torch.finfo(dtype).tiny).log()
        log_probs = torch.cat([sums[3:] - log_all, (log_rest - log_all)[None]]).t().contiguous()
        return log_probs, log_all - sums[2] / sums[0], torch.stack([log_all, log_rest]) + top

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        logits, at, _, ctx.temperature = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(logits, at, output[2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, at, (log_all, log_rest) = ctx.saved_tensors
        grad, scale = torch.empty_like(logits), grads[0] / ctx.temperature  # (N, k + 1)
        for block in blocks(logits):
            z, own = logits[block].to(scale.dtype) / ctx.temperature, scale[block]  # (n, V_local), (n, k + 1)
            g = (z - log_all[block, None]).exp_().mul_(-own.sum(-1, keepdim=True))
            rest = (z - log_rest[block, None]).exp_().masked_fill_(_listed(at[block], z), 0.0)
            g += rest.mul_(own[:, -1:])
            columns, foreign = _places(at[block], z)
            grad[block] = g.scatter_add_(1, columns, own[:, :-1].masked_fill(foreign, 0.0))
        return grad, None, None, None


def _places(at: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Return valid places (n, k) in rows of z (n, V_local), and a mask of those that stand for another rank's words."""
    return at.clamp(max=z.shape[1] - 1), at == z.shape[1]


def _listed(at: Tensor, z: Tensor) -> Tensor:
    """Return the mask (n, V_local) of the listed words."""
    return z.new_zeros(len(z), z.shape[1] + 1, dtype=torch.bool).scatter_(1, at, True)[:, :-1]
