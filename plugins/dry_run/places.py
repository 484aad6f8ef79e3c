"""Places in a program: file and line of the user's code, and of the part of triax that it called."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import torch

_TRIAX = str(Path(__file__).parents[2])  # not resolved, as in the names of code
_ASIDE = tuple(str(Path(_TRIAX, name)) + "/" for name in ("tests", "examples", "benchmarks", ".venv"))
_PYTHON = (f"{Path(torch.__file__).parents[1]}/", str(Path(str(sys.modules["os"].__file__)).parent), "<frozen")
_HERE = str(Path(__file__).parent)
_COMM = str(Path(_TRIAX, "grid", "comm"))


@cache
def owner(file: str) -> str:
    """Return to whom a file belongs: ``python`` (with torch), ``dry run``, ``axis``, ``triax`` or ``user``."""
    if file.startswith(_PYTHON):
        return "python"
    if file.startswith(_HERE):
        return "dry run"
    if file.startswith(_COMM):
        return "axis"
    return "triax" if file.startswith(_TRIAX + "/") and not file.startswith(_ASIDE) else "user"


def user_place() -> str | None:
    """Return ``file.py:12`` if the user's code calls torch here; None if a part of triax does."""
    inner, outer = calling_place()
    return None if inner else outer


def calling_place() -> tuple[str, str]:
    """Return the place in triax that calls torch here, and the user's place that called triax; empty if none did."""
    frame, inner = sys._getframe(1), ""
    while frame is not None:
        whose = owner(frame.f_code.co_filename)
        if whose == "user":
            return inner, f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if whose == "triax" and not inner:
            inner = f"{Path(frame.f_code.co_filename).relative_to(_TRIAX)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return inner, ""
