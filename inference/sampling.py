"""Sampling of the next token: processors, temperature, top-k, top-p, min-p; the same tokens on every grid.

A token is drawn by one uniform number u, a hash of (seed, request, position in the sequence): it is the first token at
which the cumulative sum of the probabilities exceeds u. With a vocabulary sharded over the tensor axis each rank sums
its own shard. The ranks exchange these sums, and the rank in whose shard the draw falls sends the token's id.

The order of the operations is that of transformers: repetition penalty, processors, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base.seeds import derive
from ..grid import Axis
from ..grid.comm.regions import gather_split
from ..grid.randomness.random import uniform
from ..grid.ranges import split

NOT_FINITE = -1  # in place of a token, if the logits have a nan or an infinity

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]  # (ids (1, T), scores (1, V)) -> scores (1, V)


@dataclass(frozen=True)
class Sampling:
    """Sampling options.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token (of equal ones the first).
        top_k: keep the k most likely tokens, and tokens as likely as the k-th.
        top_p: then keep the smallest set of most likely tokens whose probabilities add up to p, and tokens as likely
            as the last of them (nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751).
        min_p: then keep the tokens that are at least ``min_p`` times as likely as the most likely one (Nguyen et al.
            2024, arXiv:2407.01082).
        repetition_penalty: divides positive logits of tokens that the sequence has, prompt included, and multiplies
            negative ones (Keskar et al. 2019, arXiv:1909.05858); 1 changes nothing.
        processors: functions (ids (1, T), scores (1, V)) -> scores (1, V), applied one after the other to each
            sequence, before the temperature. transformers' ``LogitsProcessor`` s are such functions.
        logprobs: return the log-probability of each token too: True, under the model's own distribution, in float64;
            "tempered", under softmax(logits / temperature), from which tokens are drawn if no other option acts, in
            the arithmetic of ``LogProbsLoss``.

    Raises:
        ValueError: a value outside its range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    processors: tuple[LogitsProcessor, ...] = field(default=(), repr=False)  # ranks compare the other options
    logprobs: bool | Literal["tempered"] = False

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or 1e-6 <= self.temperature < math.inf):
            raise ValueError(f"temperature is {self.temperature}. Give 0 (the most likely token) or at least 1e-6.")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}. Give at least 1, or None to keep every token.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}. Give a probability in (0, 1], or None to keep every token.")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}. Give a probability in [0, 1], or None to keep every token.")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(
                f"repetition_penalty is {self.repetition_penalty}. Give a positive number; 1 means no penalty."
            )
        if self.logprobs == "tempered" and not self.temperature:
            raise ValueError(
                "logprobs='tempered' divides the logits by the temperature, which is 0. Give a temperature of at least "
                "1e-6, or logprobs=True."
            )
        for entry in self.processors:
            if not callable(entry):
                raise ValueError(f"logits_processor has {entry!r}. Give functions of (ids, scores) that return scores.")


class Vocabulary:
    """Place of this rank's logits in the whole vocabulary.

    Args:
        width: number of logits that this rank has.
        axis: the tensor axis; None if this rank has all logits.
        size: V, the size of the whole vocabulary.

    Attributes:
        size: V.
        axis: the axis that shards the logits; None if this rank has all of them.
        start, stop: this rank's range of ids.
    """

    def __init__(self, width: int, axis: Axis | None, size: int) -> None:
        self.size, self.axis = size, axis if width != size else None
        shard = (1, 0) if self.axis is None else (self.axis.size, self.axis.rank)
        self.start, self.stop = split(size, *shard)

    def gather(self, part: Tensor, length: int) -> Tensor:
        """Return the parts of all ranks, (B, n) of each, one behind the other: (B, length). Collective."""
        return part if self.axis is None else gather_split(part, self.axis, length=length)

    def stack(self, part: Tensor) -> Tensor:
        """Return the tensors of all ranks, (n, B) of each: (ranks, n, B). Collective."""
        return part[None] if self.axis is None else gather_split(part[None], self.axis, dim=0)

    def log_total(self, x: Tensor) -> Tensor:
        """Return the logarithm of the sum of exp(x) over the whole vocabulary: (B, V_local) -> (B,). Collective."""
        own_total = torch.logsumexp(x, dim=-1)
        return own_total if self.axis is None else torch.logsumexp(self.stack(own_total[None])[:, 0], dim=0)


