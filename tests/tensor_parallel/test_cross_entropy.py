"""Vocab-parallel cross entropy is ``F.cross_entropy``: values and gradients, whatever the vocabulary's shards.

Megatron-LM's current head smooths over the shard instead of the vocabulary, and overwrites the caller's logits;
both have their test here.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from triax.grid import Grid
from triax.grid.comm.axis import Axis
from triax.grid.layout import Layout
from triax.tensor_parallel import vocab_parallel_cross_entropy

from support.sweeps import some
from support.toys import error_text

CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12, "equal_nan": True}
IGNORE = -100


def logits_of(shape: tuple[int, ...], scale: float = 3.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def labels_of(shape: tuple[int, ...], vocab: int, ignored: str) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(vocab, shape, generator=generator)
    if ignored == "some":
        labels[torch.rand(shape, generator=generator) < 0.3] = IGNORE
    elif ignored == "all":
        labels.fill_(IGNORE)
    return labels


def shard(whole: Tensor, grid: Grid) -> Tensor:
    layout = Layout(tuple(whole.shape), shard_dim=whole.dim() - 1)
    return layout.shard(whole, grid.tensor.rank, grid.tensor.size).clone()


CASES = [
    (vocab, ignored, smoothing, reduction)
    for vocab in (9, 257)  # 257 over 4 is uneven, 9 over 8 leaves most ranks one word
    for ignored in ("none", "some", "all")
    for smoothing in (0.0, 0.1, 1.0)
    for reduction in ("mean", "sum", "none")
]


def run_on_rank(size: int, cases: list[Any]) -> list[tuple[Tensor, Tensor]]:
    grid, found = Grid(tensor=size), []
    for vocab, ignored, smoothing, reduction in cases:
        logits = shard(logits_of((4, 6, vocab)), grid).requires_grad_()
        before = logits.detach().clone()
        labels = labels_of((4, 6), vocab, ignored)
        loss = vocab_parallel_cross_entropy(
            logits,
            labels,
            grid=grid,
            vocab_size=vocab,
            ignore_index=IGNORE,
            label_smoothing=smoothing,
            reduction=reduction,
        )
        loss.backward(torch.linspace(1, 2, loss.numel(), dtype=torch.float64).view(loss.shape))
        assert torch.equal(logits, before) and logits.grad is not None
        found.append((loss.detach(), logits.grad))
    return found


@pytest.mark.parametrize("size", some([1, 2, 4, 8], (1, 2)))
def test_vocab_parallel_cross_entropy_equals_torch(ranks: Any, size: int) -> None:
    found = ranks(size, run_on_rank, size, CASES)
    for i, (vocab, ignored, smoothing, reduction) in enumerate(CASES):
        logits = logits_of((4, 6, vocab)).requires_grad_()
        labels = labels_of((4, 6), vocab, ignored)
        loss = F.cross_entropy(
            logits.flatten(0, 1),
            labels.flatten(),
            ignore_index=IGNORE,
            label_smoothing=smoothing,
            reduction=reduction,
        )
        loss.backward(torch.linspace(1, 2, loss.numel(), dtype=torch.float64).view(loss.shape))
        loss = loss.detach().view(labels.shape) if reduction == "none" else loss.detach()
        case = f"{vocab} words, {ignored} ignored, smoothing {smoothing}, {reduction}"
        for result in found:
            torch.testing.assert_close(result[i][0], loss, **CLOSE, msg=case)
        grad = Layout((4, 6, vocab), shard_dim=2).assemble([result[i][1] for result in found])
        if ignored == "all" and reduction == "mean":
            # 0 / 0 in torch too; but nothing counts, so nothing flows back.
            assert bool(loss.isnan()) and not bool(grad.any())
        torch.testing.assert_close(grad, logits.grad, **CLOSE, msg=case)


def test_label_smoothing_uses_the_whole_vocabulary(ranks: Any) -> None:
    """The mean over a rank's own words would differ from rank to rank."""
    found = ranks(4, run_on_rank, 4, [(257, "none", 0.1, "mean")])
    values = [float(result[0][0]) for result in found]
    assert len(set(values)) == 1
    logits, labels = logits_of((4, 6, 257)), labels_of((4, 6), 257, "none")
    plain = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert abs(values[0] - float(plain)) > 0.01  # smoothing is visible at this scale


def many_rows_on_rank(size: int) -> tuple[Tensor, Tensor]:
    grid = Grid(tensor=size)
    logits = shard(logits_of((5000, 211)), grid).requires_grad_()  # more than one block of rows
    loss = vocab_parallel_cross_entropy(logits, labels_of((5000,), 211, "some"), grid=grid, vocab_size=211)
    loss.backward()
    assert logits.grad is not None
    return loss.detach(), logits.grad


@pytest.mark.parametrize("size", [1, 2])
def test_cross_entropy_in_row_blocks_equals_torch(ranks: Any, size: int) -> None:
    found = ranks(size, many_rows_on_rank, size)
    logits = logits_of((5000, 211)).requires_grad_()
    loss = F.cross_entropy(logits, labels_of((5000,), 211, "some"))
    loss.backward()
    torch.testing.assert_close(found[0][0], loss.detach(), **CLOSE)
    grad = Layout((5000, 211), shard_dim=1).assemble([result[1] for result in found])
    torch.testing.assert_close(grad, logits.grad, **CLOSE)


