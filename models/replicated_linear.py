"""Linear layer that every rank of the tensor axis holds whole."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ..grid import Grid
from ..grid.layout import Layout
from ..grid.randomness.random import Constant, Distribution, sharded_parameter
from ..tensor_parallel.adaptable import Adaptable
from ..tensor_parallel.linear import updated


class ReplicatedLinear(Adaptable, nn.Module):
    """Linear layer, replicated over the tensor axis: (..., K) -> (..., N).

    Args:
        in_features, out_features: K and N.
        bias: add a bias, with initial value 0.
        grid: the grid.
        init: distribution of the initial weight.
        sequence_parallel: the input is this rank's shard of the sequence, so the gradient is partial.

    Attributes:
        weight: (N, K).
        bias: (N,), or None.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        grid: Grid,
        init: Distribution,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        partial_gradient = sequence_parallel and grid.tensor.size > 1
        layout = Layout((out_features, in_features), partial=partial_gradient)
        self.weight = sharded_parameter(layout, init, rank=0, size=1)
        own = Layout((out_features,), partial=partial_gradient)
        self.bias = sharded_parameter(own, Constant(0.0), rank=0, size=1) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Compute the product."""
        return updated(self, F.linear(x, self.weight, self.bias), x, self.bias)
