"""Attention over the context axis equals plain attention on the whole sequence: outputs and all gradients."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from triax.context import Sparsity, block_sparse, make_sparsity, shard
from triax.context.context_attention import KINDS, context_attention
from triax.grid import Grid

BOUND = 1e-10


@dataclass(frozen=True)
class Case:
    kind: str = "ring"
    causal: bool = True
    heads: tuple[int, int] = (4, 2)
    length: int = 32
    documents: bool = False
    window: int | None = None
    sparsity: Sparsity | None = None
    width: int = 8  # of values; queries and keys have 8
    block: int = 8  # block size of masks without blocks


PLAIN = [
    Case(kind, causal, heads, length, documents, window)
    for kind, causal, heads, length, documents, window in itertools.product(
        KINDS, (True, False), ((4, 4), (4, 2), (6, 1)), (32, 29), (False, True), (None, 7)
    )
]
ODD = [
    Case(kind, causal, heads=(3, 3), length=length, width=5, block=4)
    for kind, causal, length in itertools.product(KINDS, (True, False), (1, 3, 17))
]
SECTIONS: list[dict[str, Any]] = [
    {"mode": "dense"},
    {"mode": "fixed", "num_local_blocks": 2},
    {"mode": "fixed", "attention": "unidirectional", "different_layout_per_head": True}
    | {"num_different_global_patterns": 4},
    {"mode": "variable", "num_random_blocks": 1, "local_window_blocks": [1, 3], "global_block_indices": [0, 4]}
    | {"global_block_end_indices": [1, 6], "horizontal_global_attention": True},
    {"mode": "bigbird", "different_layout_per_head": True},
    {"mode": "bslongformer", "attention": "unidirectional", "global_block_indices": [2]},
]
SPARSE = [
    Case(kind, causal, (4, 2), length, documents, window, make_sparsity({"block": 4, **section}))
    for kind, causal, (length, documents, window), section in itertools.product(
        KINDS, (True, False), ((32, False, None), (37, True, 9)), SECTIONS
    )
]


def tensors(case: Case, batch: int = 2) -> tuple[list[Tensor], Tensor | None]:
    """q, k, v and the gradient of the output, of the whole sequence, and its documents."""
    generator = torch.Generator().manual_seed(5)
    heads, key_heads = case.heads
    shapes = [(heads, 8), (key_heads, 8), (key_heads, case.width), (heads, case.width)]
    whole = [torch.randn(batch, h, case.length, d, generator=generator).double() for h, d in shapes]
    documents = None
    if case.documents:
        starts = torch.rand(batch, case.length, generator=generator) < 0.15
        documents = starts.cumsum(1)
    return whole, documents


def plain(q: Tensor, k: Tensor, v: Tensor, case: Case, documents: Tensor | None) -> Tensor:
    """Attention with the whole matrix of scores."""
    at = torch.arange(case.length)
    distance = at[:, None] - at
    seen = torch.ones(1, 1, case.length, case.length, dtype=torch.bool)
    if case.causal:
        seen = seen & (distance >= 0)
    if case.window is not None:
        seen = seen & (distance.abs() < case.window)
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    if case.sparsity is not None:
        blocks = case.sparsity.layout(case.length, range(q.shape[1]))
        size = case.sparsity.block
        cells = blocks.repeat_interleave(size, 1).repeat_interleave(size, 2)
        seen = seen & cells[None, :, : case.length, : case.length]
    times = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
    # A query that sees nothing: its weights are not numbers, and count as 0.
    weights = torch.softmax(scores.masked_fill(~seen.any(-1, keepdim=True), 0.0), -1) * seen.any(-1, keepdim=True)
    return weights @ v


def errors_on_rank(cases: list[Case]) -> list[float]:
    """The largest difference of a case's output or gradients from plain attention, for this rank's tokens."""
    axis = Grid(data=torch.distributed.get_world_size()).data if torch.distributed.is_initialized() else Grid().data
    found = []
    before = block_sparse._BLOCK
    for case in cases:
        whole, documents = tensors(case)
        inputs = [x.clone().requires_grad_() for x in whole[:3]]
        expected = plain(*inputs, case, documents)
        expected_grads = torch.autograd.grad(expected, inputs, whole[3])
        if documents is None and case.length % (2 * axis.size):
            documents = torch.zeros(2, case.length, dtype=torch.int64)
        parts = [shard(x, axis, dim=2).clone().requires_grad_() for x in whole[:3]]
        try:
            block_sparse._BLOCK = case.block
            out = context_attention(
                *parts,
                axis=axis,
                kind=case.kind,
                causal=case.causal,
                documents=documents,
                window=case.window,
                sparsity=case.sparsity,
            )
            grads = torch.autograd.grad(out, parts, shard(whole[3], axis, dim=2))
        finally:
            block_sparse._BLOCK = before
        pairs = zip((out.detach(), *grads), (expected.detach(), *expected_grads), strict=True)
        found.append(max(float((ours - shard(theirs, axis, dim=2)).abs().max()) for ours, theirs in pairs))
    return found


def check(ranks: Any, size: int, cases: list[Case]) -> None:
    for found in ranks(size, errors_on_rank, cases, timeout=120):
        wrong = [(case, error) for case, error in zip(cases, found, strict=True) if not error < BOUND]
        assert not wrong, wrong


@pytest.mark.parametrize("size", [1, 2])
def test_it_equals_plain_attention(ranks: Any, size: int) -> None:
    check(ranks, size, PLAIN + ODD)


@pytest.mark.parametrize("size", [1, 2])
def test_sparse_attention_equals_the_dense_mask(ranks: Any, size: int) -> None:
    check(ranks, size, SPARSE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [3, 4])
def test_it_equals_plain_attention_on_more_ranks(ranks: Any, size: int) -> None:
    check(ranks, size, PLAIN + ODD + SPARSE)


def test_it_equals_plain_attention_on_four_ranks(ranks: Any) -> None:
    """A sample of the sweep."""
    check(ranks, 4, (PLAIN + ODD + SPARSE)[::11])
