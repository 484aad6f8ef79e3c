"""What every test file may use: the pool of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def _pool() -> Iterator[Any]:
    from pool import pool

    yield pool()
    pool().close()


@pytest.fixture
def ranks(_pool: Any) -> Callable[..., list[Any]]:
    """`ranks(n, fn, *args, timeout=60, **kwargs)`: each of n gloo ranks' result; see `pool.py`."""
    run: Callable[..., list[Any]] = _pool.run
    return run


_CELLS: list[Any] = []


@pytest.fixture(scope="session")
def cells_checked() -> list[Any]:
    """The cells of the grid-invariance matrix that were found equal to the reference; counted in the summary."""
    return _CELLS


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _CELLS:
        terminalreporter.write_line(f"grid invariance: {len(_CELLS)} cells equal one process to 1e-10 in float64")
