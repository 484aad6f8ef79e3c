"""The scan of a state, and the tokens in front of a piece, over the context axis: numbers, gradients and bytes sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from triax.context.order import positions, shard
from triax.context.previous import previous
from triax.context.scan import scan
from triax.grid import Grid
from triax.testing import count_bytes

BATCH, HEADS, KEYS, VALUES = 2, 3, 4, 5


def inputs(kind: str, chunks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Transitions, updates, an initial state, and weights of the states, of the whole sequence."""
    torch.manual_seed(1)
    size = KEYS if kind == "matrix" else 1
    transitions = torch.randn(BATCH, chunks, HEADS, size, size, dtype=torch.float64)
    updates = torch.randn(BATCH, chunks, HEADS, KEYS, VALUES, dtype=torch.float64)
    initial = torch.randn(BATCH, HEADS, KEYS, VALUES, dtype=torch.float64)
    return transitions, updates, initial, torch.randn_like(updates)


def one_by_one(kind: str, chunks: int, alone: bool) -> tuple[Tensor, ...]:
    """The states in front of the chunks, the last state, and the gradients, by the recurrence as it is written.

    On one process the last state has a gradient too, and so has the initial one.
    """
    transitions, updates, initial, weights = inputs(kind, chunks)
    transitions.requires_grad_(), updates.requires_grad_(), initial.requires_grad_()
    state = initial
    states = []
    for i in range(chunks):
        states.append(state)
        a = transitions[:, i]
        state = (a if kind == "matrix" else a * torch.eye(KEYS)) @ state + updates[:, i]
    before = torch.stack(states, 1)
    ((before * weights).sum() + (alone * state * weights[:, 0]).sum()).backward()
    assert transitions.grad is not None and updates.grad is not None and initial.grad is not None
    return before.detach(), state.detach(), transitions.grad, updates.grad, initial.grad


def scanned(kind: str, chunks: int) -> tuple[list[Tensor], dict[str, float], dict[str, float]]:
    """Return this rank's chunks of what ``one_by_one`` returns, and the bytes sent forward and backward."""
    grid = Grid(context=torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1)
    pieces = 1 if grid.context.size == 1 else 2
    transitions, updates, initial, weights = inputs(kind, chunks)
    cut = [shard(x, grid.context).unflatten(1, (pieces, -1)) for x in (transitions, updates, weights)]
    a, u = (x.clone().requires_grad_() for x in cut[:2])
    alone = grid.context.size == 1
    with count_bytes(grid) as forward:
        before, last = scan(a, u, initial.requires_grad_(alone), grid.context)
    assert last.requires_grad == alone
    with count_bytes(grid) as backward:
        ((before * cut[2]).sum() + (alone * last * weights[:, 0]).sum()).backward()
    assert a.grad is not None and u.grad is not None
    found = [before.detach().flatten(1, 2), last.detach(), a.grad.flatten(1, 2), u.grad.flatten(1, 2)]
    return [*found, *([] if initial.grad is None else [initial.grad])], forward, backward


CASES = [(kind, chunks) for kind in ("number", "matrix") for chunks in (8, 16)]


def scanned_all() -> list[tuple[list[Tensor], dict[str, float], dict[str, float]]]:
    return [scanned(*case) for case in CASES]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_parallel_scan_equals_the_recurrence(ranks: Any, count: int) -> None:
    size = BATCH * HEADS * KEYS * VALUES * 8  # |S|, whatever the number of chunks
    every = [scanned_all()] if count == 1 else ranks(count, scanned_all)
    for rank, cases in enumerate(every):
        for (kind, chunks), (found, forward, backward) in zip(CASES, cases, strict=True):
            held = positions(chunks, count, rank)
            assert len(found) == (5 if count == 1 else 4)
            for i, (mine, whole) in enumerate(zip(found, one_by_one(kind, chunks, count == 1), strict=False)):
                if i in (0, 2, 3):
                    torch.testing.assert_close(mine, whole[:, held], rtol=1e-10, atol=1e-10)
                elif rank == 0:
                    torch.testing.assert_close(mine, whole, rtol=1e-10, atol=1e-10)
            sent = {"context": size * (1 if rank in (0, count - 1) else 2)} if count > 1 else {}
            assert forward == backward == sent


def fetched(length: int, count: int) -> tuple[Tensor, Tensor, dict[str, float], dict[str, float]]:
    grid = Grid(context=torch.distributed.get_world_size())
    whole = torch.arange(2.0 * length * 3).double().view(2, length, 3) + 1
    mine = shard(whole, grid.context).clone().requires_grad_()
    with count_bytes(grid) as forward:
        found = previous(mine, count, grid.context)
    with count_bytes(grid) as backward:
        (found * (1 + torch.arange(count, dtype=torch.float64)[:, None])).sum().backward()
    assert mine.grad is not None
    return found.detach(), mine.grad, forward, backward


def fetched_all(cases: list[tuple[int, int]]) -> list[tuple[Tensor, Tensor, dict[str, float], dict[str, float]]]:
    return [fetched(*case) for case in cases]


@pytest.mark.parametrize(("size", "cases"), [(2, [(16, 3), (8, 3)]), (4, [(32, 3), (8, 3)])])
def test_each_piece_fetches_the_tokens_in_front_of_it(ranks: Any, size: int, cases: list[tuple[int, int]]) -> None:
    """Pieces may be shorter than the tokens to fetch."""
    every = ranks(size, fetched_all, cases)
    for number, (length, count) in enumerate(cases):
        whole = torch.arange(2.0 * length * 3).double().view(2, length, 3) + 1
        padded = torch.cat([torch.zeros(2, count, 3).double(), whole], 1)
        piece = length // (2 * size)
        gradient = torch.zeros(length, dtype=torch.float64)
        for start in range(0, length, piece):
            for j in range(count):
                if start - count + j >= 0:
                    gradient[start - count + j] += 1 + j
        for rank, results in enumerate(every):
            found, grad, forward, backward = results[number]
            for i, at in enumerate((rank, 2 * size - 1 - rank)):
                assert torch.equal(found[:, i], padded[:, at * piece : at * piece + count])
            torch.testing.assert_close(grad, gradient[positions(length, size, rank)][None, :, None].expand(2, -1, 3))
            sent = 2 * min(count, piece) * (2 * 3 * 8) * (size - 1)
            assert forward == backward == {"context": sent}
