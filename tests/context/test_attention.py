"""Attention over the context axis equals plain attention on the whole sequence: outputs and all gradients."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from triax.context import Sparsity, attention, block, block_sparse, make_sparsity, positions, shard
from triax.context import context_attention as context_attention_file
from triax.context.context_attention import KINDS, context_attention
from triax.grid import Grid

from support.differences import largest

BOUND = 1e-12


@dataclass(frozen=True, kw_only=True)
class OtherBlocks(Sparsity):
    """Each block sees the others: within a window shorter than a block, some of its queries see no key."""

    def _fill(self, blocks: Tensor, head: int) -> None:
        blocks.fill_(True).fill_diagonal_(False)


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
    sinks: bool = False
    softcap: float | None = None


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
# More than 32 blocks in a list, whose length is then rounded up.
LONG = {"mode": "bigbird", "block": 2, "num_random_blocks": 33}
SPARSE += [Case(kind, False, length=150, sparsity=make_sparsity(LONG)) for kind in KINDS]
UNSEEING = [
    Case(kind, causal, length=39, window=3, sparsity=OtherBlocks(block=4), softcap=softcap)
    for kind, causal, softcap in itertools.product(KINDS, (True, False), (None, 1.5))
]
SINKS = [
    Case(kind, causal, heads, length, documents, window, sinks=True)
    for (kind, causal), heads, (length, documents, window) in itertools.product(
        itertools.product(KINDS, (True, False)), ((4, 2), (3, 1)), ((32, False, None), (29, True, None), (32, False, 7))
    )
]
CAPPED = [
    Case(kind, causal, length=29, documents=documents, window=window, sparsity=sparsity, sinks=sinks, softcap=1.5)
    for kind, causal, documents, (window, sparsity, sinks) in itertools.product(
        *(KINDS, (True, False), (True, False)),
        ((None, None, False), (7, None, True), (None, make_sparsity({"block": 4, **SECTIONS[1]}), False)),
    )
]

# On 2 or 4 ranks, which divide the query heads: their greatest common divisor with the key heads decides the copies.
REPEATED = [Case("ulysses", heads=heads) for heads in ((6, 3), (12, 6))]


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


def plain(q: Tensor, k: Tensor, v: Tensor, case: Case, documents: Tensor | None, sinks: Tensor | None = None) -> Tensor:
    """Attention with the whole matrix of scores, and with one more column of them for the sinks."""
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
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks[:, None, None].expand(*scores.shape[:3], 1)
        return torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1] @ v
    # A query that sees nothing: its weights are not numbers, and count as 0.
    weights = torch.softmax(scores.masked_fill(~seen.any(-1, keepdim=True), 0.0), -1) * seen.any(-1, keepdim=True)
    return weights @ v


def errors_on_rank(cases: list[Case]) -> list[float]:
    """The largest difference of a case's output or gradients from plain attention, for this rank's tokens."""
    axis = Grid().data
    found = []
    before = block_sparse._BLOCK
    for case in cases:
        whole, documents = tensors(case)
        inputs = [x.clone().requires_grad_() for x in whole[:3]]
        sinks = [torch.linspace(-2, 3, case.heads[0]).double().requires_grad_()] if case.sinks else []
        expected = plain(inputs[0], inputs[1], inputs[2], case, documents, *sinks)
        *expected_grads, total = torch.autograd.grad(expected, [*inputs, *(sinks or inputs[:1])], whole[3])
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
                sinks=sinks[0] if sinks else None,
                softcap=case.softcap,
            )
            *grads, part = torch.autograd.grad(out, [*parts, *(sinks or parts[:1])], shard(whole[3], axis, dim=2))
        finally:
            block_sparse._BLOCK = before
        pairs = zip((out.detach(), *grads), (expected.detach(), *expected_grads), strict=True)
        found.append(largest((ours - shard(theirs, axis, dim=2)).abs().max() for ours, theirs in pairs))
        if case.sinks:  # each rank has the gradient of its own tokens
            axis.all_reduce(part)
            found[-1] = largest([found[-1], (part - total).abs().max()])
    return found


def require_equal_to_plain(ranks: Any, size: int, cases: list[Case]) -> None:
    for found in ranks(size, errors_on_rank, cases, timeout=120):
        wrong = [(case, error) for case, error in zip(cases, found, strict=True) if not error < BOUND]
        assert not wrong, wrong


@pytest.mark.parametrize("size", [1, 2, 4])
def test_context_parallel_attention_equals_plain_attention(ranks: Any, size: int) -> None:
    """A sample with all combinations of two properties, because 5 and 11 divide none of their numbers of values."""
    step = 11 if size == 4 else 5
    require_equal_to_plain(ranks, size, (PLAIN + ODD + SPARSE)[::step] + SINKS[::5] + CAPPED[::5] + REPEATED + UNSEEING)


@pytest.mark.parametrize("largest_mask", [0, 2**24])
def test_documents_that_see_later_tokens_equal_plain_attention(
    largest_mask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one rank: a mask of the whole rows if it is small, else the blocks that hold scores."""
    case = Case(causal=False, length=29, documents=True)
    (q, k, v, dout), documents = tensors(case)
    monkeypatch.setattr(context_attention_file, "_LARGEST_MASK", largest_mask)
    found = []
    for attend in (
        partial(attention, grid=Grid(), causal=False, documents=documents),
        partial(plain, case=case, documents=documents),
    ):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attend(*inputs)
        found.append([out, *torch.autograd.grad(out, inputs, dout)])
    assert largest((a - b).detach().abs().max() for a, b in zip(*found, strict=True)) < BOUND


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_attention_with_every_option_equals_plain_attention(ranks: Any, size: int) -> None:
    require_equal_to_plain(ranks, size, PLAIN + ODD + SPARSE + SINKS + CAPPED + REPEATED + UNSEEING)


