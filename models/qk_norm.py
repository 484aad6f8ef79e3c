"""Norms of the queries and of the keys: over each head, over all heads together, or with a weight for each head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..grid import Grid
from ..grid.layout import Layout
from ..grid.randomness.random import Constant, sharded_parameter
from ..tensor_parallel.norm import sharded_rms_norm
from .attention_options import AttentionOptions
from .head_groups import HeadGroups


def qk_norms(options: AttentionOptions, heads: int, dim: int, keys: HeadGroups, grid: Grid) -> list[nn.Module]:
    """Make the norms of the queries and of the keys of a layer; [] without ``options.qk_norm``.

    Args:
        options: the layer's options.
        heads: H, the number of query heads of the whole layer.
        dim: width of a head.
        keys: the key/value heads.
        grid: grid whose tensor axis shards the heads.

    Raises:
        ValueError: the norm is over all heads, and the tensor axis does not divide the key/value heads.
    """
    epsilon, tensor = options.qk_norm, grid.tensor.size
    if epsilon is None:
        return []
    if options.norm_all_heads:
        if keys.total % tensor:
            raise ValueError(
                f"kv_heads={keys.total} is not a multiple of tensor={tensor}, but a norm of all heads of the keys "
                "needs each head on one rank. Give a tensor axis whose size divides it."
            )
        return [AllHeadsRMSNorm(count, dim, epsilon, grid=grid) for count in (heads, keys.total)]
    if options.norm_per_head:
        queries = PerHeadLayerNorm(heads, dim, epsilon, grid=grid)
        return [queries, PerHeadLayerNorm(keys.total, dim, epsilon, keys.held, grid=grid)]
    # A rank's gradient comes from its own heads alone: partial, as a norm's on sequence shards.
    return [options.norm(dim, epsilon, grid=grid, sequence_parallel=True) for _ in range(2)]


class AllHeadsRMSNorm(nn.Module):
    """RMSNorm over all heads together, which are sharded over the tensor axis: (B, heads, T, dim), unchanged in shape.

    Args:
        heads: H, the number of heads of the whole layer.
        head_dim: dim, the width of each head.
        eps: constant that is added to the mean of the squares.
        grid: grid whose tensor axis shards the heads.

    Attributes:
        weight: (H dim,), sharded by heads, with initial values 1.
    """

    def __init__(self, heads: int, head_dim: int, eps: float, *, grid: Grid) -> None:
        super().__init__()
        self.axis, self.width, self.eps = grid.tensor, heads * head_dim, eps
        layout = Layout((self.width,), shard_dim=0, unit=head_dim)
        self.weight = sharded_parameter(layout, Constant(1.0), self.axis.rank, self.axis.size)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize this rank's heads."""
        weight = self.weight.view(-1, 1, x.shape[3])
        return sharded_rms_norm(x, weight, (1, 3), self.width, self.eps, self.axis)


class PerHeadLayerNorm(nn.Module):
    """LayerNorm without a bias over each head, which has a weight of its own: (B, heads, T, dim), unchanged in shape.

    Args:
        heads: H, the number of heads of the whole layer.
        head_dim: dim, the width of each head.
        eps: constant that is added to the variance.
        used: the heads of this rank, if the weight is to be whole on every rank, as that of ``WholeKV``; None: the
            tensor axis shards the heads.
        grid: grid whose tensor axis shards the heads.

    Attributes:
        weight: (H, dim), sharded by heads or whole, with initial values 1.
    """

    def __init__(self, heads: int, head_dim: int, eps: float, used: slice | None = None, *, grid: Grid) -> None:
        super().__init__()
        self.eps, self.used, shape = eps, used, (heads, head_dim)
        if used is None:
            layout, shard = Layout(shape, shard_dim=0), (grid.tensor.rank, grid.tensor.size)
        else:
            layout, shard = Layout(shape, partial=True), (0, 1)
        self.weight = sharded_parameter(layout, Constant(1.0), *shard)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize this rank's heads."""
        weight, kind = self.weight if self.used is None else self.weight[self.used], x.dtype
        wide = torch.promote_types(kind, torch.float32)
        return (F.layer_norm(x.to(wide), x.shape[-1:], eps=self.eps) * weight[:, None].to(wide)).to(kind)
