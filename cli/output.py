"""Lines about files from elsewhere, and bars, that commands print."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

import typer
from rich.text import Text

from ..base.errors import escaped

_CONTROL = {i: "\N{REPLACEMENT CHARACTER}" for i in (*range(32), *range(127, 160)) if chr(i) not in "\n\t"}


def echo(text: str = "", err: bool = False) -> None:
    """Print a line, in which control characters of what a file holds are escaped; ``err``: on the standard error."""
    typer.echo(escaped(text), err=err)


def printable(text: str) -> str:
    """Return the text to print, without control characters if the output is a terminal."""
    return text.translate(_CONTROL) if sys.stdout.isatty() else text


def bar(kinds: Mapping[str, float], whole: float, width: int, mark: Callable[[str], str] = lambda kind: "█") -> Text:
    """Return a bar of colored parts.

    Args:
        kinds: the length of each part.
        whole: the length of the whole bar; what the parts leave is dots.
        width: columns of the terminal.
        mark: letter of a part.
    """
    from ..plugins.plan.picture import COLORS

    made, end, width = Text(no_wrap=True), 0.0, min(width, 94)
    for kind, value in kinds.items():
        end += value
        made.append(mark(kind) * (round(end / whole * width) - len(made)), style=COLORS[kind])
    return made.append("·" * (width - len(made)))
