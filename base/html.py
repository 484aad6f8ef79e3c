"""Tables in HTML, which a notebook shows."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


def html_table(caption: str, heads: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table with a line of text above it."""
    lines = [[f"<th>{escape(head)}</th>" for head in heads]]
    lines += [[f"<td>{escape(str(cell))}</td>" for cell in row] for row in rows]
    body = "".join(f"<tr>{''.join(cells)}</tr>" for cells in lines)
    return f"<table><caption>{escape(caption)}</caption>{body}</table>"
