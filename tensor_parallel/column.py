"""The product of column-parallel layers, its collectives overlapped with its weight gradients.

Shoeybi et al. 2019, arXiv:1909.08053, section 3; from sequence shards, Korthikanti et al. 2022, arXiv:2205.05198,
section 4.2.2. Backward, in this order on every rank:

    whole input                       sequence shards
                                      start gathering x again
    dx = dy W                         dx = dy W
    start all-reducing dx             start reduce-scattering dx
                                      wait for x
    dW = dy^T x, db = sum dy          dW = dy^T x, db = sum dy
    wait for dx                       wait for dx

What is kept from the forward is the input as it came: under sequence parallelism the shard. Several layers may share
an input (queries, and keys with values): it is gathered once, and its gradient reduced once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ..grid.autocast import cast, product_dtype
from ..grid.axis import Axis
from .regions import begin, border

__all__ = ["column_linear", "column_linears"]

Weights = Sequence[tuple[Tensor, Tensor | None]]  # (n, K) and (n,) of each layer, this rank's


class Later(Protocol):
    """Where a split backward (of whoever runs the model) puts weight gradients off to.

    Attributes:
        collects: whether the pass that does so runs now.
    """

    collects: bool

    def takes(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether this product's weight gradient may wait."""

    def add_linear(self, weight: Tensor, bias: Tensor | None, dy: Tensor, x: Callable[[], Tensor]) -> None:
        """Queue dW = dy^T x and db = sum dy; ``x`` is called when they are computed."""


class _ColumnLinears:
    __name__ = "column_linears"

    def __call__(self, x: Tensor, weights: Weights, axis: Axis, sequence_parallel: bool = False) -> list[Tensor]:
        """``F.linear`` of an input that every rank multiplies by weights of its own, for each of some layers.

        A ``TorchFunctionMode`` sees this call, as it sees ``F.linear``, and may make ``deferred`` of it.

        Args:
            x: (..., K), the same on every rank; with ``sequence_parallel`` (B, T / t, K), a shard of dim 1.
            weights: of each layer (n, K), and (n,) or None: this rank's.
            axis: the ranks that share the outputs.
            sequence_parallel: gather x along dim 1 first.

        Returns:
            For each layer (..., n), or (B, T, n).

        Raises:
            ValueError: with ``sequence_parallel``, x has no dim 1 beside its last.
        """
        if axis.size == 1:
            return [F.linear(x, weight, bias) for weight, bias in weights]
        if sequence_parallel and x.dim() < 3:
            raise ValueError(f"sequence parallelism takes shards (B, T / t, K) of dim 1, and not {tuple(x.shape)}")
        tensors = [x, *(tensor for tensor in chain(*weights) if tensor is not None)]
        if has_torch_function(tensors):
            outs: list[Tensor] = handle_torch_function(self, tensors, x, weights, axis, sequence_parallel)
            return outs
        return _products(x, axis, sequence_parallel, [None] * len(weights), weights)

    def deferred(
        self, later: Later, x: Tensor, weights: Weights, axis: Axis, sequence_parallel: bool
    ) -> list[Tensor] | None:
        """The same, weight gradients put off into ``later``; None where none of them may be."""
        laters = [later if later.takes(x, *pair) else None for pair in weights]
        if not any(laters):
            return None
        return _products(x, axis, sequence_parallel, laters, weights)


column_linears = _ColumnLinears()


def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, sequence_parallel: bool = False
) -> Tensor:
    """``column_linears`` of one layer."""
    return column_linears(x, [(weight, bias)], axis, sequence_parallel)[0]


def _products(
    x: Tensor, axis: Axis, sequence_parallel: bool, laters: Sequence[Later | None], weights: Weights
) -> list[Tensor]:
    # Under autocast the input is cast before it travels: half the bytes, and its gradient's too.
    dtype = product_dtype(x)
    return list(_Products.apply(cast(x, dtype), axis, sequence_parallel, laters, dtype, *chain(*weights)))


class _Products(torch.autograd.Function):
    """y = enter(x) W^T + b for each W and b, where ``enter`` is f (a copy) or g (a gather).

    Weights are cast to ``dtype``, if there is one, here and in the backward pass: what is kept is the weights.
    """

    @staticmethod
    def forward(
        x: Tensor,
        axis: Axis,
        sequence_parallel: bool,
        laters: Sequence[Later | None],
        dtype: torch.dtype | None,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        whole = begin("gather", x, axis, 1)() if sequence_parallel else x
        narrow = [cast(weight, dtype) for weight in weights]
        return tuple(_product(whole, weight, bias) for weight, bias in zip(narrow[::2], narrow[1::2]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, ctx.axis, ctx.sequence_parallel, ctx.laters, ctx.dtype, *weights = inputs
        # Where to put gradients: not the saved weights, for a checkpoint, or another hook, hands back copies of those.
        ctx.pairs = [pair if later else None for pair, later in zip(zip(weights[::2], weights[1::2]), ctx.laters)]
        ctx.save_for_backward(x, *weights[::2])

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        (x, *saved), axis = ctx.saved_tensors, ctx.axis
        weights = [cast(weight, ctx.dtype) for weight in saved]
        needs_x, _, _, _, _, *needs = ctx.needs_input_grad
        enter, leave = ("gather", "reduce_scatter") if ctx.sequence_parallel else ("copy", "all_reduce")
        if torch.is_grad_enabled():  # to be differentiated again: the same in differentiable steps, none overlapped
            dx = border(leave, enter, _dx(dys, weights), axis, 1) if needs_x else None
            whole = border(enter, leave, x, axis, 1) if any(needs[::2]) else None
            return dx, None, None, None, None, *_dweights(dys, whole, needs)

        x = x.detach()
        again = cache(lambda: begin(enter, x, axis, 1)())  # once for all layers that put it off
        for i, later in enumerate(ctx.laters):
            if later is not None and later.collects:
                later.add_linear(*ctx.pairs[i], dys[i], again)
                needs[2 * i : 2 * i + 2] = False, False
        whole_x = begin(enter, x, axis, 1) if any(needs[::2]) else None
        whole_dx = begin(leave, _dx(dys, weights), axis, 1, ours=True) if needs_x else None
        dweights = _dweights(dys, None if whole_x is None else whole_x(), needs)
        return None if whole_dx is None else whole_dx(), None, None, None, None, *dweights


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear``, but never a view, as it may return with a bias: a function's views refuse in-place changes."""
    y = F.linear(x, weight, bias)
    whole: Tensor = y if y._base is None else torch.ops.aten._unsafe_view(y._base, y.shape)
    return whole


def _dx(dys: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The sum of dy W over the layers: (..., K)."""
    total = _rows(dys[0]) @ weights[0]
    for dy, weight in zip(dys[1:], weights[1:]):
        total = torch.addmm(total, _rows(dy), weight)
    return total.view(*dys[0].shape[:-1], weights[0].shape[1])


def _dweights(dys: Sequence[Tensor], x: Tensor | None, needs: Sequence[bool]) -> list[Tensor | None]:
    """dy^T x and sum dy of each layer, where they are needed."""
    found: list[Tensor | None] = []
    for dy, needs_weight, needs_bias in zip(dys, needs[::2], needs[1::2]):
        found.append(_rows(dy).T @ _rows(x) if needs_weight and x is not None else None)
        found.append(_rows(dy).sum(0) if needs_bias else None)
    return found


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
