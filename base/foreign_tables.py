"""Tables of other libraries' names: TOML files, each beside the module that answers for its names."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any


def read_table(module: str, name: str) -> Mapping[str, Any]:
    """Return the tables of a file, whose head explains them.

    Args:
        module: ``__file__`` of the module that answers for the names.
        name: name of the file beside it.
    """
    return _read(Path(module).with_name(name))


@cache
def _read(file: Path) -> Mapping[str, Any]:
    return tomllib.loads(file.read_text(encoding="utf-8"))


def answers(rows: Mapping[str, str]) -> dict[str, str]:
    """Return the answer to each name, from rows of an answer and its names."""
    return {name: answer for answer, names in rows.items() for name in names.split()}


def markdown(name: str, answer: str, rows: Mapping[str, str]) -> str:
    """Return rows of an answer and its names as a Markdown table.

    Args:
        name, answer: heads of the two columns.
        rows: the rows.
    """
    lines = [f"| {name} | {answer} |", "|---|---|"]
    for text, names in rows.items():
        shown = ", ".join(f"`{each.removesuffix('=')}`" for each in names.split())
        lines.append(f"| {shown} | {text.replace('|', chr(92) + '|')} |")
    return "\n".join(lines)
