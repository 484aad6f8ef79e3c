"""Beam search: the K most likely sequences found so far go on, side by side, each in a slot of the KV cache.

The last stage computes the best continuations of the K sequences of a prompt, and every rank gets them. The rest is
plain Python, the same on every rank: which sequences go on, which have ended, and when no better one can follow. The
rules and their options are those of transformers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..grid import Axis
from .sampling import NOT_FINITE, Sampling, Vocabulary, process

_NEVER = -1e9  # score of a sequence that is not to be chosen


@dataclass(frozen=True)
class BeamSearch:
    """Options of beam search.

    Attributes:
        beams: K, the number of sequences of each prompt that go on.
        length_penalty: a sequence's score is the sum of its log-probabilities, divided by its number of new tokens to
            this power; larger values prefer longer sequences.
        early_stopping: True ends when K sequences have ended; False ends when the best running sequence, at its
            present length, is no better than the worst of them; ``"never"`` compares it at the length that favors it.

    Raises:
        ValueError: a value outside its range.
    """

    beams: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        if self.beams < 2:
            raise ValueError(f"num_beams is {self.beams}. Give at least 2, or 1 to generate without beam search.")
        if self.early_stopping not in (True, False, "never"):
            raise ValueError(f"early_stopping is {self.early_stopping!r}. Give True, False or 'never'.")


class Candidate(NamedTuple):
    """A continuation of one of the K sequences: the sum of its log-probabilities, the sequence, and the token."""

    score: float
    beam: int
    token: int


class FinishedSequence(NamedTuple):
    """A sequence that has ended: its score, its tokens with the prompt, and the log-probability of each new token."""

    score: float
    tokens: list[int]
    logprobs: list[float]


class Beams:
    """Beam search of one prompt.

    Args:
        prompt: ids of the prompt.
        limit: length at which a sequence ends.
        options: the options.
        ends: function that is True for a sequence (prompt included) that ends with its last token.

    Attributes:
        tokens: the K sequences that go on, with the prompt.
        logprobs: the log-probability of each of their new tokens.
        scores: sum of the log-probabilities of each.
        parents: for each the number of the sequence that it continues.
        found: the best K sequences that have ended, the best first.
    """

    def __init__(
        self, prompt: Sequence[int], limit: int, options: BeamSearch, ends: Callable[[list[int]], bool]
    ) -> None:
        self.options, self._ends, self._prompt, self._limit = options, ends, len(prompt), limit
        self.tokens: list[list[int]] = [list(prompt)] * options.beams
        self.logprobs: list[list[float]] = [[]] * options.beams
        self.scores = [0.0] + [_NEVER] * (options.beams - 1)  # all are alike at first: only one may continue
        self.parents = list(range(options.beams))
        self.found: list[FinishedSequence] = []

    def advance(self, candidates: Sequence[Candidate]) -> bool:
        """Continue by the best candidates; return True if the search has ended.

        Args:
            candidates: the best continuations of all sequences together, the best first: K, and at least K more for
                the case that the first K end.
        """
        options, count = self.options, self.options.beams
        new = len(self.tokens[0]) + 1 - self._prompt  # length of the candidates, without the prompt
        tokens = [[*self.tokens[choice.beam], choice.token] for choice in candidates]
        gains = [[*self.logprobs[choice.beam], choice.score - self.scores[choice.beam]] for choice in candidates]
        ended = [len(sequence) >= self._limit or self._ends(sequence) for sequence in tokens]
        for i in range(count):  # the others are candidates only in place of these
            if ended[i]:
                self.found.append(
                    FinishedSequence(candidates[i].score / new**options.length_penalty, tokens[i], gains[i])
                )
        self.found = sorted(self.found, key=lambda beam: -beam.score)[:count]
        scores = [choice.score + end * _NEVER for choice, end in zip(candidates, ended)]
        running = sorted(range(len(candidates)), key=lambda i: -scores[i])[:count]
        self.tokens, self.logprobs = [tokens[i] for i in running], [gains[i] for i in running]
        self.scores, self.parents = [scores[i] for i in running], [candidates[i].beam for i in running]
        full = len(self.found) == count
        if all(ended) or (options.early_stopping is True and full):
            return True
        favored = options.early_stopping == "never" and options.length_penalty > 0
        length = self._limit - self._prompt if favored else new
        return self.scores[0] / length**options.length_penalty <= (self.found[-1].score if full else _NEVER)


def continuations(
    logits: Tensor,
    sampling: Sampling,
    prompts: Sequence[Beams],
    each: int,
    *,
    axis: Axis,
    vocab_size: int,
) -> Tensor:
    """Compute the best continuations of each prompt's sequences. Collective over ``axis`` if it shards the vocabulary.

    Args:
        logits: (B, V_local) or (B, V); the K rows of a prompt are neighbours.
        sampling: repetition penalty and processors.
        prompts: the B / K searches.
        each: number of candidates per row: K times as many for each prompt.
        axis: the tensor axis.
        vocab_size: V.

    Returns:
        int64 (B, 2 x ``each``) on the CPU, the same on every rank: the candidates of a prompt, spread over its rows,
        each as the bits of its float64 score and as beam x 2**32 + token; ``NOT_FINITE`` in place of the latter if a
        logit is nan or +inf.
    """
    beams = prompts[0].options.beams
    count, vocabulary = each * beams, Vocabulary(logits.shape[-1], axis, vocab_size)
    x = logits.double()
    sequences = [tokens for prompt in prompts for tokens in prompt.tokens]
    x, shard = process(x - vocabulary.log_total(x)[:, None], sampling, sequences, vocabulary)
    scores = [score for prompt in prompts for score in prompt.scores]
    x = x + torch.tensor(scores, dtype=torch.float64, device=x.device)[:, None]
    width = x.shape[1]
    best, at = x.view(-1, beams * width).topk(min(count, beams * width), dim=-1)  # (B / K, count)
    at = (at // width << 32) + at % width + shard.start
    best, at = F.pad(best, (0, count - best.shape[1]), value=-torch.inf), F.pad(at, (0, count - at.shape[1]))
    if shard.axis is not None:
        best, at = (shard.stack(tensor[None])[:, 0].movedim(0, 1).flatten(1) for tensor in (best, at))
        best, order = best.topk(count, dim=-1)
        at = at.gather(1, order)
    broken = best[:, :1].isnan() | (best[:, :1] == torch.inf)  # nan is the largest
    at = at.masked_fill(broken, NOT_FINITE)
    return torch.stack([best.view(torch.int64), at], dim=-1).view(len(sequences), 2 * each).cpu()


def read_candidates(numbers: Sequence[Sequence[int]]) -> list[Candidate]:
    """Return the candidates of one prompt from its rows of ``continuations``."""
    flat = [number for row in numbers for number in row]
    return [Candidate(as_float(score), at >> 32, at % 2**32) for score, at in zip(flat[::2], flat[1::2])]


def as_float(bits: int) -> float:
    """Return the float64 number that an integer has the bits of."""
    value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return value
