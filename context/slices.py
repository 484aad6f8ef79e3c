"""Slices of sequences that pass a pipeline one after the other: keys, values and states of the earlier slices.

A pipeline may cut each microbatch along its tokens (``pipe/program/slices.py``). A layer then runs one slice at a time:

    forward of slice s     reads the keys and values, or the state, that slices 0 to s-1 left, and adds its own
    backward of slice s    comes after the backwards of slices s+1, s+2, ...: adds the gradients of its keys and values,
                           or of the state behind it, that they left, and leaves those of the earlier ones

``Slices`` holds this for each layer of each sequence under way. Keys and values of a sequence lie in one buffer, and so
do their gradients: no slice keeps a copy of the earlier ones. Autograd's graphs of the slices are separate. A forward
that is run again, because activations are recomputed, writes the same values again.

Layers take part by an attribute ``slices``, None as long as sequences are whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..base.autograd import cast, product_dtype
from ..base.uncompiled import uncompiled
from .block import Merged, Scores, sinks_gradient
from .documents import documents_of, positions_within
from .mask import Mask
from .pair import Gradients, Queries


class Slices:
    """State that the slices of each sequence pass on, of this rank's layers.

    Attributes:
        number: number of the slice that runs.
        start, stop: its tokens in the sequence.
        length: T, the tokens of the whole sequence.
        active: True while a slice runs; False for whole sequences, as in evaluation.
    """

    def __init__(self) -> None:
        self.number = self.start = self.stop = self.length = 0
        self.active = False
        self._parts: dict[Hashable, dict[int, _SliceKeys | _RecurrentStates]] = {}  # sequence -> layer -> its state
        self._running: dict[int, Any] = {}
        self._places: tuple[Tensor | None, Tensor] | None = None

    @contextmanager
    def running(self, sequence: Hashable, number: int, start: int, stop: int, length: int) -> Iterator[None]:
        """Run a slice's forward or backward within the context.

        Args:
            sequence: the stage and the microbatch.
            number, start, stop, length: the attributes.
        """
        self.number, self.start, self.stop, self.length = number, start, stop, length
        self._running, self._places, self.active = self._parts.setdefault(sequence, {}), None, True
        try:
            yield
        finally:
            self._running, self._places, self.active = {}, None, False

    def finish(self, sequence: Hashable) -> None:
        """Free what the slices of a sequence left, after the backward of its first slice.

        Raises:
            RuntimeError: a layer's backward did not run for a slice whose keys, values or state have a gradient.
        """
        for part in self._parts.pop(sequence, {}).values():
            if part.owed:
                raise RuntimeError(
                    "later slices of a sequence have given a gradient to the keys and values, or the state, of a "
                    "slice whose own backward pass did not reach the layer; that gradient would be lost: let the loss "
                    "of every slice depend on the model's output, with a weight of 0 where no label counts"
                )

    def clear(self) -> None:
        """Drop everything, after a failure."""
        self._parts.clear()

    def positions(self, documents: Tensor | None, device: torch.device) -> Tensor:
        """Return the positions of the slice's tokens, within their documents if there are any.

        Args:
            documents: document number of each token of the whole sequence, integers (B, T), or None.
            device: device of the result.

        Returns:
            int64 (B, n), or (1, n) without documents.
        """
        if self._places is None or self._places[0] is not documents:
            whole = torch.arange(self.length, device=device)[None]
            places = whole if documents is None else positions_within(documents)
            self._places = documents, places[:, self.start : self.stop]
        return self._places[1]

    def require(self, tokens: int) -> None:
        """Check the number of tokens that a layer was given.

        Raises:
            ValueError: the slice has another number of tokens.
        """
        if tokens != self.stop - self.start:
            raise ValueError(
                f"a layer got {tokens} tokens of slice {self.number}, which has {self.stop - self.start} of the "
                f"{self.length} tokens of its sequence: the layers before must return one row for each token"
            )

    @uncompiled
    def attend(
        self,
        layer: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None = None,
        window: int | None = None,
        scale: float | None = None,
        sinks: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Causal softmax attention of the slice's tokens with these and all earlier tokens of the sequence.

        Args:
            layer: the calling module; each has keys and values of its own.
            q: (B, H, n, dim).
            k, v: (B, K, n, dim) and (B, K, n, width); K divides H.
            documents: document number of each token of the whole sequence, integers (B, T); a token attends only within
                its document. None: each row is one document.
            window: a token attends only to itself and to the ``window`` - 1 tokens before it; None: to all.
            scale: factor of the scores; None means dim ** -0.5.
            sinks: (H,), attention sinks, as for ``context.attention``, or None.
            softcap: cap of the scores, as for ``block.forward``.

        Returns:
            (B, H, n, width).
        """
        self.require(q.shape[2])
        dtype = product_dtype(q)
        q, k, v = cast(q, dtype), cast(k, dtype), cast(v, dtype)
        keys = self._running.get(id(layer))
        if keys is None:
            keys = self._running[id(layer)] = _SliceKeys(k, v, self.length)
        mask = Mask(
            self.length, True, window if window is not None and window < self.length else None, documents_of(documents)
        )
        scores = Scores(1 / math.sqrt(q.shape[-1]) if scale is None else scale, softcap)
        out: Tensor = _SliceAttention.apply(q, k, v, sinks, keys, mask, scores, (self.start, self.stop))
        return out

    def recur(
        self, layer: Any, run: Callable[[list[Tensor]], tuple[Tensor, Sequence[Tensor]]], empty: Sequence[Tensor]
    ) -> Tensor:
        """Run a recurrent layer from the states behind the slice before, and keep those behind this one.

        Args:
            layer: the calling module.
            run: takes the states, and returns the layer's output and the new states.
            empty: states in front of a sequence, zeros, (B, ...) each.

        Returns:
            The output.
        """
        states = self._running.get(id(layer))
        if states is None:
            states = self._running[id(layer)] = _RecurrentStates()
        before = list(empty)
        if self.number:
            anchor = torch.empty((), requires_grad=torch.is_grad_enabled())  # so that autograd calls the backward
            before = list(_EnterSlice.apply(anchor, states, self.number))
        y, after = run(before)
        out: Tensor = _LeaveSlice.apply(y, states, self.number, *after)
        return out