def choose(
    logits: Tensor,
    sampling: Sampling,
    keys: Sequence[tuple[int, ...]],
    *,
    axis: Axis,
    vocab_size: int,
    sequences: Sequence[Sequence[int]] = (),
) -> Tensor:
    """Draw the next token of each sequence. Collective over ``axis`` if the vocabulary is sharded.

    Args:
        logits: (B, V_local), this rank's shard of the vocabulary, by ``grid.ranges.split``; or (B, V).
        sampling: the options.
        keys: for each of the B sequences, the integers that key its draw: seed, request and position.
        axis: the tensor axis.
        vocab_size: V, the size of the whole vocabulary.
        sequences: ids of each of the B sequences so far; needed for a repetition penalty and for processors.

    Returns:
        int64 (B, 1) on the CPU, the ids, the same on every rank; ``NOT_FINITE`` if a logit is nan or +inf, or all are
        -inf. If ``sampling.logprobs`` is True (B, 2), where the second has the bits of the float64 log-probability.
    """
    vocabulary = Vocabulary(logits.shape[-1], axis, vocab_size)
    raw = logits.double()  # exact for every dtype of the model
    x, shard = process(raw, sampling, sequences, vocabulary)
    if sampling.temperature:
        x = keep(x if sampling.temperature == 1 else x / sampling.temperature, sampling, shard)
        seeds = torch.tensor([derive("token", *key) for key in keys], device=x.device)
        ids, finite = _draw(x, uniform(seeds, torch.zeros(1, dtype=torch.int64, device=x.device)), shard)
    else:
        ids, finite = _likeliest(x, shard)
    ids = torch.where(finite, ids, NOT_FINITE)
    if sampling.logprobs is not True:
        return ids[:, None].cpu()
    is_own = (ids >= vocabulary.start) & (ids < vocabulary.stop)
    at = (ids - vocabulary.start).clamp(0, raw.shape[1] - 1)
    chosen = raw.gather(1, at[:, None])[:, 0].masked_fill(~is_own, -torch.inf)
    chosen = vocabulary.stack(chosen[None])[:, 0].amax(0) - vocabulary.log_total(raw)
    return torch.stack([ids, chosen.view(torch.int64)], dim=1).cpu()


def process(
    x: Tensor, sampling: Sampling, sequences: Sequence[Sequence[int]], vocabulary: Vocabulary
) -> tuple[Tensor, Vocabulary]:
    """Apply the repetition penalty and the processors, which need whole rows. Collective if there are processors.

    Args:
        x: (B, V_local) scores; not modified.
        sampling: the options.
        sequences: ids of each of the B sequences so far.
        vocabulary: place of x in the vocabulary.

    Returns:
        The scores and their place in the vocabulary: whole rows (B, V) behind processors.

    Raises:
        ValueError: a processor returns another shape.
    """
    if sampling.repetition_penalty != 1:
        ids = torch.tensor(list(chain.from_iterable(sequences)), device=x.device)
        rows = torch.tensor([len(ids) for ids in sequences], device=x.device)
        rows = torch.arange(len(sequences), device=x.device).repeat_interleave(rows, output_size=len(ids))
        is_own = (ids >= vocabulary.start) & (ids < vocabulary.stop)
        rows, ids = rows[is_own], ids[is_own] - vocabulary.start
        seen, penalty = x[rows, ids], sampling.repetition_penalty
        x = x.index_put((rows, ids), torch.where(seen < 0, seen * penalty, seen / penalty))
    if not sampling.processors:
        return x, vocabulary
    x, rows_out = vocabulary.gather(x, vocabulary.size), []
    for row, tokens in zip(x, sequences):
        ids, scores = torch.tensor([list(tokens)], device=x.device), row[None]
        for processor in sampling.processors:
            scores = processor(ids, scores)
            if not isinstance(scores, Tensor) or scores.shape != (1, vocabulary.size):
                what = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
                raise ValueError(
                    f"the logits processor {processor!r} returned {what}. Return the scores, (1, {vocabulary.size})."
                )
        rows_out.append(scores)
    return torch.cat(rows_out).double(), Vocabulary(vocabulary.size, None, vocabulary.size)


