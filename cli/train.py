"""``triax train``: a training run from one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..grid.errors import ConfigError


def train(
    file: Annotated[Path, typer.Argument(help="Training file: .yaml, .toml or .json (docs/training-files.md).")],
    changes: Annotated[
        list[str] | None, typer.Argument(help="Keys to change: training.batch=16 grid.pipe=2.", metavar="KEY=VALUE")
    ] = None,
) -> None:
    """Train a model as a file says: alone with ranks of its own, or under triax run, torchrun or srun."""
    from ..train.file import read_training_file

    run, source = read_training_file(file, changes or [])
    try:
        from ..train.start import make_job, start  # needs torch

        job = make_job(run)
    except ConfigError as error:
        raise ConfigError(source.place(str(error))) from error
    start(job)
