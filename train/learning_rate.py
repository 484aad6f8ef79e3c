"""Learning-rate schedules of a training run, as shares of the peak. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LearningRate:
    """Schedule of the learning rate: a linear warmup, then one of four shapes.

    | schedule | after the warmup |
    |---|---|
    | ``cosine`` | a half cosine from 1 to ``minimum`` |
    | ``linear`` | a straight line from 1 to ``minimum`` |
    | ``constant`` | 1 |
    | ``wsd`` | 1, and over the last ``decay`` steps a straight line to ``minimum`` (arXiv:2404.06395) |

    Attributes:
        schedule: the name.
        warmup: steps of the warmup: step s of them has the share (s + 1) / warmup.
        steps: steps of the run.
        minimum: last share.
        decay: steps of the decay of ``wsd``.
    """

    schedule: str
    warmup: int
    steps: int
    minimum: float
    decay: int

    def share(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0, as a share of the peak."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.schedule == "constant":
            return 1.0
        begin = max(self.warmup, self.steps - self.decay) if self.schedule == "wsd" else self.warmup
        done = min(max(step - begin, 0) / max(self.steps - begin, 1), 1.0)
        falling = 0.5 * (1 + math.cos(math.pi * done)) if self.schedule == "cosine" else 1 - done
        return self.minimum + (1 - self.minimum) * falling