def extremes_on_rank(size: int) -> Tensor:
    grid = Grid(tensor=size)
    logits = logits_of((4, 10))
    logits[0] *= 1e5
    logits[1, 5:] = -torch.inf  # a masked half: at size 2 all of rank 1's words
    logits[2] += 1e4
    labels = torch.tensor([3, 4, 9, 0])
    return vocab_parallel_cross_entropy(
        shard(logits, grid), labels, grid=grid, vocab_size=10, reduction="none"
    ) - F.cross_entropy(logits, labels, reduction="none")


@pytest.mark.parametrize("size", [1, 2, 4])
def test_cross_entropy_of_huge_and_masked_logits_equals_torch(ranks: Any, size: int) -> None:
    for difference in ranks(size, extremes_on_rank, size):
        torch.testing.assert_close(difference, torch.zeros_like(difference), rtol=0, atol=1e-9)


def low_precision_on_rank(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    grid = Grid(tensor=size)
    logits = shard(logits_of((64, 257)).to(dtype), grid).requires_grad_()
    labels = labels_of((64,), 257, "some")
    loss = vocab_parallel_cross_entropy(logits, labels, grid=grid, vocab_size=257, label_smoothing=0.1, reduction="sum")
    loss.backward()
    assert logits.grad is not None
    return loss.detach(), logits.grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cross_entropy_of_16_bit_logits_is_computed_in_float32(ranks: Any, dtype: torch.dtype) -> None:
    logits = logits_of((64, 257)).to(dtype).float().requires_grad_()
    loss = F.cross_entropy(logits, labels_of((64,), 257, "some"), label_smoothing=0.1, reduction="sum")
    loss.backward()
    assert logits.grad is not None
    for size in (1, 2):
        found = ranks(size, low_precision_on_rank, size, dtype)
        for result in found:
            assert result[0].dtype == torch.float32
            assert float(result[0]) == pytest.approx(float(loss.detach()), rel=1e-6)
        grad = Layout((64, 257), shard_dim=1).assemble([result[1] for result in found])
        assert grad.dtype == dtype
        torch.testing.assert_close(grad, logits.grad.to(dtype), rtol=0.01, atol=1e-6)  # rounded once


def cost_on_rank(smoothing: float) -> tuple[list[int], list[int], int]:
    """Numbers in each all-reduce, forward and backward, and the bytes kept for the backward beside the input."""
    grid, sent = Grid(tensor=2), []

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.numel())
        return Axis.all_reduce(grid.tensor, tensor, *args, **kwargs)

    grid.tensor.all_reduce = counted  # type: ignore[method-assign]
    rows, vocab = 50, 200
    logits = shard(logits_of((rows, vocab)), grid).requires_grad_()
    labels = labels_of((rows,), vocab, "some")
    kept = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = vocab_parallel_cross_entropy(logits, labels, grid=grid, vocab_size=vocab, label_smoothing=smoothing)
    forward = sent.copy()
    sent.clear()
    loss.backward()
    kept.pop(logits.untyped_storage().data_ptr(), None)
    return forward, sent, sum(kept.values())


@pytest.mark.parametrize(("smoothing", "sums"), [(0.0, 2), (0.1, 3)])
def test_cross_entropy_needs_two_all_reduces_and_no_copy(ranks: Any, smoothing: float, sums: int) -> None:
    for forward, backward, kept in ranks(2, cost_on_rank, smoothing):
        assert forward == [50, sums * 50]
        assert backward == []
        assert kept <= 50 * (8 + 8 + 1) + 16  # a log-sum, a label and a flag a row; the logits take 40,000


def refused_on_rank(what: str) -> str:
    return error_text(lambda: call_wrongly(what, Grid(tensor=2)), (ValueError, IndexError))


def call_wrongly(what: str, grid: Grid) -> None:
    logits, labels, options = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.long), dict[str, Any]()
    match what:
        case "vocabulary":
            logits = torch.zeros(2, 3, 6)
        case "rows":
            labels = torch.zeros(3, 2, dtype=torch.long)
        case "label":
            labels[1, 2] = 10
        case "negative label":
            labels[1, 2] = -1
        case "smoothing":
            options = {"label_smoothing": 1.5}
        case "reduction":
            options = {"reduction": "max"}
    vocab_parallel_cross_entropy(logits, labels, grid=grid, vocab_size=10, **options)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("vocabulary", r"logits \(2, 3, 6\) .* holds 5 ids of a vocabulary of 10. Give logits \(2, 3, 5\)"),
        ("rows", r"logits \(2, 3, 5\) do not fit labels \(3, 2\)"),
        ("label", r"a label lies outside the vocabulary of 10 \(0 to 9\): the ids run from 0 to 10"),
        ("negative label", "the ids run from -1 to 0"),
        ("smoothing", r"label_smoothing is 1.5. Give a number in \[0, 1\]."),
        ("reduction", "reduction is 'max'. Give 'mean', 'sum' or 'none'"),
    ],
)
def test_cross_entropy_errors_state_the_numbers(ranks: Any, what: str, message: str) -> None:
    for said in ranks(2, refused_on_rank, what):
        assert re.search(message, said), said


def test_cross_entropy_of_no_rows_is_zero() -> None:
    logits = torch.zeros(0, 5, requires_grad=True)
    loss = vocab_parallel_cross_entropy(
        logits, torch.zeros(0, dtype=torch.long), grid=Grid(), vocab_size=5, reduction="sum"
    )
    loss.backward()
    assert float(loss.detach()) == 0.0 and logits.grad is not None
