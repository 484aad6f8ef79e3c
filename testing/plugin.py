"""The pytest plugin, found by its entry point: the fixture ``ranks``. It imports nothing before the fixture is used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .pool import Ranks


@pytest.fixture(scope="session")
def ranks(pytestconfig: pytest.Config) -> Iterator[Ranks]:
    """Run a function on gloo ranks: ``ranks(n, fn, *args, timeout=60, **kwargs)`` returns the result of each.

    The ranks are processes of a pool for the whole session; see ``triax.testing.pool``. A fixture ``ranks`` of your own
    comes before this one.
    """
    from .pool import pool

    made = pool()
    made.filterwarnings = tuple(pytestconfig.getini("filterwarnings"))
    yield made.run
    made.close()
