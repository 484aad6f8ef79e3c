"""Linear layers as their adapters see them: a matrix (outputs, inputs), and the rows of it that a rank multiplies by.

    layer                                          matrix on a rank    rows that the rank multiplies by
    column-parallel                                (N / t, K)          all of them
    row-parallel                                   (N, K / t)          all of them
    replicated                                     (N, K)              all of them
    keys and values, too few heads for the axis    (N, K)              those of its own heads

A layer of triax says so by being ``Adaptable``. ``nn.Linear`` and transformers' ``Conv1D`` are replicated layers; a
hook adds the updates of their adapters.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Adaptable:
    """Linear layer whose forward pass adds the updates of its adapters (``linear.updated``).

    Attributes:
        adaptable: False for a class whose outputs no adapter can follow.
        transposed: the weight is (inputs, outputs).
        sequence_parallel: the layer takes or returns this rank's shard of the sequence.
        rows: rows of each fused part that this rank multiplies by, of a weight that every rank holds; None: all that
            it holds.
    """

    adaptable: bool = True
    transposed: bool = False
    sequence_parallel: bool = False
    rows: slice | None = None

    def selected(self, tensor: Tensor) -> Tensor:
        """Return the rows that this rank multiplies by, of a tensor with a row for each output that it holds."""
        return tensor if self.rows is None else tensor[self.rows]


def is_linear(layer: nn.Module) -> bool:
    """Return True for a linear layer that can have adapters."""
    return layer.adaptable if isinstance(layer, Adaptable) else isinstance(layer, nn.Linear) or _is_conv1d(layer)


def is_transposed(layer: nn.Module) -> bool:
    """Return True if the layer's weight is (inputs, outputs)."""
    return layer.transposed if isinstance(layer, Adaptable) else _is_conv1d(layer)


def matrix_of(layer: Any) -> Tensor:
    """Return the layer's weight on this rank as a matrix (outputs, inputs), without its gradient."""
    weight: Tensor = layer.weight.detach()
    return weight.t() if is_transposed(layer) else weight


def rows_in_use(layer: nn.Module) -> Tensor:
    """Return the matrix (n, K) of the outputs that a layer computes on this rank."""
    matrix = matrix_of(layer)
    return layer.selected(matrix) if isinstance(layer, Adaptable) else matrix


def _is_conv1d(layer: nn.Module) -> bool:
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")
