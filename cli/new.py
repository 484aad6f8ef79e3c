"""``triax new PROJECT``: a small project to begin with: a model, a program, a training file, tests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..base.errors import ConfigError
from ..base.files import read_text
from .recipe import shipped_folder, write_new

_KINDS = (".py", ".toml", ".yaml", ".md")


def new(
    project: Annotated[Path, typer.Argument(help="Folder to make; the module gets its name.")],
) -> None:
    """Make a project: a model of your own with its program and tests on grids, and a training file for text."""
    name = project.name.replace("-", "_")
    if not name.isidentifier():
        raise ConfigError(f"{project.name} cannot be the name of a Python module: give letters, digits, - and _ alone.")
    if project.exists() and (not project.is_dir() or any(project.iterdir())):
        raise ConfigError(f"{project} exists and is not an empty folder. Give another name.")
    source = shipped_folder("own_model")
    for path in sorted(source.rglob("*")):
        if path.is_file() and path.suffix in _KINDS:
            target = project / str(path.relative_to(source)).replace("own_model", name)
            write_new(target, read_text(path).replace("own_model", name).replace("own-model", project.name))
    typer.echo(f"\nNext: cd {project}, and read README.md: it has the commands that test and train it.")
