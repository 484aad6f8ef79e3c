"""The command ``triax``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..base import VERSION
from ..base.errors import ConfigError
from ..base.tables import terminal
from .check import check
from .checkpoint import checkpoint
from .config import config
from .coordinator import coordinator, drain
from .data import data
from .demo import demo
from .env import env
from .evaluate import evaluate
from .foreign_options import Command, RunCommand
from .generate import generate
from .grid import grid
from .memory import memory
from .new import new
from .plan import plan
from .recipe import recipe
from .report import report
from .run import CONTEXT, run
from .schedule import schedule
from .train import train
from .verbs import CommandGroup

app = typer.Typer(
    name="triax",
    cls=CommandGroup,
    help="Train models in three dimensions: pipe, tensor and data. Begin with triax demo.",
    epilog=f"Pages such as docs/launch.md, which help texts and messages name, are in {Path(__file__).parents[1]}.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"triax {VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.command(cls=Command)(demo)
app.command(cls=Command)(new)
app.command(cls=Command)(recipe)
app.command(cls=Command)(memory)
app.command(cls=Command)(config)
app.command(cls=Command)(grid)
app.add_typer(schedule)
app.command(cls=Command)(train)
app.command(cls=Command)(generate)
app.command(cls=Command)(evaluate)
app.add_typer(plan)
app.command(cls=Command)(report)
app.command(cls=Command)(check)
app.command(cls=RunCommand, context_settings=CONTEXT)(run)
app.command(cls=Command)(coordinator)
app.command(cls=Command)(drain)
app.command(cls=Command)(env)
app.add_typer(checkpoint)
app.add_typer(data)


def main() -> None:
    """Run the command ``triax``. An error in the user's input is printed as one line, with exit code 2."""
    try:
        app()
    except ConfigError as error:
        terminal(stderr=True).print(f"triax: {error}", style="red")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
