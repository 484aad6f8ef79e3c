"""Grids on which models are compared, and sweeps: each run has some of their cells, and `make test-all` all."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest

# A test runs on one grid for each axis, and on one with two: (pipe, data, tensor), and options of the engine.
on_every_axis = pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((2, 1, 1), {"schedule": "zb-h1"}),
        ((1, 1, 2), {}),
        ((1, 2, 1), {"stage": 3}),
        ((2, 1, 2), {}),
    ],
    ids=["pipe", "tensor", "zero-3", "pipe-tensor"],
)


def some(cells: Sequence[Any], kept: Collection[int]) -> list[Any]:
    """Return the cells as parameters of pytest; those whose numbers are not ``kept`` are exhaustive."""
    assert max(kept) < len(cells)
    marks = [() if number in kept else pytest.mark.exhaustive for number in range(len(cells))]
    values = [cell if isinstance(cell, tuple) else (cell,) for cell in cells]
    return [pytest.param(*value, marks=mark) for value, mark in zip(values, marks, strict=True)]
