"""A checkpoint that tests of its format and of damage read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.checkpoint_jobs import Cell, Job, begin


@pytest.fixture(scope="module")
def saved(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 2 x 2 x 2."""
    folder = tmp_path_factory.mktemp("saved")
    ranks(8, begin, Cell((2, 2, 2), stage=1), Job(), 2, str(folder), "", timeout=120)
    return folder
