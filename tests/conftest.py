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
