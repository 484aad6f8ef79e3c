"""Losses of whole answers: a number for each row of a microbatch, made from the log-probability of its labels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...grid import Grid
from ...models.log_probs import summed_over_context

REFERENCE = "reference"  # entry of the labels: log-probability of each row by the reference model, (B,)
BASELINE = "baseline"  # entry of the labels: KTO's baseline, the same number in each row, (B,)


class Recording:
    """Base class of losses of log-probabilities that can keep these in place of computing a loss.

    Attributes:
        records: log-probabilities of each microbatch, of its rows, (B,), or tokens, (B, T); None: compute the loss.
    """

    records: list[Tensor] | None = None

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Context in which evaluations append the log-probabilities of each microbatch to a list."""
        self.records = []
        try:
            yield self.records
        finally:
            self.records = None


@dataclass
class AnswerLoss(Recording):
    """Base class of losses that a ``LogProbsLoss`` gives the log-probabilities (B, T) of a microbatch's labels.

    Attributes:
        grid: the grid of the model.
        kind: name of the loss, which is also its term's name.
        beta: strength: factor of the log-probabilities.
    """

    grid: Grid
    kind: str
    beta: float

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ValueError(f"beta is {self.beta}: give a number above 0, such as 0.1")

    @property
    def uses_reference(self) -> bool:
        """True if the loss needs the log-probabilities of a reference model."""
        return True

    def mean(self, values: Tensor) -> tuple[Tensor, float]:
        """Return the pair (sum, weight) of values (n,) that each rank of the context axis has."""
        parts = self.grid.context.size
        return values.sum() / parts, len(values) / parts

    def entry(self, labels: Any, name: str, rows: Tensor, made_by: str) -> Tensor:
        """Return an entry (B,) of the labels, which the loss needs for each of the rows (B,).

        Raises:
            ValueError: there is no such entry, or it has another shape; the message names ``made_by``.
        """
        if self.records is not None:  # log-probabilities alone are wanted
            return torch.zeros_like(rows)
        found = labels.get(name)
        if not isinstance(found, Tensor) or found.shape != rows.shape:
            what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else found
            raise ValueError(
                f"{self.kind} needs a number for each of {len(rows)} rows as labels[{name!r}], which is {what}: "
                f"{made_by}"
            )
        return found.to(rows.dtype)

    def rows(self, log_probs: Tensor) -> Tensor:
        """Return the log-probability of each row's labels, (B,), and record it if it is wanted."""
        rows = summed_over_context(log_probs.sum(1), self.grid.context)
        if self.records is not None:
            self.records.append(rows.detach())
        return rows

    def reference(self, labels: Any, rows: Tensor) -> Tensor:
        """Return the reference's log-probability of each row, (B,)."""
        return self.entry(labels, REFERENCE, rows, "make the microbatches with triax.methods.with_reference")
