"""Entry points of installed packages, which are read once in a process: reading them takes milliseconds."""

from __future__ import annotations

import functools
import sys
from importlib.metadata import EntryPoints, entry_points


def offered(group: str) -> EntryPoints:
    """Return the entry points of a group, such as ``triax.optimizers``.

    A package that is installed after the first call is found by the next process.
    """
    return installed(group, tuple(sys.path))


@functools.cache
def installed(group: str, path: tuple[str, ...]) -> EntryPoints:
    """Return the entry points of a group in the folders of ``sys.path``."""
    return entry_points(group=group)