class _SliceKeys:
    """Keys and values of a sequence, of the slices that have run, and the sums of their gradients.

    Attributes:
        owed: True while slices have got gradients that they have not passed on.
    """

    def __init__(self, k: Tensor, v: Tensor, length: int) -> None:
        with torch.no_grad():
            self._k, self._v = (x.new_empty(*x.shape[:2], length, x.shape[3]) for x in (k, v))
        self._grads: tuple[Tensor, Tensor] | None = None
        self._passed = 0  # the tokens before this one have gradients that were not passed on
        self.owed = False

    def write(self, k: Tensor, v: Tensor, start: int, stop: int) -> None:
        self._k[:, :, start:stop], self._v[:, :, start:stop] = k, v

    def until(self, stop: int) -> tuple[Tensor, Tensor]:
        return self._k[:, :, :stop], self._v[:, :, :stop]

    def add(self, dk: Tensor, dv: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Add a slice's gradients of the first ``stop`` keys and values; return the sums of its own, which are done."""
        if self._grads is None:
            self._grads = dk, dv
        else:
            for held, new in zip(self._grads, (dk, dv), strict=True):
                if self._passed != stop:
                    raise RuntimeError(
                        f"the backward of tokens {start} to {stop - 1} comes after that of token {self._passed}: a "
                        "slice in between had none"
                    )
                held[:, :, :stop] += new
        self._passed, self.owed = start, start > 0
        dk, dv = self._grads
        return dk[:, :, start:stop], dv[:, :, start:stop]


class _SliceAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        keys: _SliceKeys,
        mask: Mask,
        scores: Scores,
        tokens: tuple[int, int],
    ) -> Tensor:
        start, stop = tokens
        keys.write(k, v, start, stop)
        total = Merged((*q.shape[:3], v.shape[3]), q, sinks)
        Queries(q, (tokens,), mask, scores).forward(total, *keys.until(stop), ((0, stop),))
        out = total.out.to(q.dtype)
        # Keys and values are not saved: all slices share them.
        ctx.save_for_backward(q, out, total.lse, sinks)
        ctx.keys, ctx.mask, ctx.scores, ctx.tokens = keys, mask, scores, tokens
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, out, lse, sinks = ctx.saved_tensors
        start, stop = ctx.tokens
        k, v = ctx.keys.until(stop)
        grads = Gradients(q, k, v)
        lse = lse.masked_fill(lse == -torch.inf, 0)
        queries = Queries(q, (ctx.tokens,), ctx.mask, ctx.scores)
        queries.backward(dout, out, lse, k, v, ((0, stop),), grads)
        dk, dv = ctx.keys.add(grads.dk, grads.dv, start, stop)
        dsinks = sinks_gradient(sinks, dout, out, lse)
        return grads.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None, None, None


class _RecurrentStates:
    """States of a recurrent layer in front of each slice of a sequence, and their gradients.

    Attributes:
        owed: True while a slice has got gradients that it has not passed on.
    """

    def __init__(self) -> None:
        self.before: dict[int, tuple[Tensor, ...]] = {}  # number of the slice -> states
        self.gradients: dict[int, tuple[Tensor, ...]] = {}

    @property
    def owed(self) -> bool:
        return bool(self.gradients)


class _EnterSlice(torch.autograd.Function):
    """States in front of a slice, whose gradients are kept for the slice before."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, states: _RecurrentStates, number: int) -> Any:
        ctx.states, ctx.number = states, number
        return tuple(state.view_as(state) for state in states.before[number])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.states.gradients[ctx.number] = grads
        return None, None, None


class _LeaveSlice(torch.autograd.Function):
    """Output of a slice; its states are kept for the next slice, whose gradients join in the backward pass."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, states: _RecurrentStates, number: int, *after: Tensor) -> Tensor:
        ctx.states, ctx.number = states, number
        states.before[number + 1] = tuple(state.detach().clone() for state in after)  # of views
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        count = len(ctx.states.before[ctx.number + 1])
        grads = ctx.states.gradients.pop(ctx.number + 1, (None,) * count)
        return grad, None, None, *grads
