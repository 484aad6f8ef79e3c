"""Sweeps of which some cells are in each run, and all in `make test-all`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest


def some(cells: Sequence[Any], kept: Collection[int]) -> list[Any]:
    """Return the cells as parameters of pytest; those whose numbers are not ``kept`` are exhaustive."""
    assert max(kept) < len(cells)
    marks = [() if number in kept else pytest.mark.exhaustive for number in range(len(cells))]
    values = [cell if isinstance(cell, tuple) else (cell,) for cell in cells]
    return [pytest.param(*value, marks=mark) for value, mark in zip(values, marks, strict=True)]
