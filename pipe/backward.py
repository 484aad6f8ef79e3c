"""Split backward for zero-bubble schedules (Qi et al. 2023, arXiv:2401.10241): the weight gradient comes later.

While a stage runs forward under ``SplitBackward``, each linear, convolution and embedding whose weight is a leaf
becomes a node that, in the backward pass, returns the gradient of its input and queues the tensors that its weight
gradient needs: its input and the gradient of its output. ``Deferred.run`` computes the queued weight gradients. All
other tensors that the backward pass keeps are freed by then.

It works at torch's function calls (``F.linear``, ``F.conv2d``, ``F.embedding``, ...), so for any module made of torch's
layers. Another function that ``torch.overrides`` sees can define its own split by an attribute ``deferred``: the same
function with the queue as first argument (column-parallel products do, since their backward has collectives). A
weight that is used in another way (``x @ weight``, in a recurrent layer or ``nn.MultiheadAttention``, under a
transform of ``torch.func``, or computed from other tensors) or that has hooks gets its gradient at once: it is correct,
only not deferred.

Under autocast a product's node casts as autocast does, in both halves. It keeps the weight uncast and casts it
again in the backward pass: autograd would keep a low-precision copy of every weight for every microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..base.autograd import cast, product_dtype
from ..base.deferred import Deferred, rows
from ..base.torch_private import base_of, function_mode, without_function_mode


class SplitBackward(TorchFunctionMode):
    """Function mode in which linears, convolutions and embeddings queue their weight gradients in ``deferred``."""

    def __init__(self, deferred: Deferred) -> None:
        super().__init__()
        self.deferred = deferred

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        split = _SPLIT.get(func) or getattr(func, "deferred", None)
        if split is not None:
            result = split(self.deferred, *args, **kwargs)
            if result is not None:
                return result
        return func(*args, **kwargs)


@contextmanager
def deferring(deferred: Deferred) -> Iterator[None]:
    """Return the context of a stage's backward pass. Layers that it recomputes are split as in the forward."""
    deferred.active = True
    try:
        with SplitBackward(deferred):
            yield
    finally:
        deferred.active = False


@contextmanager
def unsplit() -> Iterator[None]:
    """Return a context in which no backward is split, for use within the contexts of ``SplitBackward``."""
    with ExitStack() as stack:
        while isinstance(function_mode(), SplitBackward):
            stack.enter_context(without_function_mode())
        yield


