"""Groups of heads that share a pair of vectors, over the tensor axis: the keys and values of grouped queries.

The groups of Mamba2 and Gated DeltaNet share their vectors in the same way. The tensor axis shards the heads. If its
size divides the number of groups, it shards the groups too. Otherwise each rank holds the weights of all groups
(``WholeKV``) and computes the groups that its heads use, and the gradients of the weights are summed over the axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from ..grid import Axis, Grid
from ..grid.layout import Layout
from ..grid.randomness.random import Distribution, sharded_parameter
from ..grid.ranges import split
from ..tensor_parallel.adaptable import Adaptable
from ..tensor_parallel.column import column_linears
from ..tensor_parallel.linear import ColumnParallelLinear, updated


@dataclass(frozen=True)
class HeadGroups:
    """Groups of heads, and those of them that one rank of the tensor axis computes.

    Attributes:
        total: number of groups of the whole layer.
        count: number of groups that this rank computes.
        held: range of these groups, if each rank holds the weights of all groups; None: the tensor axis shards them.
        of_heads: for each of this rank's heads the number of its group within the range; None: neighboring heads share
            a group, equally many each.
    """

    total: int
    count: int
    held: slice | None = None
    of_heads: list[int] | None = None

    @classmethod
    def on(cls, axis: Axis, heads: int, groups: int, name: str = "groups") -> HeadGroups:
        """Return the groups of a rank.

        Args:
            axis: the tensor axis.
            heads: number of heads of the whole layer.
            groups: number of groups, which divides ``heads``.
            name: name of this number in the error.

        Raises:
            ValueError: ``groups`` does not divide ``heads``.
        """
        if groups < 1 or heads % groups:
            raise ValueError(f"{name}={groups} does not divide heads={heads}. Give a divisor of {heads}.")
        if groups % axis.size == 0:
            return cls(groups, groups // axis.size)
        start, stop = split(heads, axis.size, axis.rank)
        size = heads // groups
        first, last = start // size, (stop - 1) // size + 1
        numbers = [head // size - first for head in range(start, stop)]
        share, rest = divmod(stop - start, last - first)
        regular = not rest and numbers == [head // share for head in range(stop - start)]
        return cls(groups, last - first, slice(first, last), None if regular else numbers)

    def projection(
        self, width: int, dim: int, *, grid: Grid, sequence_parallel: bool, **how: Any
    ) -> ColumnParallelLinear | WholeKV:
        """Make the projection to two vectors of each group, (2 G dim, D): all first ones, then all second ones.

        Args:
            width: D, the width of the input.
            dim: width of a vector.
            grid, sequence_parallel: as for ``ColumnParallelLinear``.
            how: bias, init and bias_init.
        """
        if self.held is not None:
            return WholeKV(width, self.total, dim, self.held, sequence_parallel, grid=grid, **how)
        parts = (self.total * dim,) * 2
        common: dict[str, Any] = {"grid": grid, "sequence_parallel": sequence_parallel, **how}
        return ColumnParallelLinear(width, sum(parts), parts=parts, unit=dim, **common)

    def for_heads(self, dim: int, *vectors: Tensor) -> tuple[Tensor, ...]:
        """Return tensors with a vector for each head along ``dim`` where heads share groups irregularly; else as given.

        Args:
            dim: the dim that counts the groups.
            vectors: the tensors.
        """
        if self.of_heads is None:
            return vectors
        index = torch.tensor(self.of_heads, device=vectors[0].device)
        return tuple(x.index_select(dim, index) for x in vectors)


class WholeKV(Adaptable, nn.Module):
    """Projection to two vectors of each group, replicated on every rank because the tensor axis does not divide them.

    Args:
        width: D, the width of the input.
        groups: G, the number of groups of the whole layer, such as key/value heads.
        dim: width of each vector.
        held: range of the groups that this rank's heads use.
        sequence_parallel: the input is this rank's shard of the sequence, which the caller gathers.
        bias: add a bias.
        grid: grid over whose tensor axis the gradients are summed.
        init, bias_init: distributions of the initial weight and bias.

    Attributes:
        weight: (2 G dim, D): the rows of all first vectors (keys), then of all second ones (values).
        bias: (2 G dim,), or None.
    """

    def __init__(
        self,
        width: int,
        groups: int,
        dim: int,
        held: slice,
        sequence_parallel: bool,
        *,
        grid: Grid,
        bias: bool,
        init: Distribution,
        bias_init: Distribution,
    ) -> None:
        super().__init__()
        self.heads, self.head_dim, self.sequence_parallel = held, dim, sequence_parallel
        self.rows = slice(held.start * dim, held.stop * dim)  # of the first vectors, and of the second ones
        rows, partial = 2 * groups * dim, grid.tensor.size > 1
        self.weight = sharded_parameter(Layout((rows, width), partial=partial), init, rank=0, size=1)
        self.bias = sharded_parameter(Layout((rows,), partial=partial), bias_init, rank=0, size=1) if bias else None

    def used(self) -> tuple[Tensor, Tensor | None]:
        """Return the rows of weight and bias of this rank's n groups: (2 n dim, D) and (2 n dim,), or None."""
        return self.selected(self.weight), None if self.bias is None else self.selected(self.bias)

    def selected(self, x: Tensor) -> Tensor:
        """Return the rows of this rank's groups, of the first and then of the second vectors, of (2 G dim, ...)."""
        by_heads = rearrange(x, "(two heads dim) ... -> two heads dim ...", two=2, dim=self.head_dim)
        return rearrange(by_heads[:, self.heads], "two heads dim ... -> (two heads dim) ...")


def project_together(
    x: Tensor, layers: Sequence[ColumnParallelLinear | WholeKV], axis: Axis, sequence_parallel: bool
) -> tuple[Tensor, ...]:
    """Run several projections of one input, which is gathered, and whose gradient is reduced, once for all of them."""
    pairs = [layer.used() if isinstance(layer, WholeKV) else (layer.weight, layer.bias) for layer in layers]
    outputs = column_linears(x, pairs, axis, sequence_parallel)
    return tuple(updated(layer, y, x, bias) for layer, y, (_, bias) in zip(layers, outputs, pairs, strict=True))
