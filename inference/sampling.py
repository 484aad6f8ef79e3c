"""Sampling of the next token: temperature, top-k, top-p; the same tokens on every grid.

A token is drawn by the Gumbel-max trick: the argmax of logit + Gumbel noise is a draw from the softmax (Gumbel 1954;
Maddison, Tarlow and Minka 2014, arXiv:1411.0030). The noise of a token id is a hash of (seed, request, position in the
sequence, id). A tensor-parallel rank computes it for its own shard of the vocabulary, and only each rank's best
candidate is sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..grid import Axis
from ..grid.random import derive, uniform
from ..grid.ranges import split
from ..tensor_parallel.regions import gather_split

NOT_FINITE = -1  # in place of a token, if the logits have a nan or an infinity


@dataclass(frozen=True)
class Sampling:
    """Sampling options.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token (of equal ones the first).
        top_k: keep the k most likely tokens, and tokens as likely as the k-th.
        top_p: then keep the smallest set of most likely tokens whose probabilities add up to p, and tokens as likely
            as the last of them (nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751).

    Raises:
        ValueError: a value outside its range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or 1e-6 <= self.temperature < math.inf):
            raise ValueError(f"temperature is {self.temperature}. Give 0 (the most likely token) or at least 1e-6.")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}. Give at least 1, or None to keep every token.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}. Give a probability in (0, 1], or None to keep every token.")


def choose(
    logits: Tensor, sampling: Sampling, keys: Sequence[tuple[int, ...]], *, axis: Axis, vocab_size: int
) -> Tensor:
    """Draw the next token of each sequence. Collective over ``axis`` if the vocabulary is sharded.

    Args:
        logits: (B, V_local), this rank's shard of the vocabulary, by ``grid.ranges.split``; or (B, V).
        sampling: the options.
        keys: for each of the B sequences, the integers that key its noise: seed, request and position.
        axis: the tensor axis.
        vocab_size: V, the size of the whole vocabulary.

    Returns:
        integers (B,) on the CPU, the same on every rank; ``NOT_FINITE`` if a logit is nan or +inf, or all are -inf.
    """
    sharded = logits.shape[-1] != vocab_size
    size, rank = (axis.size, axis.rank) if sharded else (1, 0)
    start, stop = split(vocab_size, size, rank)
    x = logits.double()  # exact for every dtype of the model
    if sampling.temperature:
        x = x / sampling.temperature
        x = keep(x, sampling, axis if sharded else None, vocab_size)
        seeds = torch.tensor([derive("token", *key) for key in keys], device=x.device)
        noise = uniform(seeds, torch.arange(start, stop, device=x.device))  # (B, V_local)
        x = x - torch.log(-torch.log(noise))
    best, at = x.max(dim=-1)  # nan is the largest
    if size > 1:
        mine = torch.stack([best, (at + start).double()])  # (2, B): ids are exact in float64
        every = gather_split(mine[None], axis, dim=0)  # (size, 2, B)
        best, winner = every[:, 0].max(dim=0)  # of equal ones the lowest rank, which has the lowest ids
        at = every[:, 1].gather(0, winner[None])[0].long()
    return torch.where(torch.isfinite(best), at, NOT_FINITE).cpu()


def keep(x: Tensor, sampling: Sampling, axis: Axis | None, vocab_size: int) -> Tensor:
    """Return the logits, with -inf for the tokens that top-k and top-p leave out. Collective over ``axis``.

    Args:
        x: (B, V_local) or (B, V).
        sampling: the options.
        axis: the axis that shards the vocabulary of x; None if x has all of it.
        vocab_size: V, the size of the whole vocabulary.
    """
    size = axis.size if axis is not None else 1

    def gather(part: Tensor, length: int) -> Tensor:  # (B, n) of each rank -> (B, length)
        return gather_split(part, axis, length=length) if axis is not None else part

    if (k := sampling.top_k) is not None and k < vocab_size:
        width = min(k, -(-vocab_size // size))  # the k largest logits of each rank are enough
        top = x.topk(min(width, x.shape[-1]), dim=-1).values
        top = F.pad(top, (0, width - top.shape[-1]), value=-torch.inf)
        kth = gather(top, width * size).topk(k, dim=-1).values[:, -1:]  # (B, 1)
        x = x.masked_fill(x < kth, -torch.inf)
    if sampling.top_p is not None and sampling.top_p < 1:
        x = x.masked_fill(x < _nucleus(gather(x, vocab_size), sampling.top_p), -torch.inf)
    return x


def _nucleus(x: Tensor, p: float) -> Tensor:
    """Return the smallest logit that top-p keeps, for each row of unsharded logits: (B, V) -> (B, 1)."""
    ranked = x.sort(dim=-1, descending=True).values  # (B, V)
    chances = ranked.softmax(dim=-1)
    inside = chances.cumsum(dim=-1) - chances < p  # the tokens before add up to less than p
    return ranked.gather(-1, inside.sum(dim=-1, keepdim=True).clamp(min=1) - 1)
