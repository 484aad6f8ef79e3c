"""Lowest held-out loss of a run: its model is kept, and the run may end when no lower one comes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .schema import EvaluateSection


class LowestLoss:
    """Lowest loss of the evaluations so far.

    Args:
        section: the section ``evaluate`` of the training file.

    Attributes:
        loss, step: the lowest loss, and the step of it; infinity and 0 before the first evaluation.
        since: number of evaluations after it.
        evaluated: step of the last evaluation.
    """

    def __init__(self, section: EvaluateSection) -> None:
        self._patience = section.patience
        self.loss, self.step, self.since, self.evaluated = math.inf, 0, 0, 0

    @property
    def state(self) -> dict[str, Any]:
        """Plain data for the checkpoint of a run that goes on."""
        loss = self.loss if math.isfinite(self.loss) else None
        return {"loss": loss, "step": self.step, "since": self.since, "evaluated": self.evaluated}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Go on from what ``state`` returned; None: from the beginning."""
        if state is not None:
            self.loss = math.inf if state["loss"] is None else float(state["loss"])
            self.step, self.since = int(state["step"]), int(state["since"])
            self.evaluated = int(state["evaluated"])

    def note(self, loss: float, step: int) -> bool:
        """Note the loss of an evaluation, and return True if it is the lowest. NaN never is."""
        self.evaluated = step
        if loss < self.loss:
            self.loss, self.step, self.since = loss, step, 0
            return True
        self.since += 1
        return False

    @property
    def is_over(self) -> bool:
        """True if the patience is over."""
        return self._patience is not None and self.since >= self._patience
