"""Lines that a command prints about files from elsewhere."""

from __future__ import annotations

import typer

from ..base.errors import escaped


def echo(text: str = "", err: bool = False) -> None:
    """Print a line, in which control characters of what a file holds are escaped; ``err``: on the standard error."""
    typer.echo(escaped(text), err=err)
