"""The end of a training step, on both engines: from the gradients of the batch to the new weights.

sum over all ranks    loss, weight and |gradient|^2, in one all-reduce          ``totals``
decide                skip the step if an observer says so, if loss or norm is not finite (``nan_loss``),
                      or if gradients overflow in fp16                           ``decide``
scale                 one factor of the gradients: the batch's weight, the loss scale, clip / norm; with gradient
                      compression, sum the compressed gradients over replicas    ``factor``
step, publish         the optimizer, over ZeRO's shards                          ``ZeroDataAxis.step``
end                   fp16's loss scale (and the engine's learning-rate schedule)  ``advance``
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..grid import Grid
from ..grid.agreement import agreement
from ..options.engine import EngineOptions
from ..zero.data_axis import ZeroDataAxis
from ..zero.gradient_norm import clip_factor, global_norm
from .optim.loss_scale import LossScaler
from .optim.nonfinite import MicrobatchLosses, NonFinitePolicy
from .step_observer import StepObserver


class StepSums(NamedTuple):
    """This rank's numbers of a step (floats, or tensors on a GPU, so that nothing waits), or their sums over all ranks.

    Attributes:
        loss: sum of the losses.
        weight: sum of the weights of the losses; None for a plain module, where each microbatch has the weight 1.
        unused: number of parameters and stages without a gradient, and of changes by hand (``UsedParameters.unused``).
        strayed: number of ranks on which the step has changed a buffer that is not broadcast yet; None if the model
            has no buffers. (``unused`` and ``strayed`` are None in evaluation.)
    """

    loss: Any
    weight: Any = None
    unused: Any = None
    strayed: Any = None

    def numbers(self) -> list[Any]:
        """Return the numbers that are there."""
        return [number for number in self if number is not None]

    def summed(self, sums: Sequence[float]) -> StepSums:
        """Return the record of the sums of ``numbers``."""
        left = iter(sums)
        return StepSums(*(None if number is None else next(left) for number in self))


class OptimizerStep:
    """Turns the gradients that ``data_axis`` holds into a step of the weights.

    Args:
        options: the engine's options, for ``clip`` and ``nan_loss``.
        data_axis: holds the gradients, as sums over microbatches and replicas.
        loss_scaler: fp16's loss scale; None without fp16.

    Attributes:
        clip: limit of the gradient norm; None: no limit.
        norm: norm of the last step's gradient before clipping. None if it was not computed.
        nonfinite: the policy for a loss or a gradient that is not finite.
        across: sums the gradients and the given numbers over replicas outside of the grid; None without such replicas.
    """

    def __init__(self, options: EngineOptions, data_axis: ZeroDataAxis, loss_scaler: LossScaler | None) -> None:
        self.clip, self._data_axis, self._loss_scaler = options.clip, data_axis, loss_scaler
        self.nonfinite = NonFinitePolicy(options.nan_loss, scaled=loss_scaler is not None)
        self.across: Callable[[Sequence[Tensor | float]], list[float]] | None = None
        self.norm: float | None = None
        self._norm_wanted_late = False  # asked for once when the gradients were gone: from then on each step has it
        self._squares: list[Tensor] = []  # this rank's share of |gradient|^2, if this step computes it
        self._square: list[float] = []  # their sum over all ranks
        self._divisor = 1.0  # of the summed gradients

    @property
    def scale(self) -> float:
        """Factor of the loss before the backward pass: fp16's loss scale, or 1."""
        return 1.0 if self._loss_scaler is None else self._loss_scaler.scale

    def totals(self, grid: Grid, values: Sequence[Tensor | float]) -> list[float]:
        """Sum numbers over all ranks of a grid, and with them the square of the gradient's norm. Collective.

        The square is kept for ``decide``. A single process computes it only if clipping, fp16 or compression needs it,
        or if ``global_norm`` was called too late before.

        Args:
            grid: the grid whose ranks take the step together.
            values: this rank's numbers, such as its loss and weight.

        Returns:
            The sums of ``values``.
        """
        if self.across is not None:
            values = self.across(values)
        wanted = grid.size > 1 or self.clip is not None or self._loss_scaler is not None or self._norm_wanted_late
        self._squares = [self._data_axis.squares()] if wanted or self._data_axis.exchange is not None else []
        sums = agreement.totals(grid, [*values, *self._squares])
        self._square = sums[len(values) :]
        return sums[: len(values)]

    def decide(
        self,
        grid: Grid,
        loss: float | None,
        weight: float,
        losses: MicrobatchLosses,
        observers: Sequence[StepObserver],
    ) -> bool:
        """Return True if the step is taken, False if it is left out. Call ``totals`` before it.

        Collective if a value is not finite.

        Args:
            grid: the grid whose ranks take the step together.
            loss: the mean loss of the batch. None if the engine was not given a loss.
            weight: the weight of the batch, by which the summed gradients are divided.
            losses: this rank's losses by microbatch, for the error message.
            observers: the engine's observers; each observer may skip the step.

        Raises:
            AgreedError: on every rank, if the loss or the norm is not finite and ``nan_loss`` is ``raise``.
        """
        self._divisor = weight * self._data_axis.options.divisor * self.scale
        self.norm = global_norm(self._square[0], self._divisor) if self._square else None
        overflow = self._loss_scaler is not None and self.norm is not None and not math.isfinite(self.norm)
        asked = [observer.may_step(loss, None if overflow else self.norm) for observer in observers]
        if not all(asked):
            return False
        if self.nonfinite.skips(grid, loss, self.norm, losses, self._data_axis.buckets):
            return False
        if self._loss_scaler is not None and overflow:
            self._loss_scaler.update(overflow, report=grid.rank == 0)
        return not overflow

    def factor(self, grid: Grid) -> float:
        """Return the factor by which the optimizer multiplies the gradients. Collective under gradient compression."""
        factor = self._exchange(grid, self._divisor)
        return factor if self.clip is None or self.norm is None else factor * clip_factor(self.norm, self.clip)

    @property
    def left_scale(self) -> float:
        """Factor by which the last step's gradients must still be multiplied for their mean: 1 after a taken step."""
        return 1.0 if self._data_axis.stepped else 1.0 / (self._divisor * self._data_axis.access.applied)

    def advance(self, grid: Grid) -> None:
        """Advance fp16's loss scale after a step that was taken."""
        if self._loss_scaler is not None:
            self._loss_scaler.update(False, report=grid.rank == 0)

    def global_norm(self) -> float | None:
        """Norm of the last step's gradient before clipping.

        If the step did not compute the norm, this call computes it from the gradients, if they still exist.
        """
        if self.norm is None:
            if self._data_axis.stepped:
                self.norm = global_norm(float(self._data_axis.squares()))  # gradients are divided already
            else:
                self._norm_wanted_late = True
        return self.norm

    def _exchange(self, grid: Grid, divisor: float) -> float:
        """Sum compressed gradients over the replicas, divided by ``divisor``. Collective.

        Returns:
            The factor by which gradients must still be multiplied: 1, or 1 / ``divisor`` without compression.
        """
        if self._data_axis.exchange is None:
            return 1.0 / divisor
        self._data_axis.exchange_gradients(1.0 / divisor)
        (square,) = agreement.totals(grid, [self._data_axis.squares()])
        self.norm = global_norm(square)
        return 1.0
