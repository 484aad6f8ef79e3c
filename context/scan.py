"""Scan of an affine recurrence S -> A S + U over a sequence whose tokens are spread over the ranks of the context axis.

The state S of a linear attention or of a state space is affine in the state before: from chunk to chunk it is
multiplied by a transition A, and an update U is added (Dao and Gu 2024, arXiv:2405.21060, section 6; Yang et al. 2024,
arXiv:2412.06464, section 3). A is a number for each head (Mamba2), or a K x K matrix (Gated DeltaNet).

In zigzag order (``order.py``) rank r holds pieces r and 2c-1-r. Each rank composes the chunks of each of its pieces to
one pair (A, U), all ranks at the same time. Then the state itself passes through the pieces in their order:

    c = 3     piece      0    1    2    3    4    5
              rank       0 -> 1 -> 2 == 2 -> 1 -> 0          == stays on the rank

Then each rank scans its chunks once more, from the states that its pieces begin with. The backward pass is the same
scan with the chunks in reverse and A transposed: its state is the gradient of the loss for the state behind a chunk,
and it passes through the pieces from the last one to the first, which is again from rank 0 to rank c-1 and back.

With |S| the bytes of the states of all heads and rows, ranks 0 and c-1 send |S| forward and |S| backward, the others
2 |S| and 2 |S|: 4 (c-1) |S| in all, independent of the length of the sequence. The transitions are not sent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..base.uncompiled import uncompiled
from ..grid.comm.axis import Axis

_STATE = 4  # tag


@uncompiled
def scan(transitions: Tensor, updates: Tensor, initial: Tensor | None, axis: Axis | None) -> tuple[Tensor, Tensor]:
    """Return the state in front of each chunk, and the state at the end. Collective, its backward pass too.

    Args:
        transitions: A, (B, p, n, H, 1, 1), or (B, p, n, H, K, K): of the n chunks of each of the rank's p pieces.
        updates: U, (B, p, n, H, K, V).
        initial: state in front of the whole sequence, (B, H, K, V); None: zeros. With an axis, it gets no gradient.
        axis: the context axis. If its size is 1, or it is None, p is 1; else p is 2.

    Returns:
        The states, (B, p, n, H, K, V), and the state behind the whole sequence, (B, H, K, V). With an axis, it is the
        whole sequence's on rank 0 only, and has no gradient.
    """
    if initial is None:
        initial = updates.new_zeros(updates.shape[0], *updates.shape[3:])
    before, last = _Scan.apply(transitions, updates, initial, axis)
    return before, last


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transitions: Tensor, updates: Tensor, initial: Tensor, axis: Axis | None) -> Any:
        before, last = _scan(transitions, updates, initial, axis, reverse=False)
        ctx.save_for_backward(transitions, before)
        ctx.axis, ctx.alone = axis, axis is None or axis.size == 1
        if not ctx.alone:
            ctx.mark_non_differentiable(last)
        return before, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, of_last: Tensor) -> Any:
        transitions, before = ctx.saved_tensors
        scalar, end = transitions.shape[-1] == 1, of_last if ctx.alone else torch.zeros_like(grad[:, 0, 0])
        behind, of_initial = _scan(transitions.transpose(-2, -1), grad, end, ctx.axis, reverse=True)
        of_transitions = (behind * before).sum((-2, -1), keepdim=True) if scalar else behind @ before.transpose(-2, -1)
        return of_transitions, behind, of_initial if ctx.alone else None, None


def _scan(transitions: Tensor, updates: Tensor, initial: Tensor, axis: Axis | None, reverse: bool) -> Any:
    """Return the states that the chunks meet, in the shape of the updates, and the last state, (B, H, K, V)."""
    if axis is None or axis.size == 1:
        starts, last = initial[:, None], None
    else:
        starts, last = _starts(*_composed(transitions, updates, reverse), initial, axis, reverse)
    states, state = torch.empty_like(updates), starts
    for i in _order(updates.shape[2], reverse):
        states[:, :, i] = state
        state = _applied(transitions[:, :, i], state) + updates[:, :, i]
    return states, state[:, 0] if last is None else last


def _composed(transitions: Tensor, updates: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
    """Return transition and update of each piece as a whole: (B, p, H, 1, 1) or (B, p, H, K, K), and (B, p, H, K, V).

    The transition is a matrix: it is scanned beside the update, from the identity, without updates of its own.
    """
    if transitions.shape[-1] == 1:
        total, state = transitions.prod(2), torch.zeros_like(updates[:, :, 0])
        for i in _order(updates.shape[2], reverse):
            state = transitions[:, :, i] * state + updates[:, :, i]
        return total, state
    size = transitions.shape[-1]
    state = torch.zeros_like(torch.cat([transitions[:, :, 0], updates[:, :, 0]], -1))
    state[..., :size] = torch.eye(size, dtype=state.dtype, device=state.device)
    for i in _order(updates.shape[2], reverse):
        state = transitions[:, :, i] @ state
        state[..., size:] += updates[:, :, i]
    return state[..., :size], state[..., size:]


def _starts(transitions: Tensor, updates: Tensor, initial: Tensor, axis: Axis, reverse: bool) -> tuple[Tensor, Tensor]:
    """Pass the state through the pieces; return the states that this rank's begin with, and what it passes on last."""
    first, second = (1, 0) if reverse else (0, 1)
    starts = torch.empty_like(updates)

    def through(piece: int, state: Tensor) -> Tensor:
        starts[:, piece] = state
        return (_applied(transitions[:, piece], state) + updates[:, piece]).contiguous()

    def receive(source: int) -> Tensor:
        state = torch.empty_like(updates[:, 0], memory_format=torch.contiguous_format)
        axis.receive(state, source, _STATE).wait()
        return state

    state = through(first, initial if axis.is_first else receive(axis.rank - 1))
    if not axis.is_last:
        axis.send(state, axis.rank + 1, _STATE).wait()
        state = receive(axis.rank + 1)
    state = through(second, state)
    if not axis.is_first:
        axis.send(state, axis.rank - 1, _STATE).wait()
    return starts, state


def _applied(transition: Tensor, state: Tensor) -> Tensor:
    return transition * state if transition.shape[-1] == 1 else transition @ state


def _order(count: int, reverse: bool) -> Any:
    return reversed(range(count)) if reverse else range(count)
