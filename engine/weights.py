"""An engine's weights, one by one: for whoever writes a model to files, or reads one from them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from ..zero.lend import gathered
from ..zero.replicas import Replicas

__all__ = ["Weights"]


class Weights:
    """What ``Engine`` can do with single parameters of its model."""

    _replicas: Replicas

    def gathered(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
        """Within it these parameters are whole, in stage 3 of ZeRO too: ``zero.gathered``. Collective over the data
        axis."""
        return gathered(parameters)

    @torch.no_grad()
    def assign(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Give a parameter new values, of which this rank keeps what it owns; its master takes them unrounded.

        Every replica assigns the same. What the optimizer remembers of the parameter stays.

        Args:
            parameter: of this rank's module.
            value: this tensor rank's part of it, of any dtype.

        Raises:
            ValueError: another shape than the parameter's.
        """
        if value.shape != parameter.shape:
            raise ValueError(f"values {tuple(value.shape)} for a parameter {tuple(parameter.shape)}")
        if not self._replicas.fill(parameter, value.to(self._replicas.device)):
            parameter.data.copy_(value)  # frozen, and whole on every replica
