"""Tables by rich, whose cells keep all their text in a terminal, a pipe and a log of any width."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table


def table(
    heads: Iterable[str], rows: Iterable[Iterable[object]] = (), title: str | None = None, left: int = 1, **how: Any
) -> Table:
    """Return a table of figures.

    Args:
        heads: head of each column.
        rows: cells of each row.
        title: line above the table.
        left: columns of text, the first ones; those of figures stand on the right.
        how: further arguments of ``rich.table.Table``.
    """
    made = Table(title=title, title_justify="left", caption_justify="left", **how)
    for number, head in enumerate(heads):
        made.add_column(head, justify="left" if number < left else "right", overflow="fold")
    for row in rows:
        made.add_row(*map(str, row))
    return made


def terminal(**how: Any) -> Console:
    """Return a console that prints texts as they are: lines of any length, no markup or emoji, no colors of numbers."""
    return Console(soft_wrap=True, highlight=False, markup=False, emoji=False, **how)


def as_text(*parts: RenderableType) -> str:
    """Return tables and lines as plain text: as wide as the terminal, or as each needs where there is none."""
    console = terminal(width=None if sys.stdout.isatty() else 10_000, color_system=None)
    with console.capture() as found:
        console.print(*parts, sep="\n")
    return "\n".join(line.rstrip() for line in found.get().rstrip().split("\n"))
