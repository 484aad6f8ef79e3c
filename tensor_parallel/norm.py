"""torch's norms for use between tensor-parallel layers, with layouts that mark gradients that are partial.

Under sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2) a norm acts on its rank's shard
of the sequence: the parameters are whole on every tensor-parallel rank, and each rank's gradient is one term of a sum
over the tensor axis.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from ..grid import Grid
from ..grid.layout import layout_of, set_layout


class LayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` over the last dim, for whole sequences or for this rank's shard of the sequence.

    Args:
        width: D, the length of the last dim.
        eps: constant that is added to the variance.
        grid: grid whose tensor axis shards the sequence.
        sequence_parallel: the input is this rank's shard of the sequence, so the gradients are partial.

    Attributes:
        weight, bias: (D,), with initial values 1 and 0.

    Shape:
        (..., D) -> (..., D).
    """

    def __init__(self, width: int, eps: float = 1e-5, *, grid: Grid, sequence_parallel: bool = False) -> None:
        super().__init__(width, eps=eps)
        _mark(self, grid, sequence_parallel)


class RMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` over the last dim, for whole sequences or for this rank's shard of the sequence.

    Zhang and Sennrich 2019, arXiv:1910.07467. Arguments and shapes are those of ``LayerNorm``. There is no bias.
    """

    def __init__(self, width: int, eps: float = 1e-6, *, grid: Grid, sequence_parallel: bool = False) -> None:
        super().__init__(width, eps=eps)
        _mark(self, grid, sequence_parallel)


def _mark(norm: nn.Module, grid: Grid, sequence_parallel: bool) -> None:
    for parameter in norm.parameters():
        partial = sequence_parallel and grid.tensor.size > 1
        set_layout(parameter, replace(layout_of(parameter), partial=partial))
