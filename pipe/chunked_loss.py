"""Output layer and loss in chunks of tokens, so that the logits of a microbatch never exist as a whole.

With x the input of the output layer (the head), y the labels and f a loss that is a sum over tokens,

    loss = sum over chunks c of f(head(x_c), y_c)

For each chunk the head runs, then f, then their backward pass, before the next chunk begins. So at most two tensors of
a chunk's logits exist: the logits and their gradient. The backward pass of the stage does all this. The forward pass
does not compute the loss, so the head's product is computed once, and the loss tensor that it returns is NaN until the
backward pass. Beside the chunk, the gradients of x and of the head's parameters are held.

With a schedule that splits the backward pass, the head's weight gradient is computed with the input gradient: later, it
would need the logits again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..base.checks import check_count
from ..base.deferred import Deferred
from ..base.formulas import CHUNK_TOKENS
from ..base.nest import map_tensors, tensors_of
from ..base.torch_private import has_hooks, module_hooks
from ..grid import Axis
from ..grid.loss_pair import is_pair, sum_and_weight
from ..grid.loss_terms import Loss, Metric, NamedLosses, Term, WithLoss, is_named, named_losses
from .backward import SplitBackward, deferring, unsplit

LossFunction = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class LastLayer:
    """The last layer of a pipeline, as its loss function runs it.

    Attributes:
        function: the layer's forward.
        layer: the module whose parameters it uses; None: it uses none.
        part: returns the context of the part ``stage``, in which its FLOPs count.
    """

    function: Callable[[Any], Tensor]
    layer: nn.Module | None = None
    part: Callable[[], AbstractContextManager[Any]] = nullcontext

    @property
    def shards(self) -> int:
        """The number t of tensor-parallel shards whose tokens the layer joins (sequence parallelism), else 1."""
        sharded = getattr(self.layer, "sequence_parallel", False)
        return cast("Axis", cast("nn.Module", self.layer).axis).size if sharded else 1

    def __call__(self, x: Any) -> Tensor:
        """Run the layer."""
        with self.part():
            outputs = self.function(x)
        if isinstance(outputs, WithLoss):
            raise TypeError(
                "the last layer returned triax.WithLoss, but loss_fn runs this layer in chunks of tokens: return the "
                "loss from loss_fn or from the layer before, or use a loss_fn that gets the whole logits"
            )
        return outputs


def chunked(loss_fn: LossFunction, tokens: int = CHUNK_TOKENS) -> ChunkedLoss:
    """Return a pipeline's loss function that runs the model's last layer and ``loss_fn`` in chunks of tokens.

    The last layer must act on each token by itself, as a linear layer does, and the loss must be a sum over tokens.
    ``triax.NextTokenLoss`` does this by itself.

    Args:
        loss_fn: called with the last layer's output (B, n, V) for some of the tokens and the labels of these. Returns a
            pair (sum of the losses, weight), or a ``triax.Loss`` whose terms and metrics are such pairs; sums and
            weights are sums over tokens. It may use no trained parameters.
        tokens: tokens of a chunk, at most.

    Raises:
        TypeError: ``loss_fn`` is a module with parameters.
        ValueError: ``tokens`` is less than 1.
    """
    return ChunkedLoss(loss_fn, tokens)


class ChunkedLoss:
    """Loss function that runs the last layer and another loss function in chunks; arguments as for ``chunked``."""

    def __init__(self, loss_fn: LossFunction, tokens: int = CHUNK_TOKENS) -> None:
        if isinstance(loss_fn, nn.Module) and next(loss_fn.parameters(), None) is not None:
            raise TypeError(
                f"chunked was given {type(loss_fn).__name__}, a module with parameters, which would get no gradients: "
                "put them into the last layer, or leave chunked out"
            )
        check_count("chunked", tokens=tokens)
        self.loss_fn, self.tokens = loss_fn, tokens
        if callable(weight := getattr(loss_fn, "weight", None)):
            self.weight = weight

    def __call__(self, outputs: Any, labels: Any) -> Any:
        """Return what ``loss_fn`` returns for whole outputs and labels."""
        return self.loss_fn(outputs, labels)

    def takes_head(self, layer: nn.Module | None, function: Callable[..., Any] | None) -> bool:
        """Return True: any last layer is run in chunks."""
        return True

    def of_head(self, head: LastLayer, x: Any, labels: Any) -> Any:
        """Return the loss of the last layer's input; see ``loss_in_chunks``."""
        return loss_in_chunks(head, self.loss_fn, x, labels, self.tokens)


