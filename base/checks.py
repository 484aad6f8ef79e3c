"""Checks of values that enter in several places: numbers that float32 holds, seeds, names of folders, arguments.

Each raises a ``ValueError`` whose message says what to give; the caller puts the key or the argument before it.
"""

from __future__ import annotations

import math
import os
from numbers import Integral, Real
from pathlib import PurePath
from typing import Any

from .errors import ArgumentError, describe

SMALLEST = 2.0**-126  # normal number of float32: between it and 0, products lose digits, and their inverses overflow
LARGEST = 2.0**126  # its inverse is a normal number too
LIMIT = (2 - 2.0**-23) * 2.0**127  # largest number of float32
THREADS = 256  # of a loader, at most
SEEDS = 2**63  # torch's generators take seeds below it

_LONGEST_NAME = 255  # bytes, of file systems


def check_number(value: float) -> None:
    """Check that a number is finite, and 0 or within the normal numbers of float32.

    Raises:
        ValueError: another number.
    """
    if value != value or abs(value) == math.inf:  # math.isfinite takes no integer beyond the range of a float
        raise ValueError("give a finite number")
    if 0 < abs(value) < SMALLEST:
        raise ValueError(f"give a number of {SMALLEST:.2g} or more, since float32 holds no smaller one in full")
    if abs(value) > LIMIT:
        raise ValueError(f"give a number of {LIMIT:.2g} or less, since float32 holds no larger one")


def check_seed(seed: int, name: str = "seed") -> int:
    """Return a seed, if it is one.

    Raises:
        ValueError: no whole number, one below 0, or one of 2**63 or more.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < SEEDS:
        raise ValueError(f"{name} is {seed!r:.60}: give a whole number from 0 to 2**63 - 1")
    return seed


def path_text(path: Any) -> Any:
    """Return the text of a path, if a file system can have it. What is no text is returned as it is.

    Raises:
        ValueError: it is empty, or the name of a folder or file in it is longer than file systems allow.
    """
    if path == "":
        raise ValueError("give a text that is not empty")
    for part in PurePath(path).parts if isinstance(path, str) else ():
        if (size := len(part.encode("utf-8", "surrogatepass"))) > _LONGEST_NAME:
            raise ValueError(f"{part:.20}... has {size} bytes: a name of at most {_LONGEST_NAME} bytes is possible")
    return path


def check_folder_name(name: str) -> str:
    """Return the name of a folder that is made within another one, if it stays there.

    Raises:
        ValueError: an empty or absolute path, one with .., or characters that no terminal prints.
    """
    parts = PurePath(name.replace("\\", "/")).parts
    leaves = name.startswith(("/", "\\")) or any(not part.strip(". ") for part in parts)
    path_text(name)
    if not parts or leaves or not name.isprintable():
        raise ValueError("it names a folder inside another one: give a name without .., and not one that begins with /")
    return name


def check_path(call: str, **arguments: Any) -> None:
    """Check that each argument is a path: a text that is not empty, or an object of ``pathlib``.

    Raises:
        ArgumentError: another value; the message names the call and the argument.
    """
    for name, value in arguments.items():
        text = os.fspath(value) if isinstance(value, os.PathLike) else value
        is_path = isinstance(text, str) and text and "\0" not in text
        if is_path:
            try:
                path_text(text)
            except ValueError as error:
                raise ArgumentError(f"{call} was given {name}={describe(value)}: {error}") from None
        _require(bool(is_path), call, name, value, f"the path of a {_kind(name)}, as a text or Path")


def check_kind(call: str, kinds: type | tuple[type, ...], wanted: str, **arguments: Any) -> None:
    """Check the classes of arguments; ``wanted`` says what to give.

    Raises:
        ArgumentError: a value of another class.
    """
    for name, value in arguments.items():
        _require(isinstance(value, kinds), call, name, value, wanted)


def check_flag(call: str, **arguments: Any) -> None:
    """Check that each argument is True or False, or 1 or 0.

    Raises:
        ArgumentError: another value.
    """
    for name, value in arguments.items():
        _require(isinstance(value, Integral) and value in (0, 1), call, name, value, "True or False")


def check_count(call: str, least: int = 1, **arguments: Any) -> None:
    """Check that each argument is a whole number of at least ``least``.

    Raises:
        ArgumentError: another value.
    """
    for name, value in arguments.items():
        is_count = isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least
        _require(bool(is_count), call, name, value, f"a whole number of at least {least}")


def check_positive(call: str, most: float = math.inf, **arguments: Any) -> None:
    """Check that each argument is a number above 0, and of ``most`` or less.

    Raises:
        ArgumentError: another value.
    """
    limit = "" if math.isinf(most) else f", and of {most:g} or less"
    for name, value in arguments.items():
        is_positive = isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) <= most
        _require(bool(is_positive), call, name, value, f"a number above 0{limit}")


def _require(right: bool, call: str, name: str, value: Any, wanted: str) -> None:
    if not right:
        raise ArgumentError(f"{call} was given {name}={' '.join(repr(value).split()):.60}: give {wanted}")


def _kind(name: str) -> str:
    return "file" if "file" in name else "folder"
