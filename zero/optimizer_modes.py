"""Modes of an optimizer: schedule-free ones have one kind of weights to train, and another to evaluate and save."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .data_axis import ZeroDataAxis


class ModalOptimizer(torch.optim.Optimizer):
    """Optimizer of a pipeline with ``train()`` and ``eval()``. It shares groups and state with the one that steps.

    A switch changes the weights that this rank owns, and sends them to all replicas.

    Args:
        data_axis: its optimizer has modes.
    """

    def __init__(self, data_axis: ZeroDataAxis) -> None:
        inner = data_axis.stepper.optimizer
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups, self.state, self._data_axis = inner.param_groups, inner.state, data_axis
        self._opt_called = True  # the engine steps: else torch's schedules warn of a missing step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step this rank's ranges."""
        return self._data_axis.stepper.optimizer.step(closure)

    def train(self) -> None:
        """Switch to the weights that are trained. Collective."""
        self._data_axis.switch_mode("train")

    def eval(self) -> None:
        """Switch to the weights that are evaluated and exported. Collective."""
        self._data_axis.switch_mode("eval")


def with_modes(data_axis: ZeroDataAxis) -> torch.optim.Optimizer | None:
    """Return the optimizer of a data axis for users: with modes, if it has them."""
    has = all(callable(getattr(data_axis.optimizer, mode, None)) for mode in ("train", "eval"))
    return ModalOptimizer(data_axis) if has else data_axis.optimizer
