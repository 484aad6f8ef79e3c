"""A disk that fails, or a process that ends, at one of the system calls that write files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CALLS = ((os, "write"), (os, "fsync"), *((Path, name) for name in ("mkdir", "rename", "replace", "unlink", "open")))


@contextmanager
def disturbed(number: int, act: Callable[[], None]) -> Iterator[list[str]]:
    """Call ``act`` before call number ``number`` of those that write files. Yields the names of the calls made."""
    made: list[str] = []

    def wrapped(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            reads = name == "open" and not {"w", "wb"} & {*args, *kwargs.values()}
            if not reads:
                made.append(name)
                if len(made) == number + 1:
                    if name == "write":
                        plain(args[0], args[1][: len(args[1]) // 2])  # half of it is there
                    act()
            return plain(*args, **kwargs)

        return call

    before = [(owner, name, getattr(owner, name)) for owner, name in CALLS]
    for owner, name, plain in before:
        setattr(owner, name, wrapped(name, plain))
    try:
        yield made
    finally:
        for owner, name, plain in before:
            setattr(owner, name, plain)
