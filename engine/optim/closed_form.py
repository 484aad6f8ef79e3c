"""Learning-rate schedules in closed form: an engine that loads a checkpoint continues them with its own arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler


class ClosedFormSchedule(LRScheduler):
    """Schedule in closed form: learning rates that depend only on the number of steps taken.

    Args:
        optimizer: its parameter groups get the rates.
        last_batch_iteration: index of the last step that was taken, -1 at the start.

    Attributes:
        note: message for the user about a parameter of the schedule that has no effect here, or None.
        former: names of torch's schedules from whose checkpoints this one continues.
    """

    note: str | None = None
    former: tuple[str, ...] = ()

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int = -1) -> None:
        if last_batch_iteration >= 0:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
        super().__init__(optimizer, last_epoch=last_batch_iteration)

    @property
    def last_batch_iteration(self) -> int:
        """Index of the last step; -1 before the first."""
        return int(self.last_epoch) - 1

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Set the rates of the next step, after an optimizer step.

        If ``last_batch_iteration`` is given, the rates are set as if the step of this index had just been taken.
        """
        if last_batch_iteration is not None:
            self.last_epoch = last_batch_iteration
        super().step()

    def state_dict(self) -> dict[str, Any]:
        """Return the index of the last step; the configuration has the other values."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the saved step. The parameter groups keep their rates, as under torch's schedules.

        So the rates are those of the optimizer's state, also where another schedule holds this one and has set them.
        ``state_dict`` may be of a schedule of torch, which has ``last_epoch``.
        """
        torchs = "last_batch_iteration" not in state_dict
        self.last_epoch = state_dict["last_epoch"] if torchs else state_dict["last_batch_iteration"] + 1
        self._step_count = self.last_epoch + 2  # not 1: torch would warn of a step before the optimizer's
        self._last_lr = self.get_lr()
