"""Loss functions of the labels' log-probabilities, whose logits are never whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..base.formulas import CHUNK_TOKENS
from ..grid import Axis, Grid
from ..pipe.chunked_loss import LastLayer, runs_otherwise, values_in_chunks
from ..tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from .layers import NextTokenLoss, softcapped, uncapped


@dataclass(frozen=True)
class LogProbsLoss:
    """Loss function that gets the log-probability of each label in place of the logits.

    For losses that are no sum over tokens, such as a function of the log-probability of a whole sequence. As the
    ``loss_fn`` of a ``PipelineModule`` it runs the output layer in chunks of tokens, once in the forward pass and once
    more in the backward pass, so that the logits never exist as a whole (``pipe/chunked_loss.py``).

    Args:
        grid: grid whose tensor axis shards the vocabulary, and whose context axis shards the sequence.
        vocab_size: V, the size of the whole vocabulary.
        loss_fn: called with the log-probabilities (B, T), at least float32, and the labels; returns what any
            ``loss_fn`` may return. The log-probability of an ignored label is 0. With a context axis T counts this
            rank's tokens.
        ignore_index: label value that is left out.
        chunk_tokens: tokens of a chunk, at most; None: compute whole logits.
        temperature: divides the logits, as in sampling: log-probabilities are those of softmax(logits / temperature).

    Labels are integers (B, T), the token that follows each position, or a dict that has them as ``labels``. Other
    entries of the dict that have the labels' shape are cut as the labels are, where the context axis shards the
    sequence; the rest reach ``loss_fn`` as they are.
    """

    grid: Grid
    vocab_size: int
    loss_fn: Callable[[Tensor, Any], Any]
    ignore_index: int = -100
    chunk_tokens: int | None = CHUNK_TOKENS
    temperature: float = 1.0

    def __call__(self, logits: Tensor, labels: Any) -> Any:
        """Return the loss of logits (B, T, V / t), this tensor-parallel rank's shard of the vocabulary."""
        own_labels, labels = self._split(labels, logits.shape[1])
        return self.loss_fn(self.token_values(logits, own_labels), labels)

    def weight(self, labels: Any) -> Any:
        """Return ``loss_fn.weight(labels)``, or None if it has no such method."""
        weigh = getattr(self.loss_fn, "weight", None)
        return weigh(self._split(labels, None)[1]) if callable(weigh) else None

    def takes_head(self, layer: nn.Module | None, function: Callable[..., Any] | None) -> bool:
        """Return True if the last layer may be run in chunks; see ``NextTokenLoss.takes_head``."""
        return not runs_otherwise(self) and self._plain.takes_head(layer, function)

    def of_head(self, head: LastLayer, x: Any, labels: Any) -> Any:
        """Return the loss of the output layer's input, (B, T, D), or (B, T / t, D) under sequence parallelism."""
        assert self.chunk_tokens is not None
        head, softcap = uncapped(head)
        own_labels, labels = self._split(labels, x.shape[1] * head.shards)
        values = values_in_chunks(head, partial(self.token_values, softcap=softcap), x, own_labels, self.chunk_tokens)
        return self.loss_fn(values, labels)

    @property
    def _plain(self) -> NextTokenLoss:
        return NextTokenLoss(self.grid, self.vocab_size, self.ignore_index, chunk_tokens=self.chunk_tokens)

    def token_values(self, logits: Tensor, labels: Tensor, softcap: float | None = None) -> Tensor:
        """Return what ``loss_fn`` gets of each token: its label's log-probability, (B, n).

        Collective over the tensor axis.

        Args:
            logits: (B, n, V / t), this tensor-parallel rank's shard of the vocabulary.
            labels: integers (B, n).
            softcap: cap of the logits, if they do not have it yet.
        """
        common: dict[str, Any] = {"ignore_index": self.ignore_index, "softcap": softcap}
        return label_log_probs(logits, labels, self.grid, self.vocab_size, self.temperature, **common)

    def _split(self, labels: Any, length: int | None) -> tuple[Tensor, Any]:
        """Return the labels of this rank's tokens (``length``, or any number), alone and as ``loss_fn`` gets them.

        Raises:
            TypeError: there are no labels.
        """
        given = labels.get("labels") if isinstance(labels, dict) else labels
        if not isinstance(given, Tensor):
            raise TypeError(
                f"LogProbsLoss was given a {type(labels).__name__} as labels: give a tensor of integers (B, T), or a "
                "dict that has it as 'labels'"
            )
        own_labels, _ = self._plain.local(given, length)
        if not isinstance(labels, dict):
            return own_labels, own_labels
        by_token = [name for name, value in labels.items() if isinstance(value, Tensor) and value.shape == given.shape]
        cut = {name: self._plain.local((given, labels[name]), length)[1] for name in by_token}
        return own_labels, labels | cut | {"labels": own_labels}


def label_log_probs(
    logits: Tensor,
    labels: Tensor,
    grid: Grid,
    vocab_size: int,
    temperature: float = 1.0,
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
) -> Tensor:
    """Return log softmax(logits / temperature) at each label, 0 at ``ignore_index``. Collective over the tensor axis.

    Args:
        logits: (..., V / t), this tensor-parallel rank's shard of the vocabulary.
        labels: integers (...).
        grid, vocab_size, temperature, ignore_index: as for ``LogProbsLoss``.
        softcap: cap of the logits, if they do not have it yet.
    """
    if temperature != 1.0:
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits, softcap = softcapped(exact, softcap) / temperature, None
    return -vocab_parallel_cross_entropy(
        logits,
        labels,
        grid=grid,
        vocab_size=vocab_size,
        ignore_index=ignore_index,
        softcap=softcap,
        reduction="none",
    )


def summed_over_context(rows: Tensor, axis: Axis) -> Tensor:
    """Return the sums of rows over the context axis, for a loss that every rank of it computes from them. Collective.

    Each rank of the axis computes the whole loss and counts 1 / c of it, so its own part has c times the gradient.

    Args:
        rows: (B,), sums over this rank's tokens.
        axis: the context axis, of c ranks.
    """
    if axis.size == 1:
        return rows
    summed = rows.detach().clone()
    axis.all_reduce(summed)
    return summed + axis.size * (rows - rows.detach())