def loss_in_chunks(head: LastLayer, loss_fn: LossFunction, x: Any, labels: Any, tokens: int = CHUNK_TOKENS) -> Any:
    """Return ``loss_fn(head(x), labels)``, in chunks if there are more than ``tokens`` tokens.

    Args:
        head: the last layer, which acts on each token by itself.
        loss_fn: a sum over tokens, as for ``chunked``.
        x: the last layer's input, (B, T, ...); with ``sequence_parallel``, (B, T / t, ...).
        labels: nest of tensors (B, T, ...), the labels of the tokens of ``x``.
        tokens: tokens of a chunk, at most. One token of each of the t shards is the least.

    Returns:
        What ``loss_fn`` returns, as tensors that the backward pass fills where ``x`` or a parameter needs a gradient.

    Raises:
        ValueError: the shapes do not fit each other, or ``loss_fn`` returns a mean, or other terms for another chunk.
        TypeError: ``loss_fn`` uses parameters that are not the layer's.
    """
    spread = head.shards
    _check(x, labels, spread)
    if x.shape[0] * x.shape[1] * spread <= tokens:
        return loss_fn(head(x), labels)

    parameters = _parameters(head)
    chunks = _Chunks(head, loss_fn, x, labels, tokens, spread, parameters)
    form = chunks.form
    if not (torch.is_grad_enabled() and form.has_gradient and (x.requires_grad or parameters)):
        return form.loss(chunks.sums())
    values = form.unfilled(x.device)
    roots = _LossInChunks.apply(chunks, values, x, *parameters)
    return form.loss([*roots, *values[len(roots) :]])


def values_in_chunks(
    head: LastLayer,
    function: Callable[[Tensor, Any], Tensor],
    x: Any,
    labels: Any,
    tokens: int = CHUNK_TOKENS,
) -> Tensor:
    """Return ``function(head(x), labels)``, a value of each token, in chunks if there are more than ``tokens`` tokens.

    The forward pass drops the logits of each chunk. The backward pass, which gets a gradient of each value, computes
    them again: one product of the head more than with whole logits.

    Args:
        head, x, labels, tokens: as for ``loss_in_chunks``.
        function: called with the logits (B, n, V) of some tokens and the labels of these; returns a value of each,
            (B, n). It may use no trained parameters.

    Returns:
        Tensor (B, T).

    Raises:
        ValueError: the shapes do not fit each other.
        TypeError: ``function`` uses parameters that are not the layer's.
    """
    spread = head.shards
    _check(x, labels, spread)
    if x.shape[0] * x.shape[1] * spread <= tokens:
        return function(head(x), labels)
    parameters = _parameters(head)

    def scaled(logits: Tensor, labels_and_factors: Any) -> tuple[Tensor, float]:
        own_labels, factors = labels_and_factors
        return (function(logits, own_labels) * factors).sum(), 1.0

    ones = x.new_ones(x.shape[0], x.shape[1] * spread)
    chunks = _Chunks(replace(head, part=nullcontext), scaled, x, (labels, ones), tokens, spread, parameters)
    values: Tensor = _ValuesInChunks.apply(chunks, head, function, x, *parameters)
    return values


def runs_otherwise(loss_fn: Any) -> bool:
    """Return True if a subclass has its own ``__call__``, but the ``of_head`` of a class that knows nothing of it."""
    owners = {name: next(cls for cls in type(loss_fn).__mro__ if name in vars(cls)) for name in ("__call__", "of_head")}
    return not issubclass(owners["of_head"], owners["__call__"])


