"""Bytes that attention sends and keeps equal their formulas, and blocks that a mask excludes are not computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from triax.context import FixedSparsity, attention, make_sparsity
from triax.context.block_sparse import BlockSparse
from triax.context.documents import Documents
from triax.context.mask import Mask, tiles
from triax.context.order import runs
from triax.grid import Grid

from support.resident import Growth

BATCH, HEADS, KEY_HEADS, LENGTH, DIM = 2, 8, 4, 48, 16


def traffic_on_rank(dtype: torch.dtype) -> dict[str, tuple[dict[str, float], dict[str, float], int]]:
    """Kind -> bytes sent forward and backward by collective, and bytes that the forward pass keeps."""
    grid = Grid(context=torch.distributed.get_world_size())
    local = LENGTH // grid.context.size
    found = {}
    for kind in ("ring", "ulysses", "gather"):
        shapes = [(BATCH, heads, local, DIM) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
        q, k, v = (torch.ones(shape, dtype=dtype).requires_grad_() for shape in shapes)
        kept: dict[int, int] = {}

        def keep(x: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        passes = []
        grid.traffic.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = attention(q, k, v, grid=grid, kind=kind)
        passes.append({name: sent.bytes for name, sent in grid.traffic.report()["context"].items()})
        grid.traffic.clear()
        out.sum().backward()
        passes.append({name: sent.bytes for name, sent in grid.traffic.report()["context"].items()})
        found[kind] = (passes[0], passes[1], sum(kept.values()))
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_sent_and_kept_equal_the_formulas(ranks: Any, size: int) -> None:
    keys = BATCH * KEY_HEADS * LENGTH * DIM * 8  # S: bytes of K of the whole sequence
    queries = BATCH * HEADS * LENGTH * DIM * 8
    share = (size - 1) / size
    for found in ranks(size, traffic_on_rank, torch.float64):
        assert found["ring"][:2] == ({"send": 2 * keys * share}, {"send": 4 * keys * share})
        assert found["gather"][0] == {"all_gather": 2 * keys * share}
        assert found["gather"][1] == {"all_gather": 2 * keys * share, "reduce_scatter": 2 * keys * share}
        exchanged = (2 * queries + 2 * keys) / size * share
        assert found["ulysses"][:2] == ({"all_to_all": exchanged}, {"all_to_all": exchanged})
        # q, k, v, the output, and one number for each query and head: 1/c of one process's.
        numbers = BATCH * HEADS * LENGTH * 8
        assert {kind: kept for kind, (_, _, kept) in found.items()} == dict.fromkeys(
            found, (2 * queries + 2 * keys + numbers) // size
        )


def test_gradients_of_16_bit_tensors_are_sent_in_float32(ranks: Any) -> None:
    keys = BATCH * KEY_HEADS * LENGTH * DIM * 2
    for found in ranks(2, traffic_on_rank, torch.bfloat16):
        assert found["ring"][:2] == ({"send": keys}, {"send": keys + 2 * keys})


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_zigzag_balances_a_causal_mask(size: int) -> None:
    """The busiest rank's scores over the mean, counted in the tiles that are computed."""
    length = 4096 - 4096 % (2 * size)
    held = [runs(length, length // size, size, rank) for rank in range(size)]
    work = []
    for mine in held:
        computed = [tile for theirs in held for tile in tiles(mine, theirs, causal=True)]
        areas = [
            (tile.queries.stop - tile.queries.start) * (tile.keys.stop - tile.keys.start) / (1 + tile.causal)
            for tile in computed
        ]
        work.append(sum(areas))
    assert max(work) / (sum(work) / size) <= 1.02
    assert sum(work) == length**2 / 2


def computed(mask: Mask, heads: int = 2, rank: int = 0, size: int = 1) -> int:
    """Scores that a rank computes, over the keys of all ranks."""
    local = mask.length // size
    q, k = torch.empty(1, heads, local, 8), torch.empty(1, heads, local, 8)
    held = [runs(mask.length, local, size, other) for other in range(size)]
    return sum(BlockSparse(q, k, mask, held[rank], theirs).work() for theirs in held)


@pytest.mark.parametrize("mode", ["fixed", "variable", "bigbird", "bslongformer"])
@pytest.mark.parametrize("size", [1, 4])
def test_attention_computes_little_more_than_the_kept_blocks(mode: str, size: int) -> None:
    sparsity = make_sparsity({"mode": mode, "attention": "unidirectional", "different_layout_per_head": True})
    layout = sparsity.layout(2048, range(2))
    mask = Mask(2048, True, layout=layout, block=16)
    kept = int(layout.tril().sum()) * 16**2
    work = sum(computed(mask, rank=rank, size=size) for rank in range(size))
    assert kept <= work <= 1.2 * kept
    assert work < 0.5 * 2 * 2048**2 / 2


def seen(length: int, causal: bool, window: int | None = None, documents: Tensor | None = None) -> int:
    """Number of pairs of a query and a key that it sees, counted in a plain mask of the whole sequence."""
    query, key = torch.arange(length)[:, None], torch.arange(length)
    mask = (key <= query) if causal else torch.ones(length, length, dtype=torch.bool)
    if window is not None:
        mask = mask & (query - key < window)
    if documents is not None:
        mask = mask & (documents[:, None] == documents)
    return int(mask.sum())


@pytest.mark.parametrize("size", [1, 4])
def test_scores_outside_of_windows_and_documents_are_skipped(size: int) -> None:
    """All scores that count are computed, and at most a block of 128 more on either side of each row of them."""
    length, heads, block = 4096, 2, 128

    def total(mask: Mask) -> int:
        return sum(computed(mask, heads, rank, size) for rank in range(size))

    window = heads * seen(length, True, window=256)
    assert window <= total(Mask(length, True, window=256)) <= window + heads * length * 2 * block
    documents = torch.arange(length) // 512
    causal = heads * seen(length, True, documents=documents)
    assert causal <= total(Mask(length, True, documents=Documents(documents[None]))) <= causal + heads * length * block
    both_ways = heads * seen(length, False, documents=documents)
    assert both_ways == heads * 8 * 512**2
    assert total(Mask(length, False, documents=Documents(documents[None]))) == both_ways


@pytest.mark.parametrize("seed", range(3))
def test_padding_adds_at_most_a_quarter_to_the_work_of_documents(seed: int) -> None:
    """Documents of lognormal lengths, of 64 tokens in the median, in calls that are far fewer than documents."""
    lengths = (64 * torch.randn(4000, generator=torch.Generator().manual_seed(seed)).exp()).long() + 1
    numbers = torch.arange(len(lengths)).repeat_interleave(lengths)[:8192].view(2, 4096)
    exact = sum(int((row.unique(return_counts=True)[1] ** 2).sum()) for row in numbers)
    x, work, calls = torch.randn(2, 1, 4096, 4), 0, 0

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal work, calls
        work, calls = work + q.shape[0] * q.shape[2] ** 2, calls + 1
        return v

    assert torch.equal(Documents(numbers).attend(attend, x, x, x), x)  # each token comes back to its place
    assert exact <= work <= 1.25 * exact and calls < 20


@pytest.mark.parametrize("length", [2048, 8192, 32768])
def test_attention_of_packed_rows_takes_memory_that_grows_with_T(length: int) -> None:
    """At T = 32,768 a mask of T x T numbers would take 2,048 times the bytes of q."""
    q, k, v = (torch.randn(1, 2, length, 8).requires_grad_() for _ in range(3))
    documents = (torch.arange(length) // 300)[None]
    growth = Growth()
    attention(q, k, v, grid=Grid(), documents=documents).sum().backward()
    assert growth.measure()[0] < 24 * q.nbytes + 8 * 2**20


def test_a_sparse_layout_is_computed_once() -> None:
    sparsity = FixedSparsity(block=4)
    assert sparsity.layout(64) is sparsity.layout(64)
