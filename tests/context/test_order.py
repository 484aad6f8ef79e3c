"""Zigzag order: positions, shards and their inverse, and the balance of a causal mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from triax.context import gather, positions, shard, unshard
from triax.context.order import local_length, runs
from triax.grid import Grid

SIZES = [(8, 2, 1), (5, 2, 1), (1, 4, 1), (13, 3, 1), (16, 4, 2), (21, 4, 4), (10, 2, 3), (7, 1, 2)]


def test_rank_r_holds_chunks_r_and_2c_minus_1_minus_r() -> None:
    assert positions(8, 2, 0).tolist() == [0, 1, 6, 7]
    assert positions(8, 2, 1).tolist() == [2, 3, 4, 5]
    assert positions(7, 1, 0).tolist() == list(range(7))


@pytest.mark.parametrize(("length", "size", "multiple"), SIZES)
def test_every_position_lies_on_one_rank(length: int, size: int, multiple: int) -> None:
    held = [positions(length, size, rank, multiple).tolist() for rank in range(size)]
    local = local_length(length, size, multiple)
    assert sorted(at for part in held for at in part) == list(range(size * local))
    assert all(part == sorted(part) and len(part) == local for part in held)
    assert size == 1 or (local % multiple == 0 and local % 2 == 0)
    for rank in range(size):
        real = [at for start, stop in runs(length, local, size, rank) for at in range(start, stop)]
        assert real == [at for at in held[rank] if at < length] == held[rank][: len(real)]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_zigzag_order_gives_ranks_equal_causal_work(size: int) -> None:
    work = [int((positions(4096, size, rank) + 1).sum()) for rank in range(size)]
    assert max(work) / (sum(work) / size) <= 1.02


def round_trip_on_rank() -> list[tuple[Any, ...]]:
    """For each case: the whole sequence back, the gradient of x, and that of the local part, for both gathers."""
    axis = Grid().data
    found = []
    for length, multiple, dim in ((8, 1, 1), (5, 1, 1), (13, 2, -1), (2, 1, 0)):
        shape = [3, 4, 5]
        shape[dim] = length
        x = torch.arange(3.0 * 4 * 5 * length)[: torch.Size(shape).numel()].view(shape).double().requires_grad_()
        for partial in (False, True):
            part = shard(x, axis, dim, fill=-1, multiple=multiple)
            at = positions(length, axis.size, axis.rank, multiple)
            expected = torch.full([len(at) if d == dim % 3 else n for d, n in enumerate(shape)], -1.0).double()
            expected.index_copy_(dim, torch.arange(int((at < length).sum())), x.index_select(dim, at[at < length]))
            assert torch.equal(part, expected)
            whole = gather(part, axis, length, dim, partial)
            assert torch.equal(whole, x)
            (grad,) = torch.autograd.grad((whole * (x.detach() + 1)).sum(), x)
            found.append((length, dim, partial, x.detach(), grad))
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gather_is_the_inverse_of_shard(ranks: Any, size: int) -> None:
    found = ranks(size, round_trip_on_rank)
    for cases in zip(*found, strict=True):
        _, _, partial, x, _ = cases[0]
        total = sum(case[-1] for case in cases)
        assert torch.equal(total, (x + 1) * (size if partial else 1)), cases[0][:3]


def test_shard_and_gather_on_one_rank_copy_nothing() -> None:
    axis = Grid().data
    x = torch.ones(2, 3)
    assert shard(x, axis) is x
    assert gather(x, axis, 3) is x
    parts: list[Tensor] = [x]
    assert unshard(parts, 3) is x