def is_watched(layer: nn.Module) -> bool:
    """Return True if a layer or a parameter of it has hooks, which expect one call with all tokens."""
    hooks = module_hooks(layer, "forward", "forward_pre", "backward", "backward_pre")
    return hooks or any(has_hooks(parameter) for parameter in layer.parameters())


def _parameters(head: LastLayer) -> list[Tensor]:
    return [] if head.layer is None else [p for p in head.layer.parameters() if p.requires_grad]


def _check(x: Any, labels: Any, spread: int) -> None:
    """Check that the labels fit the tokens of ``x``."""
    if not isinstance(x, Tensor) or x.dim() < 2:
        what = f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise ValueError(
            f"the input of the last layer is {what}, but chunks of tokens are taken from a tensor (B, T, ...): return "
            "such a tensor from the layer before, or leave chunked out"
        )
    wanted = x.shape[0], x.shape[1] * spread
    tensors = tensors_of(labels)
    for tensor in tensors:
        if tensor.shape[:2] != wanted:
            raise ValueError(
                f"labels of shape {tuple(tensor.shape)} do not fit the {wanted[1]} tokens of each of {wanted[0]} rows "
                f"that the last layer gets: give chunked labels of shape {wanted}, on a context axis those of this "
                "rank's tokens (triax.context.shard)"
            )
    if not tensors:
        raise ValueError("chunked was given labels without a tensor: give a label for each token, of shape (B, T)")


class _Form:
    """Form of a loss function's value: a pair, or named pairs; and the value as a list of tensors, which add up.

    The list has the sums of the terms, then all other numbers.

    Raises:
        ValueError: the value, or a term, is a mean.
    """

    def __init__(self, value: Any) -> None:
        self.named = named_losses(value, "loss_fn returned", "return") if is_named(value) else None
        if self.named is None and not is_pair(value):
            raise ValueError(_MEAN.format("a mean"))
        parts = (
            {**value.terms, **value.metrics} if isinstance(value, Loss) else value if isinstance(value, dict) else {}
        )
        for name, term in parts.items():
            if not is_pair(term):
                raise ValueError(_MEAN.format(f"a mean for {name!r}"))
        self.like = [number.detach() for number in self.numbers(value)]
        self.named = None if self.named is None else self.named.detached()
        self.terms = 1 if self.named is None else len(self.named.terms)

    @property
    def has_gradient(self) -> bool:
        """False if all terms have the factor 0: no backward pass comes, which would fill the numbers."""
        return self.named is None or any(term.factor for term in self.named.terms.values())

    def numbers(self, value: Any) -> list[Tensor]:
        """Return the numbers of a value of this form."""
        if self.named is None:
            total, weight = sum_and_weight(value, "loss_fn returned", "return")
            return [total, _as_tensor(weight, total)]
        named = named_losses(value, "loss_fn returned", "return")
        if named.form() != self.named.form():
            raise ValueError("loss_fn returned other names for another chunk of tokens: return the same for each chunk")
        parts: list[Term | Metric] = [*named.terms.values(), *named.metrics.values()]
        return [*(term.total for term in parts), *(_as_tensor(term.weight, term.total) for term in parts)]

    def unfilled(self, device: torch.device) -> list[Tensor]:
        """Return numbers that the backward pass will fill. Until then sums of terms are NaN, and the others are 0."""
        numbers = [torch.zeros(like.shape, dtype=_exact(like), device=device) for like in self.like]
        for number in numbers[: self.terms]:
            number.fill_(torch.nan)
        return numbers

    def loss(self, numbers: Sequence[Tensor]) -> Any:
        """Return the value of the loss function that has these numbers."""
        if self.named is None:
            return tuple(numbers)
        terms, metrics = self.named.terms, self.named.metrics
        of_terms, of_metrics = numbers[: len(terms)], numbers[len(terms) : len(terms) + len(metrics)]
        weights = [*numbers[len(terms) + len(metrics) :]]
        finished = {
            name: Term(total, weight, term.factor, False)
            for (name, term), total, weight in zip(terms.items(), of_terms, weights, strict=False)
        }
        rest = zip(metrics, of_metrics, weights[len(terms) :], strict=True)
        return NamedLosses(finished, {name: Metric(total, weight) for name, total, weight in rest})