@pytest.mark.parametrize("kernel", ["flash", "plain"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_attention_over_merged_blocks_equals_plain_attention(
    kernel: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three blocks of keys, one of them masked in part, by both kernels: output and gradients."""
    if kernel == "plain":
        monkeypatch.setattr(block, "_flash", lambda q, mask: False)
        monkeypatch.setattr(block, "_CHUNK", 40)
    (q, k, v, dout), _ = tensors(Case(length=12, width=5))
    mask = torch.zeros(1, 1, 12, 4, dtype=torch.float64)
    mask[:, :, 2:9, :3] = mask[:, :, 5] = -torch.inf
    inputs = [x.to(dtype, copy=True).double().requires_grad_() for x in (q, k, v)]
    scores = (inputs[0].unflatten(1, (2, 2)) @ inputs[1][:, :, None].mT).flatten(1, 2) * 0.5
    hidden = torch.cat([torch.zeros(1, 1, 12, 8).double(), mask], -1)
    hidden[:, :, :, 4:8] = hidden[:, :, :, 4:8].masked_fill(
        (torch.arange(12)[:, None] - 4 < torch.arange(4)), -torch.inf
    )
    weights = torch.softmax(scores + hidden, -1).unflatten(1, (2, 2))
    expected = (weights @ inputs[2][:, :, None]).flatten(1, 2)
    grads = torch.autograd.grad(expected, inputs, dout.to(dtype).double())

    q, k, v, dout = (x.to(dtype) for x in (q, k, v, dout))
    total = block.Merged((2, 4, 12, 5), q)
    square, diagonal = slice(4, 8), slice(4, 8)  # queries 4 to 7 see keys 4 to 7 causally, later queries all of them
    calls: list[tuple[slice, slice, bool, Tensor | None]] = [
        (slice(0, 12), slice(0, 4), False, None),
        (square, diagonal, True, None),
        (slice(8, 12), diagonal, False, None),
        (slice(0, 12), slice(8, 12), False, mask.to(dtype)),
    ]
    for rows, keys, causal, seen in calls:
        total.add(rows, *block.forward(q[:, :, rows], k[:, :, keys], v[:, :, keys], 0.5, causal, seen))
    found = [torch.zeros_like(x).double() for x in (q, k, v)]
    for rows, keys, causal, seen in calls:
        do, mine, out, lse = (x[:, :, rows] for x in (dout, q, total.out, total.lse))
        parts = block.backward(do, mine, k[:, :, keys], v[:, :, keys], out, lse, 0.5, causal, seen)
        for sums, at, part in zip(found, (rows, keys, keys), parts, strict=True):
            sums[:, :, at] += part
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.06, torch.float16: 0.01}[dtype]
    for ours, theirs in zip((total.out, *found), (expected.detach(), *grads), strict=True):
        assert float((ours - theirs).abs().max()) < bound


def half_on_rank() -> dict[Any, tuple[torch.dtype, float]]:
    """Kind, mask and dtype -> dtypes of the gradients, and the error of output and gradients."""
    axis, found = Grid().data, {}
    for kind, window, dtype in itertools.product(KINDS, (None, 9), (torch.bfloat16, torch.float16)):
        case = Case(kind, window=window, length=32)
        (q, k, v, dout), _ = tensors(case)
        inputs = [x.to(dtype, copy=True).double().requires_grad_() for x in (q, k, v)]
        expected = plain(inputs[0], inputs[1], inputs[2], case, None)
        expected_grads = torch.autograd.grad(expected, inputs, dout.to(dtype).double())
        # Autocast casts the inputs.
        parts = [shard(x.detach().float(), axis, 2).clone().requires_grad_() for x in inputs]
        with torch.autocast("cpu", dtype):
            out = context_attention(*parts, axis=axis, kind=kind, window=window)
        assert out.dtype == dtype
        grads = torch.autograd.grad(out, parts, shard(dout.to(dtype), axis, 2))
        pairs = zip((out.detach(), *grads), (expected.detach(), *expected_grads), strict=True)
        error = largest((ours.double() - shard(theirs, axis, 2)).abs().max() for ours, theirs in pairs)
        found[kind, window, dtype] = (grads[0].dtype, error)
    return found


def test_attention_in_16_bits_keeps_float32_gradients(ranks: Any) -> None:
    for found in ranks(2, half_on_rank):
        for (kind, window, dtype), (grad, error) in found.items():
            assert grad == torch.float32, kind
            assert error < (0.06 if dtype == torch.bfloat16 else 0.01), (kind, window, dtype, error)


def padding_on_rank() -> list[tuple[float, float]]:
    """For each kind, the output of padding, and the change of the gradients by a gradient of it."""
    axis, found = Grid().data, []
    for kind, causal, window in itertools.product(KINDS, (True, False), (None, 4)):
        parts = [torch.randn(1, 2, 4, 8).double().requires_grad_() for _ in range(3)]
        documents = torch.zeros(1, 5, dtype=torch.int64)  # 3 of 8 places are padding
        options: dict[str, Any] = {"causal": causal, "window": window, "documents": documents}
        out = context_attention(*parts, axis=axis, kind=kind, **options)
        pad = (positions(5, 2, axis.rank) >= 5).nonzero()[:, 0]
        dout = torch.ones_like(out)
        grads = []
        for value in (0.0, 100.0):
            dout[:, :, pad] = value
            grads.append(torch.autograd.grad(out, parts, dout, retain_graph=True))
        change = largest((a - b).abs().max() for a, b in zip(*grads, strict=True))
        found.append((float(out.detach()[:, :, pad].abs().sum()), change))
    return found


def test_padding_has_the_output_0_and_no_gradient(ranks: Any) -> None:
    for found in ranks(2, padding_on_rank):
        assert found == [(0.0, 0.0)] * len(found)


def public_on_rank() -> list[float]:
    """Errors of the public function on context x tensor, with heads sharded over tensor and a layout for each head."""
    grid, found = Grid(context=2, tensor=2), []
    for sparsity in (None, make_sparsity({"block": 4, "mode": "bigbird", "different_layout_per_head": True})):
        for kind in KINDS:
            case = Case(kind, heads=(4, 2), length=30, documents=True, sparsity=sparsity)
            (q, k, v, _), documents = tensors(case)
            expected = plain(q, k, v, case, documents)
            t = grid.tensor.rank
            q, k, v, expected = (x.chunk(2, dim=1)[t] for x in (q, k, v, expected))
            parts = (shard(x, grid.context, 2) for x in (q, k, v))
            out = attention(*parts, grid=grid, kind=kind, documents=documents, sparsity=sparsity)
            found.append(float((out - shard(expected, grid.context, 2)).abs().max()))
    return found


def test_attention_on_sharded_heads_equals_plain_attention(ranks: Any) -> None:
    for found in ranks(4, public_on_rank):
        assert max(found) < BOUND


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "star"}, "Give one of ring, ulysses, gather"),
        ({"window": 0}, "window=0"),
        ({"k": torch.ones(2, 3, 8, 4), "v": torch.ones(2, 3, 8, 4)}, "a number of heads of k and v that divides 4"),
        ({"v": torch.ones(2, 4, 6, 4)}, r"Give \(B, H, T, dim\)"),
        ({"documents": torch.zeros(2, 9)}, "document numbers of the whole sequences"),
        ({"sparsity": make_sparsity({"different_layout_per_head": True, "num_heads": 6})}, "Set num_heads"),
    ],
)
def test_attention_errors_say_what_to_change(change: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {name: torch.ones(2, 4, 8, 4) for name in "qkv"}
    with pytest.raises(ValueError, match=words):
        attention(**arguments | change, grid=Grid())


def wrong_on_rank() -> list[str]:
    """Messages of errors that only several ranks have."""
    grid, found = Grid(context=2), []
    for local, length in ((3, 6), (8, 8)):
        q = torch.ones(2, 4, local, 4)
        with pytest.raises(ValueError) as error:
            attention(q, q, q, grid=grid, documents=torch.zeros(2, length, dtype=torch.int64))
        found.append(str(error.value))
    q = torch.ones(2, 4, 3, 4)
    with pytest.raises(ValueError) as error:
        attention(q, q, q, grid=grid)
    return [*found, str(error.value)]


def test_attention_errors_on_several_ranks_say_what_to_give(ranks: Any) -> None:
    for found in ranks(2, wrong_on_rank):
        assert "Give the document numbers of the whole sequence on every rank" in found[0]
        assert "documents have 8 tokens, of which each of 2 ranks holds 4, but q has 8" in found[1]
        assert "Take this rank's tokens with triax.context.shard" in found[2]


@pytest.mark.parametrize(
    "options",
    # One document, and a window as long as the sequence, mask nothing.
    [{}, {"documents": torch.zeros(2, 32, dtype=torch.int64)}, {"window": 32}],
    ids=["plain", "one document", "whole window"],
)
def test_attention_on_one_rank_equals_torch_bitwise(options: dict[str, Any]) -> None:
    (q, k, v, _), _ = tensors(Case())
    assert q.shape[2] == 32
    torchs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert torch.equal(attention(q, k, v, grid=Grid(), **options), torchs)


def test_document_numbers_written_in_place_are_read_anew() -> None:
    """A caller may keep one tensor for the document numbers of all batches."""
    case, buffer = Case(), torch.empty(2, 32, dtype=torch.int64)
    (q, k, v, _), _ = tensors(case)
    for length in (32, 5, 11):  # 32: one document
        buffer.copy_((torch.arange(32) // length).expand(2, 32))
        wanted = plain(q, k, v, case, buffer)
        for _ in range(2):  # layers
            torch.testing.assert_close(attention(q, k, v, grid=Grid(), documents=buffer), wanted, rtol=0, atol=BOUND)


class Operations(TorchDispatchMode):
    """Counter of torch's operations."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def test_a_dry_run_counts_flash_kernels_not_plain_operations() -> None:
    """Not for the plain computation, whose hundreds of operations a dry run takes minutes for."""
    q, k = (torch.empty(1, heads, 4096, 128, dtype=torch.bfloat16, device="meta") for heads in (64, 8))
    with Operations() as operations:
        out, lse = block.forward(q, k, k, 0.1, causal=True)
        found = block.backward(out, q, k, k, out, lse, 0.1, causal=True)
    assert [x.shape for x in found] == [q.shape, k.shape, k.shape]
    assert lse.dtype == torch.float32 and out.dtype == torch.bfloat16
    assert operations.number < 10
