"""The command ``triax``. The module of a command is imported when the command is typed, or its help is asked for."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ..base import VERSION
from ..base.errors import ConfigError
from ..base.tables import terminal
from ..base.verbosity import is_verbose, set_verbosity
from .foreign_options import Command, RunCommand
from .verbs import COMMANDS, CommandGroup, with_new_names


class _Commands(Mapping[str, Any]):
    """Commands by name, each made when it is asked for."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            command = getattr(import_module(f".{name}", __package__), name)
            if not isinstance(command, typer.Typer):
                function, command = command, typer.Typer(add_completion=False)
                kind = RunCommand if name == "run" else Command
                command.command(cls=kind, context_settings=getattr(kind, "SETTINGS", None))(function)
            self._made[name] = typer.main.get_command(command)
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in COMMANDS

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class _Triax(CommandGroup):
    """The command ``triax``. Its help, and the completion of a command's name, import no command."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands = _Commands()  # type: ignore[assignment]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; an older name of a command is read with a warning."""
        return super().parse_args(ctx, with_new_names(args))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        self._list()
        super().format_help(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return the commands that a word may become."""
        self._list()
        return super().shell_complete(ctx, incomplete)

    def _list(self) -> None:
        """Put the names and texts of the commands in place of the commands."""
        self.commands = {
            name: TyperCommand(name, help=text, rich_help_panel=group) for name, (group, text) in COMMANDS.items()
        }


app = typer.Typer(
    name="triax",
    cls=_Triax,
    help="Train models in three dimensions: pipe, tensor and data. Begin with triax demo.",
    epilog=f"Pages such as docs/launch.md, which help texts and messages name, are in {Path(__file__).parents[1]}.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
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
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress of a run.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print the whole log, and the traceback of an error.")
    ] = False,
) -> None:
    if quiet and verbose:
        raise ConfigError("--quiet and --verbose contradict each other: give one of them")
    set_verbosity("quiet" if quiet else "verbose" if verbose else None)


def main() -> None:
    """Run the command ``triax``. An error in the user's input is printed as one line, with exit code 2."""
    try:
        app()
    except ConfigError as error:
        if is_verbose():
            traceback.print_exc()
        terminal(stderr=True).print(f"triax: {error}", style="red")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
