"""Errors of every rank, the warnings that triax logs, and float64 for new tensors."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from triax.testing.pool import RankFailure


def assert_every_rank_raises(ranks: Any, count: int, words: str, job: Callable[..., object], *arguments: Any) -> None:
    """Run a job on ranks, and assert that each of them raises an error with these words (a regular expression)."""
    with pytest.raises(RankFailure, match=words) as failure:
        ranks(count, job, *arguments)
    for rank in range(count):
        assert failure.value[rank].kind == "raised" and re.search(words, failure.value[rank].text), rank


@contextmanager
def triax_warnings(logger: str = "triax") -> Iterator[list[str]]:
    """Collect the warnings that triax logs in this process."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger(logger).removeHandler(handler)


@contextmanager
def float64_by_default() -> Iterator[None]:
    """Make new tensors float64, for functions on ranks whose layers take no dtype."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