def _linear(deferred: Deferred, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    if weight.dim() != 2 or not deferred.takes(input, weight, bias):
        return None
    dtype = product_dtype(input)
    x = cast(input, dtype)
    if not x.is_contiguous() and x.dim() > 1:
        # As F.linear does: where rows cannot be viewed, it keeps its copy of them, and the caller may change the input.
        x = rows(x).unflatten(0, x.shape[:-1])
    return _SplitLinear.apply(deferred, x, weight, bias, dtype)


def _embedding(
    deferred: Deferred,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    if max_norm is not None or scale_grad_by_freq or sparse or not deferred.takes(weight, weight, None):
        return None
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    return _SplitEmbedding.apply(deferred, input, weight, padding_idx)


def _convolution(dims: int, transposed: bool) -> Callable[..., Tensor | None]:
    def split(
        deferred: Deferred,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        *rest: Any,
        **named: Any,
    ) -> Tensor | None:
        # (…, dilation, groups), or for a transposed one (…, output_padding, groups, dilation).
        order = ("output_padding", "groups", "dilation") if transposed else ("dilation", "groups")
        options = {"output_padding": 0, "groups": 1, "dilation": 1} | dict(zip(order, rest, strict=False)) | named
        if isinstance(padding, str) or input.dim() != dims + 2 or not deferred.takes(input, weight, bias):
            return None
        shape = [_each(value, dims) for value in (stride, padding, options["dilation"])]
        extra = _each(options["output_padding"], dims)
        geometry = (*shape, transposed, extra, options["groups"])
        dtype = product_dtype(input)
        return _SplitConvolution.apply(deferred, cast(input, dtype), weight, bias, geometry, dtype)

    return split


_SPLIT: dict[Any, Callable[..., Tensor | None]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    F.conv1d: _convolution(1, False),
    F.conv2d: _convolution(2, False),
    F.conv3d: _convolution(3, False),
    F.conv_transpose1d: _convolution(1, True),
    F.conv_transpose2d: _convolution(2, True),
    F.conv_transpose3d: _convolution(3, True),
}


# Each node keeps its parameter beside the saved tensors: a checkpoint, or any other hook on saved tensors, returns a
# copy, which does not require a gradient.


class _SplitLinear(torch.autograd.Function):
    """Linear layer y = x Wᵀ + b that computes dx = dy W at once and defers dW = dyᵀ x and db = Σ dy."""

    @staticmethod
    def forward(
        ctx: Any, deferred: Deferred, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None
    ) -> Tensor:
        ctx.set_materialize_grads(False)  # without a gradient of y there is none of W either
        ctx.save_for_backward(x, weight)
        ctx.deferred, ctx.parameter, ctx.bias, ctx.dtype = deferred, weight, bias, dtype
        y = F.linear(x, cast(weight, dtype), cast(bias, dtype))
        # With a bias it may be a view, and a function's views refuse in-place changes. ``data`` is none.
        return y if base_of(y) is None else y.data

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> Any:
        if dy is None:
            return (None,) * 5
        x, weight = ctx.saved_tensors
        dx = dy @ cast(weight, ctx.dtype) if ctx.needs_input_grad[1] else None
        if not ctx.deferred.active:
            gradients = rows(dy)
            dweight = gradients.T @ rows(x) if ctx.needs_input_grad[2] else None
            return None, dx, dweight, gradients.sum(0) if ctx.needs_input_grad[3] else None, None
        x = x.detach()
        ctx.deferred.add_linear(ctx.parameter, ctx.bias, dy, lambda: x)
        return None, dx, None, None, None


class _SplitEmbedding(torch.autograd.Function):
    """Embedding lookup of rows of W, whose gradients are added to dW later (deferred)."""

    @staticmethod
    def forward(ctx: Any, deferred: Deferred, ids: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(ids, weight)
        ctx.deferred, ctx.parameter, ctx.padding_idx = deferred, weight, padding_idx
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> Any:
        if dy is None:
            return (None,) * 4
        ids, weight = ctx.saved_tensors
        padding_idx = ctx.padding_idx
        if not ctx.deferred.active:
            padding = -1 if padding_idx is None else padding_idx
            dweight = torch.ops.aten.embedding_dense_backward(dy, ids, weight.shape[0], padding, False)
            return None, None, dweight, None

        def accumulate(into: Tensor) -> None:
            tokens, gradients = ids.reshape(-1), rows(dy)
            if padding_idx is not None:
                gradients = gradients.masked_fill((tokens == padding_idx)[:, None], 0.0)
            into.index_add_(0, tokens, gradients.to(into.dtype))

        ctx.deferred.add(ctx.parameter, accumulate)
        return None, None, None, None


class _SplitConvolution(torch.autograd.Function):
    """Convolution of 1 to 3 dims, transposed or not, whose weight gradient is deferred.

    torch's own convolution backward is called twice: once for the input's gradient and once for the weight's.
    """

    @staticmethod
    def forward(
        ctx: Any,
        deferred: Deferred,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        geometry: Any,
        dtype: torch.dtype | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        ctx.deferred, ctx.parameter, ctx.bias, ctx.geometry, ctx.dtype = deferred, weight, bias, geometry, dtype
        return torch.ops.aten.convolution(x, cast(weight, dtype), cast(bias, dtype), *geometry)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> Any:
        if dy is None:
            return (None,) * 6
        x, weight = ctx.saved_tensors
        bias, geometry, weight = ctx.bias, ctx.geometry, cast(weight, ctx.dtype)
        sizes = None if bias is None else list(bias.shape)
        halves = torch.ops.aten.convolution_backward
        if not ctx.deferred.active:
            return None, *halves(dy, x, weight, sizes, *geometry, list(ctx.needs_input_grad[1:4])), None, None

        x = x.detach()
        if ctx.parameter.requires_grad:
            shape, dtype, device = weight.shape, weight.dtype, weight.device

            def accumulate(into: Tensor) -> None:
                # Only its shape is read, and in stage 3 of ZeRO the weight itself is released by now.
                like = torch.empty(shape, dtype=dtype, device=device)
                into.add_(halves(dy, x, like, sizes, *geometry, [False, True, False])[1])

            ctx.deferred.add(ctx.parameter, accumulate)
        if bias is not None and bias.requires_grad:
            dims = [dim for dim in range(dy.dim()) if dim != 1]
            ctx.deferred.add(bias, lambda into: into.add_(dy.sum(dims)))
        dx = None
        if ctx.needs_input_grad[1]:
            dx = halves(dy, x, weight, sizes, *geometry, [True, False, False])[0]
        return None, dx, None, None, None, None


def _each(value: Any, dims: int) -> list[int]:
    values = [int(v) for v in value] if isinstance(value, (tuple, list)) else [int(value)]
    return values * dims if len(values) == 1 else values
