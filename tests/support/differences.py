"""Largest of several differences, and NaN among them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def largest(values: Iterable[float | Tensor]) -> float:
    """Return the largest value; NaN if one of them is NaN, which Python's ``max`` may pass over."""
    return float(torch.tensor([float(value) for value in values], dtype=torch.float64).max())
