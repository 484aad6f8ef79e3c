"""Lowest held-out loss, or best metric, of a run: its model is kept, and the run may end when no better one comes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .sections import EvaluateSection


class LowestLoss:
    """Lowest loss of the evaluations so far.

    Args:
        section: the section ``evaluate`` of the training file. With a ``metric`` of tasks the loss is this metric, or
            minus the metric if higher values are better.
        higher: True if higher values of the metric are better.

    Attributes:
        loss, step: the lowest loss, and the step of it; infinity and 0 before the first evaluation.
        since: number of evaluations after it.
        evaluated: step of the last evaluation.
    """

    def __init__(self, section: EvaluateSection, higher: bool = False) -> None:
        self._patience, self._metric, self._sign = section.patience, section.metric, -1.0 if higher else 1.0
        self.loss, self.step, self.since, self.evaluated = math.inf, 0, 0, 0

    @property
    def state(self) -> dict[str, Any]:
        """Plain data for the checkpoint of a run that goes on."""
        loss = self.loss if math.isfinite(self.loss) else None
        counts = {"step": self.step, "since": self.since, "evaluated": self.evaluated}
        return {"metric": self._metric, "loss": loss, **counts}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Go on from what ``state`` returned; None, or the state of another metric: from the beginning."""
        if state is not None and state.get("metric", "loss") == self._metric:
            self.loss = math.inf if state["loss"] is None else float(state["loss"])
            self.step, self.since = int(state["step"]), int(state["since"])
            self.evaluated = int(state["evaluated"])

    @property
    def value(self) -> float:
        """The best value of the metric."""
        return self._sign * self.loss

    def note(self, value: float, step: int) -> bool:
        """Note the metric of an evaluation, and return True if it is the best one. NaN never is."""
        self.evaluated, loss = step, self._sign * value
        if loss < self.loss:
            self.loss, self.step, self.since = loss, step, 0
            return True
        self.since += 1
        return False

    @property
    def is_over(self) -> bool:
        """True if the patience is over."""
        return self._patience is not None and self.since >= self._patience
