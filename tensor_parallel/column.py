"""Matrix product of column-parallel layers, with collectives that overlap the computation of the weight gradients.

Shoeybi et al. 2019, arXiv:1909.08053, section 3; from sequence shards, Korthikanti et al. 2022, arXiv:2205.05198,
section 4.2.2. Backward, in this order on every rank:

    whole input                       sequence shards
                                      start gathering x again
    dx = dy W                         dx = dy W
    start all-reducing dx             start reduce-scattering dx
                                      wait for x
    dW = dy^T x, db = sum dy          dW = dy^T x, db = sum dy
    wait for dx                       wait for dx

The forward pass saves the input as it was given, which under sequence parallelism is the shard. Several layers may have
a common input (for example queries and key/values). It is then gathered once, and its gradient is reduced once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ..base.autograd import cast, product_dtype
from ..base.deferred import Deferred
from ..base.torch_private import base_of, reshaped
from ..base.uncompiled import uncompiled
from ..grid.comm.axis import Axis
from ..grid.comm.regions import begin, border

Weights = Sequence[tuple[Tensor, Tensor | None]]  # (n, K) and (n,) of each layer, this rank's


class _ColumnLinears:
    __name__ = "column_linears"

    def __call__(self, x: Tensor, weights: Weights, axis: Axis, sequence_parallel: bool = False) -> list[Tensor]:
        """Compute ``F.linear(x, weight, bias)`` for several column-parallel layers that share the input x.

        A ``TorchFunctionMode`` intercepts this call, as it intercepts ``F.linear``, and may call ``deferred`` instead.

        Args:
            x: (..., K), equal on every rank; with ``sequence_parallel``, this rank's shard of dim 1, (B, T / t, K).
            weights: for each layer, this rank's shard of the weight, (n, K), and of the bias, (n,) or None.
            axis: the ranks that shard the outputs.
            sequence_parallel: gather x along dim 1 before the product.

        Returns:
            The outputs of each layer, (..., n); with ``sequence_parallel``, (B, T, n).

        Raises:
            ValueError: with ``sequence_parallel``, x has fewer than three dims.
        """
        if axis.size == 1:
            return [F.linear(x, weight, bias) for weight, bias in weights]
        if sequence_parallel and x.dim() < 3:
            raise ValueError(f"the input has shape {tuple(x.shape)}, but sequence parallelism needs (B, T / t, K).")
        tensors = [x, *(tensor for tensor in chain(*weights) if tensor is not None)]
        if has_torch_function(tensors):
            outs: list[Tensor] = handle_torch_function(self, tensors, x, weights, axis, sequence_parallel)
            return outs
        if not (torch.is_grad_enabled() or sequence_parallel or product_dtype(x) is not None):
            return [F.linear(x, weight, bias) for weight, bias in weights]  # in generation each microsecond counts
        return _products(x, axis, sequence_parallel, [None] * len(weights), weights)

    def deferred(
        self, later: Deferred, x: Tensor, weights: Weights, axis: Axis, sequence_parallel: bool
    ) -> list[Tensor] | None:
        """Compute the outputs as ``__call__`` does, but queue the weight gradients in ``later``.

        Returns None, without a computation, if no weight gradient may be deferred.
        """
        laters = [later if later.takes(x, *pair) else None for pair in weights]
        if not any(laters):
            return None
        return _products(x, axis, sequence_parallel, laters, weights)


column_linears = _ColumnLinears()


def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, sequence_parallel: bool = False
) -> Tensor:
    """Compute ``F.linear`` of one column-parallel layer; arguments as for ``column_linears``."""
    return column_linears(x, [(weight, bias)], axis, sequence_parallel)[0]


@uncompiled
def _products(
    x: Tensor, axis: Axis, sequence_parallel: bool, laters: Sequence[Deferred | None], weights: Weights
) -> list[Tensor]:
    # Under autocast the input is cast before it travels: half the bytes, and its gradient's too.
    dtype = product_dtype(x)
    return list(_Products.apply(cast(x, dtype), axis, sequence_parallel, laters, dtype, *chain(*weights)))


class _Products(torch.autograd.Function):
    """Autograd function y = enter(x) W^T + b for each of several layers with the same input.

    ``enter`` is f (a copy) or, under sequence parallelism, g (a gather). If ``dtype`` is given, the weights are cast to
    it in the forward and again in the backward pass, so that only the weights themselves are saved and not the casts.
    """

    @staticmethod
    def forward(
        x: Tensor,
        axis: Axis,
        sequence_parallel: bool,
        laters: Sequence[Deferred | None],
        dtype: torch.dtype | None,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        gathered = begin("gather", x, axis, 1)() if sequence_parallel else x
        narrow = [cast(weight, dtype) for weight in weights]
        return tuple(_product(gathered, weight, bias) for weight, bias in zip(narrow[::2], narrow[1::2]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, ctx.axis, ctx.sequence_parallel, ctx.laters, ctx.dtype, *weights = inputs
        # Where to put gradients: not the saved weights, for a checkpoint, or another hook, hands back copies of those.
        ctx.pairs = [pair if later else None for pair, later in zip(zip(weights[::2], weights[1::2]), ctx.laters)]
        ctx.save_for_backward(x, *weights[::2])
        ctx.set_materialize_grads(len(output) > 1)  # without a gradient of the one output there is none of anything

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> tuple[Tensor | None, ...]:
        if dys[0] is None:
            return (None,) * len(ctx.needs_input_grad)
        (x, *saved), axis = ctx.saved_tensors, ctx.axis
        weights = [cast(weight, ctx.dtype) for weight in saved]
        needs_x, _, _, _, _, *needs = ctx.needs_input_grad
        enter, leave = ("gather", "reduce_scatter") if ctx.sequence_parallel else ("copy", "all_reduce")
        if torch.is_grad_enabled():  # to be differentiated again: differentiable steps, without overlap
            dx = border(leave, enter, _dx(dys, weights), axis, 1) if needs_x else None
            gathered = border(enter, leave, x, axis, 1) if any(needs[::2]) else None
            return dx, None, None, None, None, *_dweights(dys, gathered, needs)

        x = x.detach()
        again = cache(lambda: begin(enter, x, axis, 1)())  # once for all layers that defer their gradient
        for i, later in enumerate(ctx.laters):
            if later is not None and later.active:
                later.add_linear(*ctx.pairs[i], dys[i], again)
                needs[2 * i : 2 * i + 2] = False, False
        whole_x = begin(enter, x, axis, 1) if any(needs[::2]) else None
        whole_dx = begin(leave, _dx(dys, weights), axis, 1, ours=True) if needs_x else None
        dweights = _dweights(dys, None if whole_x is None else whole_x(), needs)
        return None if whole_dx is None else whole_dx(), None, None, None, None, *dweights


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``F.linear`` into a tensor that is no view.

    ``F.linear`` with a bias may return a view, and torch forbids in-place changes of views that an autograd function
    returns.
    """
    y = F.linear(x, weight, bias)
    base = base_of(y)
    product: Tensor = y if base is None else reshaped(base, y.shape)
    return product


def _dx(dys: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Return the gradient of the shared input, which is the sum of dy W over the layers: (..., K)."""
    total = _rows(dys[0]) @ weights[0]
    for dy, weight in zip(dys[1:], weights[1:]):
        total = torch.addmm(total, _rows(dy), weight)
    return total.view(*dys[0].shape[:-1], weights[0].shape[1])


def _dweights(dys: Sequence[Tensor], x: Tensor | None, needs: Sequence[bool]) -> list[Tensor | None]:
    """Return dW = dy^T x and db = sum dy of each layer, with None for gradients that are not needed."""
    gradients: list[Tensor | None] = []
    for dy, needs_weight, needs_bias in zip(dys, needs[::2], needs[1::2]):
        gradients.append(_rows(dy).T @ _rows(x) if needs_weight and x is not None else None)
        gradients.append(_rows(dy).sum(0) if needs_bias else None)
    return gradients


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
