"""Small losses, batches and comparisons that several test files use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def mean_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Mean squared error, as a scalar."""
    return (outputs - labels).square().mean()


def summed_loss(outputs: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """Sum of squared errors and its weight, the number of elements: a loss function's second form."""
    return (outputs - labels).square().sum(), labels.numel()


def random_pair(seed: int, *shape: int) -> tuple[Tensor, Tensor]:
    """Return inputs and labels in float64, drawn from the seed."""
    x, y = torch.randn(2, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, y


def replica_inputs(step: int, replica: int, width: int = 6) -> Tensor:
    """Return inputs in float64, (4, width), other ones for each step and replica."""
    return torch.randn(4, width, generator=torch.Generator().manual_seed(10 * step + replica), dtype=torch.float64)


def token_batch(vocab_size: int, rows: int = 3, length: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    """Return token ids, labels of which some are -100, and document numbers, each (rows, length)."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(vocab_size, (rows, length + 1), generator=generator)
    inputs, labels = tokens[:, :-1], tokens[:, 1:].clone()
    labels[0, :5] = -100
    documents = (torch.rand(rows, length, generator=generator) < 0.3).long().cumsum(1)
    return inputs, labels, documents


def error_text(call: Callable[[], object], errors: Any = ValueError) -> str:
    """Return the text of the error that a call raises, or "no error"."""
    try:
        call()
    except errors as error:
        return str(error)
    return "no error"


def same(found: Any, wanted: Any, rtol: float = 1e-10, atol: float = 1e-13) -> None:
    """Assert that tensors, or nests of tensors, are equal to float64's rounding."""
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol)
