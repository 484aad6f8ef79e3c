"""Grouped product: the rows of each expert times the expert's matrix, in one function; and two products as an MLP.

Rows lie one expert after the other. Each function is one node of the autograd graph, so an expert without a row takes
part like the others, and its gradient is zero. The split backward of zero-bubble schedules intercepts them, as it
intercepts ``F.linear``.

Experts that this rank borrows (``lending.py``) come behind its own. Their weights are copied in the forward pass and
again in the backward pass. Their gradients are computed and sent with those of the rows, also under a split backward,
since ranks may run what is deferred in different orders: the owner defers the addition to its own gradients alone.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ..base.autograd import cast, product_dtype
from ..base.deferred import Deferred
from .lending import Loan

_ALIGNED = 16  # bytes: torch's grouped kernels need row lengths that are multiples of it


class Groups:
    """Numbers of rows of each expert.

    Args:
        counts: (E,) int64, on the device of the rows.
        lengths: the same numbers, if they are known on the host already.
        loan: exchange of the weights of borrowed experts, which are the last ones here. None: experts are not lent.
    """

    def __init__(self, counts: Tensor, lengths: list[int] | None = None, loan: Loan | None = None) -> None:
        self.counts, self.loan = counts, loan
        self._lengths = lengths

    @property
    def lengths(self) -> list[int]:
        """Numbers of rows on the host. On a GPU the first call waits for the device."""
        if self._lengths is None:
            self._lengths = self.counts.tolist()
        return self._lengths

    @property
    def ends(self) -> Tensor:
        """End of each expert's rows, (E,) int32 on the device, as torch's grouped product takes it."""
        return self.counts.cumsum(0).to(torch.int32)

    def parts(self) -> list[tuple[slice, Groups]]:
        """Return the rows of this rank's own experts and, if experts are lent, those of the borrowed ones."""
        if self.loan is None:
            return [(slice(None), self)]
        own, lengths = self.loan.own, self.lengths
        end = sum(lengths[:own])
        mine, borrowed = Groups(self.counts[:own], lengths[:own]), Groups(self.counts[own:], lengths[own:])
        return [(slice(end), mine), (slice(end, None), borrowed)]

    def weights(self, weight: Tensor) -> list[Tensor]:
        """Return the weights of each part: (E, ...) each. If experts are lent, collective over the expert axis."""
        return [weight] if self.loan is None else [weight, self.loan.borrow(weight)]

    def pieces(self, whole: bool) -> list[tuple[slice, int, slice, Groups]]:
        """Return ranges of rows that are computed one after the other, with their part and the experts in it.

        Args:
            whole: return one range for each part, not one for each expert.
        """
        if whole:
            return [(rows, part, slice(None), groups) for part, (rows, groups) in enumerate(self.parts())]
        own = len(self.lengths) if self.loan is None else self.loan.own
        ends, found = list(accumulate(self.lengths)), []
        for e, (n, end) in enumerate(zip(self.lengths, ends, strict=True)):
            part, place = (0, e) if e < own else (1, e - own)
            groups = Groups(self.counts[e : e + 1], [n])
            found.append((slice(end - n, end), part, slice(place, place + 1), groups))
        return found


