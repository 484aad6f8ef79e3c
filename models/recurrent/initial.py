"""Distributions of the initial decays and time steps, as in the code of Mamba2 and of Gated DeltaNet."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LogUniform:
    """Logarithm of a number that is uniform over [low, high): of the rate A of a head's decay."""

    low: float
    high: float

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return a new tensor with values drawn from this distribution."""
        values = torch.empty(shape, device="cpu", dtype=torch.float32)
        return values.uniform_(self.low, self.high, generator=generator).log_()


@dataclass(frozen=True)
class StepBias:
    """Bias whose softplus is a time step, with a logarithm that is uniform over [log low, log high)."""

    low: float = 0.001
    high: float = 0.1

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return a new tensor with values drawn from this distribution."""
        values = torch.empty(shape, device="cpu", dtype=torch.float32)
        step = values.uniform_(math.log(self.low), math.log(self.high), generator=generator).exp_()
        return step + torch.log(-torch.expm1(-step))  # the inverse of softplus
