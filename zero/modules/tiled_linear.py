"""Linear layers in tiles: in stage 3 the weights of one tile at a time are gathered, not the whole layer's.

y[rows i] = sum over j of x[columns j] W[i, j]^T, and the bias of the rows in the last of these products.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class TiledLinear(nn.Module):
    """Linear layer whose weight is cut into tiles, each a linear layer and, in stage 3 of ZeRO, a unit of its own.

    Args:
        in_features, out_features, bias: as in ``nn.Linear``.
        in_splits, out_splits: number of tiles along the inputs and along the outputs.
        input_is_already_split: the input is a list of tensors, one for each of ``in_splits``.
        combine_out_splits: return one tensor; False: a list of tensors, one for each of ``out_splits``.
        linear_cls: class of a tile, called as ``linear_cls(columns, rows, bias=..., **kwargs)``.
        init_linear: layer whose weight and bias are copied; None: each tile draws its own.
        kwargs: further arguments of ``linear_cls``.

    Attributes:
        linears: tiles, by place along the outputs and then along the inputs.
        in_parts, out_parts: bounds of the tiles along the inputs and along the outputs.

    Raises:
        RuntimeError: more tiles than features, or fewer than one.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, splits, features in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= features:
                raise RuntimeError(
                    f"{name}_splits is {splits}, but {name}_features is {features}: give 1 to {features} tiles"
                )
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_parts, self.out_parts = _bounds(in_features, in_splits), _bounds(out_features, out_splits)
        columns, rows = _sizes(self.in_parts), _sizes(self.out_parts)
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(size, height, bias=bias and j == in_splits - 1, **kwargs) for j, size in enumerate(columns)
            )
            for height in rows
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, x: Tensor | Sequence[Tensor]) -> Any:
        """Return the product (..., in_features) -> (..., out_features)."""
        parts = x.split(_sizes(self.in_parts), dim=-1) if isinstance(x, Tensor) else x
        return self._combined([self._sum(row, parts) for row in self.linears])

    def copy_params_from(self, other: nn.Module) -> None:
        """Copy the weight and the bias of an untiled layer. In stage 3 both must be gathered.

        Raises:
            ValueError: the layer has another shape, or one of the two has no bias.
        """
        weight: Any = other.weight
        if weight.shape != (self.out_features, self.in_features) or (other.bias is not None) != self.use_bias:
            raise ValueError(
                f"the layer has a weight of {tuple(weight.shape)} and {'no' if other.bias is None else 'a'} bias, and "
                f"the tiles have ({self.out_features}, {self.in_features}) and {'a' if self.use_bias else 'no'} bias: "
                "give a layer of the same shape"
            )
        with torch.no_grad():
            for row, top, bottom in zip(self.linears, self.out_parts, self.out_parts[1:], strict=False):
                for tile, left, right in zip(row, self.in_parts, self.in_parts[1:], strict=False):  # type: ignore[call-overload]
                    tile.weight.copy_(weight[top:bottom, left:right])
                    if tile.bias is not None:
                        tile.bias.copy_(other.bias[top:bottom])  # type: ignore[index]

    def _sum(self, row: Any, parts: Sequence[Tensor]) -> Any:
        y = row[0](parts[0])
        for tile, part in zip(row[1:], parts[1:], strict=True):
            y = y + tile(part)
        return y

    def _combined(self, rows: list[Any]) -> Any:
        return torch.cat(rows, dim=-1) if self.combine_out_splits else rows


class TiledLinearReturnBias(TiledLinear):
    """``TiledLinear`` of tiles that return ``(y, bias)`` and leave the addition to their caller."""

    def _sum(self, row: Any, parts: Sequence[Tensor]) -> Any:
        y, bias = row[0](parts[0])
        for tile, part in zip(row[1:], parts[1:], strict=True):
            more, bias = tile(part)
            y = y + more
        return y, bias

    def _combined(self, rows: list[Any]) -> Any:
        outputs = super()._combined([y for y, _ in rows])
        return outputs, super()._combined([bias for _, bias in rows]) if self.use_bias else None


def _bounds(features: int, splits: int) -> list[int]:
    return [features * i // splits for i in range(splits + 1)]


def _sizes(bounds: Sequence[int]) -> list[int]:
    return [high - low for low, high in itertools.pairwise(bounds)]