class Kind(Protocol):
    """Protocol: what lies between the two products of an MLP. ``experts.Activation`` is one.

    Attributes:
        derivative: None if there is no ``backward``.
    """

    @property
    def derivative(self) -> object: ...

    def __call__(self, y: Tensor) -> Tensor:
        """Compute the second product's input from the first product's output."""

    def backward(self, gradient: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same again, and the gradient of y. It may overwrite ``gradient``."""


class _GroupedLinear:
    __name__ = "grouped_linear"

    def __call__(self, x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        """Multiply the rows of each expert e by ``weight[e]`` transposed.

        A ``TorchFunctionMode`` intercepts this call, as it intercepts ``F.linear``, and may call ``deferred`` instead.

        Args:
            x: (N, K), the rows of expert 0, then those of expert 1, and so on.
            weight: (E, M, K).
            groups: the numbers of rows of each expert, with sum N.

        Returns:
            (N, M).
        """
        if has_torch_function((x, weight)):
            y: Tensor = handle_torch_function(self, (x, weight), x, weight, groups)
            return y
        return self._product(x, weight, groups, None)

    def deferred(self, later: Deferred, x: Tensor, weight: Tensor, groups: Groups) -> Tensor | None:
        """Compute the product as ``__call__`` does, but queue the weight gradient in ``later``.

        Returns None, without a computation, if the weight gradient may not be deferred.
        """
        return self._product(x, weight, groups, later) if later.takes(x, weight, None) else None

    def _product(self, x: Tensor, weight: Tensor, groups: Groups, later: Deferred | None) -> Tensor:
        dtype = product_dtype(x)
        y: Tensor = _GroupedProduct.apply(cast(x, dtype), weight, groups, later, dtype)
        return y


grouped_linear = _GroupedLinear()


class _GroupedProduct(torch.autograd.Function):
    """Autograd function y_e = x_e W_e^T. Under autocast it keeps the weight, and casts it again in the backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, groups: Groups, later: Deferred | None, dtype: torch.dtype | None
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        # Where to put the gradient: not the saved weight, for a hook on saved tensors hands back a copy of that.
        ctx.groups, ctx.later, ctx.dtype, ctx.parameter = groups, later, dtype, weight if later else None
        return _parts_times(x, groups.weights(cast(weight, dtype)), groups)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> Any:
        if dy is None:
            return (None,) * 5
        (x, weight), groups, later = ctx.saved_tensors, ctx.groups, ctx.later
        cast_weight = cast(weight, ctx.dtype)
        if torch.is_grad_enabled():  # to be differentiated again
            every, all_groups = _joined(cast_weight, groups)
            dx = _GroupedProduct.apply(dy, every.mT, all_groups, None, None) if ctx.needs_input_grad[0] else None
            dw = _GroupedOuter.apply(dy, x, all_groups) if ctx.needs_input_grad[1] else None
            return dx, dw if dw is None or groups.loan is None else groups.loan.separate(dw), None, None, None
        dx = None
        if ctx.needs_input_grad[0]:
            dx = _parts_times(dy, [w.mT for w in groups.weights(cast_weight)], groups)
        if not ctx.needs_input_grad[1]:
            return dx, None, None, None, None
        x, active, gradients = x.detach(), later is not None and later.active, list[Tensor | None]()
        for part, (rows, group) in enumerate(groups.parts()):
            if active and part == 0:
                later.add(ctx.parameter, partial(_add_outer, a=dy[rows], b=x[rows], groups=group))
            gradients.append(None if active and part == 0 else _outer(dy[rows], x[rows], group))
        return dx, _returned(gradients, groups, later, ctx.parameter), None, None, None


class _GroupedMLP:
    __name__ = "grouped_mlp"

    def __call__(self, x: Tensor, first: Tensor, last: Tensor, groups: Groups, kind: Kind) -> Tensor:
        """Compute each expert's MLP: ``kind(x_e first_e^T) last_e^T``. Intercepted as ``grouped_linear`` is.

        One expert is computed after the other, so that what lies between the products stays in the cache of a CPU. For
        the backward pass only x and the outputs of the first product are held.

        Args:
            x: (N, K), the rows of expert 0, then those of expert 1, and so on.
            first: (E, M, K).
            last: (E, K', M') for a ``kind`` that makes (N, M') from (N, M).
            groups: the numbers of rows of each expert, with sum N.
            kind: the activation.

        Returns:
            (N, K').
        """
        if has_torch_function((x, first, last)):
            y: Tensor = handle_torch_function(self, (x, first, last), x, first, last, groups, kind)
            return y
        if kind.derivative is None:
            return grouped_linear(kind(grouped_linear(x, first, groups)), last, groups)
        return self._mlp(x, first, last, groups, kind, None)

    def deferred(
        self, later: Deferred, x: Tensor, first: Tensor, last: Tensor, groups: Groups, kind: Kind
    ) -> Tensor | None:
        """Compute the MLP as ``__call__`` does, but queue the weight gradients in ``later``.

        Returns None, without a computation, if one of them may not be deferred.
        """
        if kind.derivative is None:
            y = grouped_linear.deferred(later, x, first, groups)
            return y if y is None else grouped_linear.deferred(later, kind(y), last, groups)
        takes = later.takes(x, first, None) and later.takes(x, last, None)
        return self._mlp(x, first, last, groups, kind, later) if takes else None

    def _mlp(
        self, x: Tensor, first: Tensor, last: Tensor, groups: Groups, kind: Kind, later: Deferred | None
    ) -> Tensor:
        dtype = product_dtype(x)
        y: Tensor = _GroupedMLPs.apply(cast(x, dtype), first, last, groups, kind, later, dtype)
        return y


grouped_mlp = _GroupedMLP()


class _GroupedMLPs(torch.autograd.Function):
    """Autograd function of ``grouped_mlp``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        first: Tensor,
        last: Tensor,
        groups: Groups,
        kind: Kind,
        later: Deferred | None,
        dtype: torch.dtype | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        up, down = groups.weights(cast(first, dtype)), groups.weights(cast(last, dtype))
        out, held = x.new_empty(x.shape[0], last.shape[1]), []
        for rows, part, experts, group in _pieces(x, first, last, groups):
            held.append(_rows_times(x[rows], up[part][experts], group))
            _rows_times(kind(held[-1]), down[part][experts], group, out[rows])
        ctx.save_for_backward(x, first, last, *held)
        ctx.groups, ctx.kind, ctx.later, ctx.dtype = groups, kind, later, dtype
        ctx.parameters = (first, last) if later else (None, None)  # as in ``_GroupedProduct``
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None) -> Any:
        nothing = (None,) * 7
        if dout is None:
            return nothing
        (x, first, last, *held), groups, kind, later = ctx.saved_tensors, ctx.groups, ctx.kind, ctx.later
        if torch.is_grad_enabled():  # to be differentiated again
            up, down = cast(first, ctx.dtype), cast(last, ctx.dtype)
            y = _GroupedProduct.apply(x, up, groups, None, None)
            y = _GroupedProduct.apply(kind(y), down, groups, None, None)
            inputs = [p for p, needed in zip((x, first, last), ctx.needs_input_grad) if needed]
            gradients = iter(torch.autograd.grad(y, inputs, dout, create_graph=True))
            return *(next(gradients) if needed else None for needed in ctx.needs_input_grad[:3]), *nothing[3:]
        up, down = groups.weights(cast(first, ctx.dtype)), groups.weights(cast(last, ctx.dtype))
        active, needed = later is not None and later.active, ctx.needs_input_grad
        dx = torch.empty_like(x) if needed[0] else None
        # Of each part; None where it is not needed, or deferred.
        dup, ddown = (
            [torch.empty_like(w) if need and (part or not active) else None for part, w in enumerate(weights)]
            for need, weights in zip(needed[1:3], (up, down), strict=True)
        )
        for (rows, part, experts, group), y in zip(_pieces(x, first, last, groups), held, strict=True):
            dh = _rows_times(dout[rows], down[part][experts].mT, group)
            h, dy = kind.backward(dh, y)
            if dx is not None:
                _rows_times(dy, up[part][experts].mT, group, dx[rows])
            pairs = (dup[part], dy, x[rows].detach()), (ddown[part], dout[rows], h)
            for need, parameter, (into, a, b) in zip(needed[1:3], ctx.parameters, pairs, strict=True):
                if into is not None:
                    _outer(a, b, group, into[experts])
                elif need:
                    later.add(parameter, partial(_add_outer_of, experts, a, b, group))
        returned = (
            _returned(each, groups, later, parameter) if need else None
            for need, each, parameter in zip(needed[1:3], (dup, ddown), ctx.parameters, strict=True)
        )
        return dx, *returned, *nothing[3:]


def _pieces(x: Tensor, first: Tensor, last: Tensor, groups: Groups) -> list[tuple[slice, int, slice, Groups]]:
    """Return the pieces in which an MLP is computed: whole parts if torch has a grouped kernel, else single experts."""
    return groups.pieces(_has_kernel(x, *first.shape[1:], *last.shape[1:]))


def _add_outer_of(experts: slice, a: Tensor, b: Tensor, groups: Groups, into: Tensor) -> None:
    """Compute ``into_e += a_e^T b_e`` for some of the experts of ``into``."""
    _add_outer(into[experts], a, b, groups)


def _joined(weight: Tensor, groups: Groups) -> tuple[Tensor, Groups]:
    """Return the weights of all experts here, the borrowed ones too, as one differentiable tensor, and their groups."""
    loan = groups.loan
    return (weight, groups) if loan is None else (loan.join(weight), Groups(groups.counts, groups.lengths))


def _returned(
    gradients: list[Tensor | None], groups: Groups, later: Deferred | None, parameter: Tensor
) -> Tensor | None:
    """Return the gradient of this rank's weights, with what borrowers computed; None if it is deferred."""
    own = gradients[0]
    if groups.loan is None or (borrowed := gradients[1]) is None:
        return own
    sums = groups.loan.give_back(borrowed, own)
    if own is None and later is not None:
        later.add(parameter, partial(_add_rows, sums))
    return own


def _add_rows(rows: dict[int, Tensor], into: Tensor) -> None:
    for place, row in rows.items():
        into[place] += row


class _GroupedOuter(torch.autograd.Function):
    """Autograd function G_e = a_e^T b_e, the gradient of the weights."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, groups: Groups) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.groups = groups
        return _outer(a, b, groups)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        a, b = ctx.saved_tensors
        da = _GroupedProduct.apply(b, gradient, ctx.groups, None, None) if ctx.needs_input_grad[0] else None
        db = _GroupedProduct.apply(a, gradient.mT, ctx.groups, None, None) if ctx.needs_input_grad[1] else None
        return da, db, None


def _parts_times(x: Tensor, weights: list[Tensor], groups: Groups) -> Tensor:
    """Return x_e weight_e^T, where ``weights`` are those of each part of the groups: (N, M) from (N, K)."""
    if len(weights) == 1:
        return _rows_times(x, weights[0], groups)
    parts = zip(groups.parts(), weights, strict=True)
    return torch.cat([_rows_times(x[rows], weight, group) for (rows, group), weight in parts])


def _rows_times(x: Tensor, weight: Tensor, groups: Groups, out: Tensor | None = None) -> Tensor:
    """Return x_e weight_e^T: (N, M) from (N, K) and (E, M, K), in ``out`` if given."""
    if _has_kernel(x, weight.shape[1], weight.shape[2]):
        product = F.grouped_mm(x.contiguous(), weight.mT, offs=groups.ends)
        return product if out is None else out.copy_(product)
    y = x.new_empty(x.shape[0], weight.shape[1]) if out is None else out
    start = 0
    for matrix, length in zip(weight.unbind(), groups.lengths, strict=True):
        if length:
            torch.mm(x[start : start + length], matrix.T, out=y[start : start + length])
        start += length
    return y


def _outer(a: Tensor, b: Tensor, groups: Groups, out: Tensor | None = None) -> Tensor:
    """Return a_e^T b_e: (E, M, K) from (N, M) and (N, K), in ``out`` if given; zero for an expert without rows."""
    if _has_kernel(a, a.shape[1], b.shape[1]):
        product = F.grouped_mm(a.contiguous().mT, b.contiguous(), offs=groups.ends)
        product.masked_fill_((groups.counts == 0)[:, None, None], 0.0)
        return product if out is None else out.copy_(product)
    product, start = a.new_empty(len(groups.lengths), a.shape[1], b.shape[1]) if out is None else out, 0
    for matrix, length in zip(product.unbind(), groups.lengths, strict=True):
        torch.mm(a[start : start + length].T, b[start : start + length], out=matrix)  # zeros without rows
        start += length
    return product


def _add_outer(into: Tensor, a: Tensor, b: Tensor, groups: Groups) -> None:
    """Compute ``into_e += a_e^T b_e`` for each expert."""
    if _has_kernel(a, a.shape[1], b.shape[1]):
        into.add_(_outer(a, b, groups))
        return
    start = 0
    for matrix, length in zip(into.unbind(), groups.lengths, strict=True):
        left, right = a[start : start + length].T, b[start : start + length]
        if length and into.dtype == a.dtype:
            matrix.addmm_(left, right)
        elif length:
            matrix.add_(left @ right)
        start += length


def _has_kernel(x: Tensor, *lengths: int) -> bool:
    """Return True if torch has a grouped kernel for these rows: bfloat16 on a GPU, with aligned rows."""
    aligned = all(length * x.element_size() % _ALIGNED == 0 for length in lengths)
    return x.is_cuda and x.dtype == torch.bfloat16 and aligned and x.shape[0] > 0