class _Chunks:
    """The chunks of one microbatch: runs head and loss on each, forward alone or forward and backward.

    Attributes:
        form: form of the loss, found on the first token of the first row.
        labels: nest of tensors (B, T, ...).
    """

    def __init__(
        self,
        head: LastLayer,
        loss_fn: LossFunction,
        x: Tensor,
        labels: Any,
        tokens: int,
        spread: int,
        parameters: Sequence[Tensor],
    ) -> None:
        self._head, self._loss_fn, self.labels, self._spread = head, loss_fn, labels, spread
        self._shape, self._parameters = x.shape[:2], parameters
        self._step = max(1, tokens // spread)  # tokens of x in a chunk
        self._autocast = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys(("cpu", x.device.type))
        }
        self._x = x.detach()
        with torch.enable_grad(), unsplit():
            # Not a part of the stage: the token is run again with its chunk.
            first = self._run(replace(head, part=nullcontext), self._x[:1, :1], slice(0, 1), slice(0, 1))
        self._refuse_others(first)
        self.form = _Form(first)

    def values(self, head: LastLayer, function: Callable[[Tensor, Any], Tensor]) -> Tensor:
        """Run forward alone, and return the value of each token, (B, T); see ``values_in_chunks``."""
        (labels, ones), filled = self.labels, None
        for rows, cols in self._places():
            value = function(head(self._x[rows, cols]), self._labels_of(labels, rows, cols))
            if filled is None:
                filled = torch.empty_like(ones, dtype=value.dtype)
            self.shards(filled)[rows, :, cols] = self.shards(value)
        assert filled is not None
        return filled

    def sums(self) -> list[Tensor]:
        """Run forward alone, and return the numbers of the whole microbatch."""
        with torch.no_grad():
            rows_of = [
                self.form.numbers(self._run(self._head, self._x[rows, cols], rows, cols))
                for rows, cols in self._places()
            ]
        return [torch.stack([one.to(_exact(one)) for one in column]).sum(0) for column in zip(*rows_of, strict=True)]

    def differentiate(self, factors: Sequence[Tensor | None], needs_x: bool) -> tuple[list[Tensor], list[Any]]:
        """Run forward and backward.

        Args:
            factors: gradient of each term's sum; None for a term that the loss does not use.
            needs_x: compute the gradient of x.

        Returns:
            The numbers of the whole microbatch; the gradients of x, or None, and of the parameters.
        """
        dx = torch.empty_like(self._x) if needs_x else None
        # Sums over chunks in bfloat16 would lose what one product over all tokens keeps.
        totals = {p: torch.zeros_like(p, dtype=_exact(p), requires_grad=False) for p in self._parameters}
        numbers = [torch.zeros_like(number, dtype=_exact(number)) for number in self.form.like]
        with ExitStack() as stack:
            stack.enter_context(unsplit())
            for kind, (enabled, dtype) in self._autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            for rows, cols in self._places():
                piece, queue = self._x[rows, cols].detach().requires_grad_(needs_x), Deferred()
                with torch.enable_grad(), SplitBackward(queue):
                    chunk_numbers = self.form.numbers(self._run(self._head, piece, rows, cols))
                roots = [(n, f) for n, f in zip(chunk_numbers, factors) if f is not None and n.requires_grad]
                wanted = [piece, *totals] if needs_x else [*totals]
                gradients: list[Tensor | None] = [None] * len(wanted)
                if roots and wanted:
                    terms, scales = [n for n, _ in roots], [f.to(n.dtype) for n, f in roots]
                    with deferring(queue):  # it frees the logits
                        gradients = [*torch.autograd.grad(terms, wanted, scales, allow_unused=True)]
                for total, number in zip(numbers, chunk_numbers, strict=True):
                    total += number.detach()
                if dx is not None:
                    slope = gradients.pop(0)
                    dx[rows, cols] = 0 if slope is None else slope
                queue.run(totals.__getitem__, lambda parameter: None)
                for total, gradient in zip(totals.values(), gradients, strict=True):
                    if gradient is not None:
                        total += gradient
        return numbers, [dx, *(total.to(p.dtype) for p, total in totals.items())]

    def _run(self, head: LastLayer, piece: Tensor, rows: slice, cols: slice) -> Any:
        """Return the loss of a piece of x, (b, n, ...)."""
        return self._loss_fn(head(piece), self._labels_of(self.labels, rows, cols))

    def _labels_of(self, labels: Any, rows: slice, cols: slice) -> Any:
        """Return labels (b, n, ...) of a piece; of n / t tokens of each of the t shards that the head joins."""
        return map_tensors(lambda tensor: self.shards(tensor)[rows, :, cols].flatten(1, 2), labels)

    def shards(self, tokens: Tensor) -> Tensor:
        """View (B, T, ...) as (B, t, T / t, ...)."""
        return tokens.unflatten(1, (self._spread, -1))

    def _places(self) -> Iterator[tuple[slice, slice]]:
        """Return the rows and columns of x of each chunk: whole rows, or parts of one row."""
        rows, length = self._shape
        several = max(1, self._step // length)
        width = min(length, self._step)
        for row in range(0, rows, several):
            for col in range(0, length, width):
                yield slice(row, min(row + several, rows)), slice(col, min(col + width, length))

    def _refuse_others(self, value: Any) -> None:
        """Refuse a loss function that uses other parameters than the layer's: they would get no gradient."""
        known, seen = set(self._parameters), set()
        nodes = [tensor.grad_fn for tensor in _tensors(value) if tensor.grad_fn is not None]
        while nodes:
            node = nodes.pop()
            if node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None and leaf not in known:
                raise TypeError(
                    f"the last layer or loss_fn uses a parameter of shape {tuple(leaf.shape)} that is not the last "
                    "layer's, and would get no gradient for it: make it a parameter of the last layer, or leave "
                    "chunked out"
                )
            nodes += [before for before, _ in node.next_functions if before is not None]


class _LossInChunks(torch.autograd.Function):
    """Autograd function whose forward pass returns unfilled sums, and whose backward pass runs head and loss."""

    @staticmethod
    def forward(ctx: Any, chunks: _Chunks, values: list[Tensor], x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.chunks, ctx.values = chunks, values
        return tuple(value.detach() for value in values[: chunks.form.terms])

    @staticmethod
    def backward(ctx: Any, *factors: Tensor | None) -> Any:
        numbers, gradients = ctx.chunks.differentiate(factors, ctx.needs_input_grad[2])
        for value, number in zip(ctx.values, numbers, strict=True):
            value.copy_(number)
        del ctx.chunks
        return None, None, *gradients


class _ValuesInChunks(torch.autograd.Function):
    """Autograd function of ``values_in_chunks``."""

    @staticmethod
    def forward(ctx: Any, chunks: _Chunks, head: LastLayer, function: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.chunks = chunks
        return chunks.values(head, function)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        labels, _ = ctx.chunks.labels
        ctx.chunks.labels = labels, gradient
        _, gradients = ctx.chunks.differentiate([gradient.new_ones(())], ctx.needs_input_grad[3])
        del ctx.chunks
        return None, None, None, *gradients


_MEAN = (
    "loss_fn returned {} for a chunk of the tokens, and with means each chunk would have the same weight: return a "
    "pair (sum of the losses, number of labels)"
)


def _tensors(value: Any) -> Sequence[Tensor]:
    """Return the tensors of a loss function's value, without the metrics, which have no gradients."""
    return tensors_of(dict(value.terms) if isinstance(value, (Loss, NamedLosses)) else value)


def _as_tensor(weight: Tensor | float, like: Tensor) -> Tensor:
    if isinstance(weight, Tensor):
        return weight.detach()
    return torch.tensor(float(weight), dtype=torch.float64, device=like.device)


def _exact(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which a tensor's values are added: at least float32."""
    return torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else torch.float64
