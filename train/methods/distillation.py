"""Distillation: a student learns a teacher's distribution of the next token, on any grid.

With s the student's and t the teacher's probabilities, both softmax(logits / temperature), the loss of a token is

    forward    KL(t || s) = sum_k t_k (log t_k - log s_k)
    reverse    KL(s || t)
    jsd        beta KL(t || m) + (1 - beta) KL(s || m), m = (1 - beta) s + beta t

and the mean over the tokens with a label. Sources: Hinton et al. 2015, arXiv:1503.02531 (forward, with the labels'
cross entropy beside it); Gu et al. 2023, arXiv:2306.08543 (reverse); Agarwal et al. 2023, arXiv:2306.13649, equation 1
(jsd). ``beta`` is TRL's, for which 0 is ``forward`` and 1 is ``reverse``. As in TRL, and other than in Hinton et al.,
the loss is not multiplied by the square of the temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...base.errors import nearest
from ...base.formulas import CHUNK_TOKENS
from ...base.torch_private import assert_later
from ...context.order import shard
from ...grid import Grid
from ...grid.loss_terms import Loss
from ...grid.ranges import split
from ...models.layers import NextTokenLoss
from ...pipe.chunked_loss import LastLayer, loss_in_chunks, runs_otherwise
from ...tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from ...tensor_parallel.divergence import top_divergence, top_log_probs, vocab_parallel_divergence

if TYPE_CHECKING:
    from ...engine.pipeline_engine import PipelineEngine

Kind = Literal["forward", "reverse", "jsd"]
TEACHER, IDS = "teacher", "teacher_ids"  # entries of the labels

_ROUNDED = 0.1  # by which the logarithm of the sum of a few probabilities may be above 0 because bf16 rounds
_NO_LOG_PROBS = (
    f"the labels' {TEACHER!r} of k words are no log-probabilities, because their probabilities add up to more than 1: "
    "give log_softmax(logits / temperature) of the k words, over the whole vocabulary"
)


def distill_loss(
    grid: Grid,
    vocab_size: int,
    kind: Kind = "reverse",
    beta: float | None = None,
    temperature: float = 1.0,
    hard: float = 0.0,
    chunk_tokens: int | None = CHUNK_TOKENS,
) -> DistillLoss:
    """Return the ``loss_fn`` of a student, a ``PipelineModule``; and of its teacher, for ``with_teacher``.

    Labels are a dict with ``labels``, integers (B, T), -100 for tokens that do not count, and ``teacher``, which is

    - (B, T, V) or, of this tensor-parallel rank's words, (B, T, V / t): the teacher's logits or log-probabilities, with
      a column of padding where t does not divide V and the rank has a word less than others;
    - or (B, T, k), with ``teacher_ids``, integers (B, T, k): its log-probabilities, at the temperature, of k different
      words. All others are then one word, the rest (see ``top_divergence``), as TRL does by default.

    ``with_teacher`` adds them, or they are read from the disk. On a context axis T counts the whole sequence or this
    rank's tokens. The rank of the last stage holds them whole for each microbatch: B T V / t numbers, or 2 B T k. The
    student's own logits are computed in chunks of tokens and never whole.

    The loss has the term ``kind`` and, with ``hard``, the term ``cross_entropy``; and the metric ``entropy``, the
    student's at the temperature, as TRL names it. All are means over the tokens with a label.

    Args:
        grid: the grid of the model.
        vocab_size: V, the size of the whole vocabulary, equal for student and teacher.
        kind: ``forward``, ``reverse`` (TRL's default) or ``jsd``.
        beta: of ``jsd``, between 0 and 1; None: 0.5.
        temperature: divisor of both logits.
        hard: factor of the labels' cross entropy, at temperature 1, which is added.
        chunk_tokens: tokens of a chunk of logits, at most; None: compute whole logits.

    Raises:
        ValueError: an unknown kind, a number out of its range, or an option that the kind does not have.
    """
    if kind not in get_args(Kind):
        raise ValueError(f"there is no distillation loss {kind!r}; {nearest(kind, get_args(Kind))}")
    if beta is not None and kind != "jsd":
        raise ValueError(f"{kind} has no beta, but jsd has: leave it out")
    if beta is not None and not 0 < beta < 1:
        limit = ": write kind='forward'" if beta == 0 else ": write kind='reverse'" if beta == 1 else ""
        raise ValueError(f"beta is {beta}, but jsd needs a number between 0 and 1, such as 0.5{limit}")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}: give a number above 0, such as 1.0")
    if not hard >= 0:
        raise ValueError(f"hard is {hard}: give a factor of at least 0, such as 0.5")
    number = {"forward": 0.0, "reverse": 1.0}.get(kind, 0.5 if beta is None else beta)
    return DistillLoss(grid, vocab_size, kind, number, temperature, hard, chunk_tokens)


@dataclass
class DistillLoss:
    """Loss function of ``distill_loss``, which runs the output layer in chunks of tokens.

    Attributes:
        grid, vocab_size, kind, temperature, hard, chunk_tokens: as for ``distill_loss``.
        beta: TRL's beta: 0 for ``forward``, 1 for ``reverse``.
        records: the teacher's entries of the labels of each microbatch, in place of a loss; None: compute the loss.
        top_k: number of words that ``records`` keep, with their log-probabilities at ``kept_temperature``; None: all,
            with their logits.
    """

    grid: Grid
    vocab_size: int
    kind: Kind
    beta: float
    temperature: float
    hard: float
    chunk_tokens: int | None
    records: list[dict[str, Tensor]] | None = field(default=None, init=False)
    top_k: int | None = field(default=None, init=False)
    kept_temperature: float = field(default=1.0, init=False)

    @contextmanager
    def recording(self, top_k: int | None, temperature: float) -> Iterator[list[dict[str, Tensor]]]:
        """Context in which evaluations append the teacher's entries of each microbatch to a list.

        Args:
            top_k: number of words whose log-probabilities are kept; None: keep the logits of all.
            temperature: divisor of the logits, for ``top_k``.
        """
        self.records, self.top_k, self.kept_temperature = [], top_k, temperature
        try:
            yield self.records
        finally:
            self.records = None

    def __call__(self, logits: Tensor, labels: Any) -> Loss:
        """Return the loss of logits (B, T, V / t), this tensor-parallel rank's shard of the vocabulary."""
        function, mine = self._prepared(labels, logits.shape[1])
        found: Loss = function(logits, mine)
        return found

    def weight(self, labels: Any) -> dict[str, Any]:
        """Return the number of labels that count, for each term."""
        count = self._plain.weight(self._labels(labels))
        return dict.fromkeys((self.kind, *(["cross_entropy"] if self.hard else [])), count)

    def takes_head(self, layer: nn.Module | None, function: Any) -> bool:
        """Return True if the last layer may be run in chunks; see ``NextTokenLoss.takes_head``."""
        return not runs_otherwise(self) and self._plain.takes_head(layer, function)

    def of_head(self, head: LastLayer, x: Any, labels: Any) -> Any:
        """Return the loss of the output layer's input, (B, T, D), or (B, T / t, D) under sequence parallelism."""
        assert self.chunk_tokens is not None
        function, mine = self._prepared(labels, x.shape[1] * head.shards)
        return loss_in_chunks(head, function, x, mine, self.chunk_tokens)

    @property
    def _plain(self) -> NextTokenLoss:
        return NextTokenLoss(self.grid, self.vocab_size, chunk_tokens=self.chunk_tokens)

    @property
    def _widths(self) -> tuple[int, int]:
        """Numbers of words of the whole vocabulary, and at most of a tensor-parallel rank."""
        return self.vocab_size, -(-self.vocab_size // self.grid.tensor.size)

    def _prepared(self, labels: Any, length: int) -> tuple[Callable[[Tensor, Any], Loss], dict[str, Tensor]]:
        """Return a function of the logits (B, n, V / t) of some tokens and of their labels; and the labels of all.

        Args:
            labels: as for a call.
            length: number of this rank's tokens of a row.
        """
        mine, _ = self._plain.local(self._labels(labels), length)
        if self.records is None:
            return self._loss, {"labels": mine, **self._teacher(labels, mine)}
        found = dict[str, Tensor]()
        self.records.append(found)
        places = torch.arange(mine.numel(), device=mine.device).view(mine.shape)
        return partial(self._record, found, mine.shape), {"labels": mine, "places": places}

    def _loss(self, logits: Tensor, labels: Mapping[str, Tensor]) -> Loss:
        """Return the loss of some tokens."""
        teacher, axis, further = labels[TEACHER].flatten(0, 1), self.grid.tensor, (self.beta, self.temperature)
        if IDS in labels:
            ids = labels[IDS].flatten(0, 1)
            self._check_log_probs(teacher, labels["labels"])
            found, entropies = top_divergence(logits.flatten(0, 1), teacher, ids, axis, self.vocab_size, *further)
        else:
            found, entropies = vocab_parallel_divergence(logits.flatten(0, 1), teacher, axis, *further)
        return self._summed(logits, labels["labels"], found, entropies)

    def _check_log_probs(self, values: Tensor, labels: Tensor) -> None:
        """Check that a teacher's values (N, k) are log-probabilities: as logits their rest would be unknown."""
        counts = (labels != self._plain.ignore_index).flatten()
        fits = (values.detach().float().logsumexp(-1) < _ROUNDED) | ~counts
        if values.device.type != "cpu":
            assert_later(fits.all(), _NO_LOG_PROBS)
        elif not bool(fits.all()):
            raise ValueError(_NO_LOG_PROBS)

    def _summed(self, logits: Tensor, labels: Tensor, divergences: Tensor, entropies: Tensor) -> Loss:
        """Return the loss of the divergences (N,) of tokens with labels (B, n), N = B n."""
        counts = labels != self._plain.ignore_index
        skipped, weight = ~counts.flatten(), torch.count_nonzero(counts)
        terms: dict[str, Any] = {self.kind: (divergences.masked_fill(skipped, 0.0).sum(), weight)}
        if self.hard:
            sizes: dict[str, Any] = {"grid": self.grid, "vocab_size": self.vocab_size}
            terms["cross_entropy"] = vocab_parallel_cross_entropy(logits, labels, **sizes, reduction="sum"), weight
        factors = {"cross_entropy": self.hard} if self.hard else {}
        return Loss(terms, factors, {"entropy": (entropies.masked_fill(skipped, 0.0).sum(), weight)})

    def _record(
        self, found: dict[str, Tensor], shape: torch.Size, logits: Tensor, labels: Mapping[str, Tensor]
    ) -> Loss:
        """Keep the logits of some tokens, or their largest log-probabilities; return a loss of 0.

        Args:
            found: tensors (B, T, ...) that keep them, by their names in the labels; none at first.
            shape: (B, T).
            logits, labels: of some tokens.
        """
        flat = logits.detach().flatten(0, 1)
        if self.top_k is None:
            kept = {TEACHER: F.pad(flat, (0, self._widths[1] - flat.shape[1]))}
        else:
            top = top_log_probs(flat, self.top_k, self.grid.tensor, self.vocab_size, self.kept_temperature)
            kept = dict(zip((TEACHER, IDS), top, strict=True))
        for name, each in kept.items():
            if name not in found:
                found[name] = each.new_empty(*shape, each.shape[-1])
            found[name].flatten(0, 1)[labels["places"].flatten()] = each
        zeros = flat.new_zeros(len(flat))
        return self._summed(logits, labels["labels"], zeros, zeros)

    def _labels(self, labels: Any) -> Tensor:
        found = labels.get("labels") if isinstance(labels, dict) else None
        if not isinstance(found, Tensor):
            raise TypeError(
                f"distill_loss was given a {type(labels).__name__} as labels: give a dict with 'labels', integers "
                f"(B, T), and {TEACHER!r}"
            )
        return found

    def _teacher(self, labels: Mapping[str, Any], mine: Tensor) -> dict[str, Tensor]:
        """Return the teacher's entries of this rank's tokens and words.

        Args:
            labels: as for a call.
            mine: labels of this rank's tokens, (B, T).

        Raises:
            ValueError: there are none, or their shapes do not fit.
        """
        found = {name: labels[name] for name in (TEACHER, IDS) if labels.get(name) is not None}
        shapes = {name: tuple(getattr(each, "shape", ())) for name, each in found.items()}
        whole = labels["labels"].shape
        *tokens, width = shapes.get(TEACHER) or (0,)
        if IDS in found:
            fits = width < self.vocab_size and shapes[IDS] == shapes.get(TEACHER)
        else:
            fits = width in self._widths
        if not fits or tuple(tokens) not in (tuple(whole), tuple(mine.shape)):
            given = ", ".join(f"{name} {each}" for name, each in shapes.items()) or "nothing"
            raise ValueError(
                f"the teacher's part of the labels is {given}, but for labels {tuple(whole)} it must be {TEACHER!r} "
                f"{(*whole, self.vocab_size)} or, for this rank's part of the vocabulary, "
                f"{(*whole, self._widths[1])}; or {TEACHER!r} and {IDS!r}, both {(*whole, 'k')} with k < "
                f"{self.vocab_size}: make the microbatches with triax.methods.with_teacher"
            )
        if IDS not in found:
            start, stop = split(self.vocab_size, self.grid.tensor.size, self.grid.tensor.rank)
            place = slice(start, stop) if width == self.vocab_size else slice(stop - start)
            found[TEACHER] = found[TEACHER][..., place]
        length = mine.shape[1]
        cut = partial(shard, axis=self.grid.context, multiple=length)
        return {name: each if each.shape[1] == length else cut(each) for name, each in found.items()}


def distill_loss_of(engine: PipelineEngine, whose: str) -> DistillLoss:
    """Return the loss function of an engine of ``whose``, "the student" or "the teacher", if it is a ``DistillLoss``.

    Raises:
        TypeError: it is another one.
    """
    found: Any = engine.module.loss_fn
    if not isinstance(found, DistillLoss):
        raise TypeError(
            f"distillation was given an engine of {whose} whose loss_fn is a {type(found).__name__}: make the model "
            "with loss_fn=triax.methods.distill_loss(...)"
        )
    return found
