"""torch's norms for use between tensor-parallel layers, with layouts that mark gradients that are partial.

Under sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2) a norm acts on its rank's shard
of the sequence: the parameters are whole on every tensor-parallel rank, and each rank's gradient is one term of a sum
over the tensor axis.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..grid import Grid
from ..grid.comm.axis import Axis
from ..grid.comm.regions import all_reduce_copy, copy_all_reduce
from ..grid.layout import layout_of, set_layout


class LayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` over the last dim, for whole sequences or for this rank's shard of the sequence.

    Args:
        width: D, the length of the last dim.
        eps: constant that is added to the variance.
        grid: grid whose tensor axis shards the sequence.
        sequence_parallel: the input is this rank's shard of the sequence, so the gradients are partial.
        affine: the norm has parameters.
        bias: the norm has a bias, if it has parameters.

    Attributes:
        weight, bias: (D,), with initial values 1 and 0, or None.

    Shape:
        (..., D) -> (..., D).
    """

    def __init__(
        self,
        width: int,
        eps: float = 1e-5,
        *,
        grid: Grid,
        sequence_parallel: bool = False,
        affine: bool = True,
        bias: bool = True,
    ) -> None:
        super().__init__(width, eps=eps, elementwise_affine=affine, bias=bias)
        _mark(self, grid, sequence_parallel)


class OffsetLayerNorm(LayerNorm):
    """``LayerNorm`` with the factor 1 + weight, Nemotron's: the initial weight is 0."""

    def __init__(self, width: int, eps: float = 1e-5, *, grid: Grid, sequence_parallel: bool = False) -> None:
        super().__init__(width, eps, grid=grid, sequence_parallel=sequence_parallel)
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize: (..., D) -> (..., D)."""
        return F.layer_norm(x, self.normalized_shape, 1.0 + self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` over the last dim, for whole sequences or for this rank's shard of the sequence.

    Zhang and Sennrich 2019, arXiv:1910.07467. Arguments and shapes are those of ``LayerNorm``. There is no bias.
    """

    def __init__(
        self, width: int, eps: float = 1e-6, *, grid: Grid, sequence_parallel: bool = False, affine: bool = True
    ) -> None:
        super().__init__(width, eps=eps, elementwise_affine=affine)
        _mark(self, grid, sequence_parallel)


class OffsetRMSNorm(RMSNorm):
    """``RMSNorm`` with the factor 1 + weight, Gemma's: the initial weight is 0. It is computed in fp32 at least."""

    def __init__(self, width: int, eps: float = 1e-6, *, grid: Grid, sequence_parallel: bool = False) -> None:
        super().__init__(width, eps, grid=grid, sequence_parallel=sequence_parallel)
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize: (..., D) -> (..., D)."""
        kind = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(kind), self.normalized_shape, 1.0 + self.weight.to(kind), self.eps).to(x.dtype)


def sharded_rms_norm(x: Tensor, weight: Tensor, dims: tuple[int, ...], width: int, eps: float, axis: Axis) -> Tensor:
    """RMSNorm over dims of which the tensor axis shards one, in fp32 at least.

    Args:
        x: this rank's shard.
        weight: this rank's shard of the weight, in a shape that broadcasts with x.
        dims: the dims.
        width: number of elements of these dims over all ranks.
        eps: constant that is added to the mean of the squares.
        axis: the axis.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    squares = wide.square().sum(dims, keepdim=True)
    if axis.size > 1:  # each rank's gradient of the sum is partial: reduced in both directions
        squares = copy_all_reduce(all_reduce_copy(squares, axis), axis)
    return (wide * (squares / width + eps).rsqrt()).to(x.dtype) * weight


def _mark(norm: nn.Module, grid: Grid, sequence_parallel: bool) -> None:
    for parameter in norm.parameters():
        partial = sequence_parallel and grid.tensor.size > 1
        set_layout(parameter, replace(layout_of(parameter), partial=partial))
