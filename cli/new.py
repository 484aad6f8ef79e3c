"""``triax new PROJECT``: a project to begin with: the program of 170 lines, its tests, a training file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..base.errors import ConfigError
from ..base.files import read_text
from .recipe import EXAMPLES, write_new


def new(
    project: Annotated[Path, typer.Argument(help="Folder to make; the module gets its name.")],
) -> None:
    """Make a project: a GPT as a list of layers with its program and tests on grids, and a training file for text."""
    name = project.name.replace("-", "_")
    if not name.isidentifier():
        raise ConfigError(f"{project.name} cannot be the name of a Python module: give letters, digits, - and _ alone.")
    if project.exists() and (not project.is_dir() or any(project.iterdir())):
        raise ConfigError(f"{project} exists and is not an empty folder. Give another name.")
    files = ["README.md", "pyproject.toml", "run.yaml", "test_new_project.py"]
    for source in (EXAMPLES / "gpt_3d.py", EXAMPLES / "gpt_plain.py", *(EXAMPLES / "new_project" / f for f in files)):
        text = read_text(source).replace("examples/", "").replace("new-project", project.name)
        for placeholder in ("gpt_3d", "new_project"):
            text = text.replace(placeholder, name)
        write_new(project / source.name.replace("gpt_3d", name).replace("new_project", name), text)
    typer.echo(f"\nNext: cd {project}, and read README.md: it has the commands that test and train it.")
