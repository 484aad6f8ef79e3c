"""``triax recipe``: training files to begin with, those of ``examples/recipes``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..base.errors import ConfigError, no_such
from ..base.files import read_text
from ..base.tables import table, terminal

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"  # in the wheel, too
_RECIPES = EXAMPLES / "recipes"
_IN_CHECKOUT = "examples/recipes/"  # in front of files in the recipes' commands and sbatch files


def recipe(
    name: Annotated[str | None, typer.Argument(help="Name of a recipe. Without it: list them.")] = None,
    output: Annotated[Path, typer.Option(help="Folder to write the files to.")] = Path(),
) -> None:
    """List the recipes, or write one: its training file, what it needs, and the commands to type."""
    files = {path.stem: path for path in sorted(_RECIPES.glob("*.yaml"))}
    if name is None:
        rows = [(file_name, read_text(path).partition("\n")[0].removeprefix("# ")) for file_name, path in files.items()]
        terminal().print(table(("recipe", ""), rows, left=2))
        typer.echo("triax recipe NAME writes its files here, and prints its commands.")
        return
    if name not in files:
        raise ConfigError(no_such("triax recipe", name, files))
    title, text = _section(files[name].name)
    others = {path.stem for path in files.values()} - {name}
    needed = [
        path
        for path in sorted(_RECIPES.iterdir())
        if path.name in text and path.stem not in others and path.suffix != ".md"
    ]
    for path in needed:
        write_new(output / path.name, read_text(path).replace(_IN_CHECKOUT, ""))
    typer.echo(f"\n{title}\n\n{text.replace(_IN_CHECKOUT, '').strip()}")


def write_new(path: Path, text: str) -> None:
    """Write a file, and print its name.

    Raises:
        ConfigError: it exists, or cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} exists. Remove it, or work in another folder.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error
    typer.echo(f"{path} written")


def _section(file: str) -> tuple[str, str]:
    """Return the title and the text of the section of the recipes' README that runs a training file."""
    sections = read_text(_RECIPES / "README.md").split("\n## ")[1:]
    title, _, text = next(section for section in sections if file in section).partition("\n")
    return title, text
