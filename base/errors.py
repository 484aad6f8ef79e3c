"""The library's errors, and helpers for messages: a value in short, the nearest name, the command that installs."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def escaped(text: str) -> str:
    """Return a text with its control characters escaped: a name in a file could else drive the reader's terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


class _Printable(Exception):
    """Error whose message has no control characters: it may quote a file from elsewhere."""

    def __str__(self) -> str:
        return escaped(super().__str__())


class AgreedError(_Printable, RuntimeError):
    """An error that every rank raises, before any state has changed: training can continue."""


class ConfigError(_Printable, ValueError):
    """A configuration that cannot be used. The message names the key, the reason and a value that works."""


class CheckpointError(AgreedError):
    """A checkpoint that could not be written or read. Every rank raises it, and no state has changed."""


class ArgumentError(CheckpointError, ConfigError):
    """An argument of the wrong kind. Every rank raises it if the ranks agree on their arguments."""


class DamagedError(CheckpointError):
    """A checkpoint whose contents are not those that were written. Every rank raises it."""


class CorruptError(_Printable, ValueError):
    """Corrupt data in a checkpoint, found by one rank. The message names the file and the position."""


def describe(value: Any) -> str:
    """Return a value as JSON writes it, shortened to 60 characters."""
    if isinstance(value, Mapping):
        return "a section {...}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value)
    return text if len(text) < 60 else f"{text[:57]}..."


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown name: the known name that ends in "_" and it, or the nearest, or all known names."""
    names = list(known)
    longer = [each for each in names if each.endswith(f"_{name}")]
    near = longer[0] if len(longer) == 1 else close(name, names)
    return f"did you mean {near!r}?" if near else f"known are {', '.join(names)}"


def close(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that an unknown one is a misspelling or the beginning of; None if there is no such name.

    A name that differs in a digit, or in a whole word, means something else: h200 is no misspelling of h100.
    """
    names = list(known)
    lowered = {each.lower(): each for each in reversed(names)}
    longer = [each for each in names if each.lower().startswith(f"{name.lower()}-")]
    if len(longer) == 1:
        return longer[0]
    near = difflib.get_close_matches(name, names, n=5, cutoff=0.7)
    near += [lowered[each] for each in difflib.get_close_matches(name.lower(), lowered, n=5, cutoff=0.7)]
    return next((each for each in near if _is_misspelt(name.lower(), each.lower())), None)


def _is_misspelt(name: str, known: str) -> bool:
    """Return True if a name has nearly the words of a known one, or some of its words, and its digits but for one."""
    digits, wanted_digits = (re.sub(r"\D", "", each) for each in (name, known))
    if digits not in (wanted_digits, *(wanted_digits[:i] + wanted_digits[i + 1 :] for i in range(len(wanted_digits)))):
        return False
    words, wanted = (re.findall(r"[^\W_]+", each) for each in (name, known))
    if len(words) == len(wanted):
        return all(difflib.SequenceMatcher(None, *pair).ratio() >= 0.5 for pair in zip(words, wanted))
    shared = set(words) & set(wanted)
    return 2 <= len(shared) in (len(words), len(wanted)) or difflib.SequenceMatcher(None, name, known).ratio() >= 0.85


def to_install(extra: str) -> str:
    """Return the command that installs the packages of one of triax's extras, such as ``plot``.

    In a checkout it names the folder. Elsewhere triax is installed, and pip reads the extra from there.
    """
    root = Path(__file__).resolve().parents[1]
    if (root / "pyproject.toml").is_file():
        return f"pip install -e '{root}[{extra}]'"
    return f"pip install 'triax[{extra}]'"


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