def keep(x: Tensor, sampling: Sampling, vocabulary: Vocabulary) -> Tensor:
    """Return the logits, with -inf for tokens that top-k, top-p and min-p leave out. Collective if x is sharded.

    Args:
        x: (B, V_local) or (B, V).
        sampling: the options.
        vocabulary: place of x in the vocabulary.
    """
    size = 1 if vocabulary.axis is None else vocabulary.axis.size
    if (k := sampling.top_k) is not None and k < vocabulary.size:
        width = min(k, -(-vocabulary.size // size))  # the k largest logits of each rank are enough
        top = x.topk(min(width, x.shape[-1]), dim=-1).values
        top = F.pad(top, (0, width - top.shape[-1]), value=-torch.inf)
        kth = vocabulary.gather(top, width * size).topk(k, dim=-1).values[:, -1:]  # (B, 1)
        x = x.masked_fill(x < kth, -torch.inf)
    if sampling.top_p is not None and sampling.top_p < 1:
        x = x.masked_fill(x < _nucleus(vocabulary.gather(x, vocabulary.size), sampling.top_p), -torch.inf)
    if sampling.min_p:
        largest = vocabulary.stack(x.amax(-1)[None])[:, 0].amax(0)  # (B,)
        x = x.masked_fill(x < (largest + math.log(sampling.min_p))[:, None], -torch.inf)
    return x


def _likeliest(x: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """Return the id of the largest logit of each row, of equal ones the first, and which rows are finite: (B,) each."""
    best, at = x.max(dim=-1)  # nan is the largest
    if vocabulary.axis is not None:
        every = vocabulary.stack(torch.stack([best, (at + vocabulary.start).double()]))  # ids are exact in float64
        best, winner = every[:, 0].max(dim=0)  # of equal ones the lowest rank, which has the lowest ids
        at = every[:, 1].gather(0, winner[None])[0].long()
    return at, torch.isfinite(best)


def _draw(x: Tensor, u: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """Draw an id of each row by its number u, and return which rows are finite: (B,) each.

    Args:
        x: (B, V_local) logits, float64.
        u: (B, 1) in (0, 1).
        vocabulary: place of x in the vocabulary.
    """
    largest = x.amax(-1, keepdim=True)  # (B, 1); nan is the largest
    sums = (x - largest.clamp(min=-1e300)).exp_().cumsum_(-1)  # (B, V_local); zeros if all logits are -inf
    if vocabulary.axis is None:
        at = torch.searchsorted(sums, sums[:, -1:] * u, right=True)[:, 0]
        return at.clamp(max=x.shape[1] - 1), torch.isfinite(largest[:, 0])
    every = vocabulary.stack(torch.stack([largest[:, 0], sums[:, -1]]))  # (ranks, 2, B)
    top = every[:, 0].amax(0)  # (B,)
    factors = (every[:, 0] - top).exp()  # (ranks, B): from a rank's own unit to the common one
    bounds = (every[:, 1] * factors).cumsum(0)
    wanted = bounds[-1] * u[:, 0]
    owner = (bounds <= wanted).sum(0).clamp(max=len(bounds) - 1)
    before = F.pad(bounds, (0, 0, 1, 0))[vocabulary.axis.rank]
    at = torch.searchsorted(sums, ((wanted - before) / factors[vocabulary.axis.rank])[:, None], right=True)[:, 0]
    at = at.clamp(max=x.shape[1] - 1) + vocabulary.start
    ids = vocabulary.stack(at[None])[:, 0].gather(0, owner[None])[0]
    return ids, torch.isfinite(top)


def _nucleus(x: Tensor, p: float) -> Tensor:
    """Return the smallest logit that top-p keeps, for each row of unsharded logits: (B, V) -> (B, 1)."""
    ranked = x.sort(dim=-1, descending=True).values  # (B, V)
    chances = ranked.softmax(dim=-1)
    inside = chances.cumsum(dim=-1) - chances < p  # the tokens before add up to less than p
    return ranked.gather(-1, inside.sum(dim=-1, keepdim=True).clamp(min=1) - 1)
