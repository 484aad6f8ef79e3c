"""Learning-rate scheduler of a run: the shares of ``LearningRate`` times the rates of an optimizer's groups."""

from __future__ import annotations

import torch
from torch import Tensor

from ..engine.optim.closed_form import ClosedFormSchedule
from .learning_rate import LearningRate


class FileSchedule(ClosedFormSchedule):
    """Learning rates of a training file: the peak, which is the optimizer's own rate, times the share of the step.

    Args:
        optimizer: its parameter groups get the rates.
        rate: the schedule of this run's file. The file of the run that it resumes may have had another one.
    """

    former = ("LambdaLR",)

    def __init__(self, optimizer: torch.optim.Optimizer, rate: LearningRate) -> None:
        self._rate = rate
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """Return the rates of the next step, one for each parameter group."""
        return [base * self._rate.share(self.last_epoch) for base in self.base_lrs]
