"""The library's errors, and helpers for their messages: a value in short, the nearest known name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


class AgreedError(RuntimeError):
    """An error that every rank raises, before any state has changed: training can continue."""


class ConfigError(ValueError):
    """A configuration that cannot be used. The message names the key, the reason and a value that works."""


class CheckpointError(AgreedError):
    """A checkpoint that could not be written or read. Every rank raises it, and no state has changed."""


class DamagedError(CheckpointError):
    """A checkpoint whose contents are not those that were written. Every rank raises it."""


class CorruptError(ValueError):
    """Corrupt data in a checkpoint, found by one rank. The message names the file and the position."""


def describe(value: Any) -> str:
    """Return a value as JSON writes it, shortened to 60 characters."""
    if isinstance(value, Mapping):
        return "a section {...}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) < 60 else f"{text[:57]}..."


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown name: the nearest known name, or all known names."""
    names = list(known)
    near = close(name, names)
    return f"did you mean {near!r}?" if near else f"known are {', '.join(names)}"


def close(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is nearest to an unknown one; None if none is near."""
    names = list(known)
    if near := difflib.get_close_matches(name, names, n=1):
        return near[0]
    near = difflib.get_close_matches(name.lower(), [each.lower() for each in names], n=1)
    return next((each for each in names if near and each.lower() == near[0]), None)


def require_at_least(least: float, **numbers: float) -> None:
    """Check lower limits of numbers.

    Raises:
        ValueError: a number is less than ``least``.
    """
    for name, value in numbers.items():
        if not value >= least:
            raise ValueError(f"{name}={value} is too small: give at least {least}")


def no_such(where: str, name: str, known: Iterable[str]) -> str:
    """Return the error message for an unknown key or name."""
    return f"{where}: there is no {describe(name)}; {nearest(name, known)}"
