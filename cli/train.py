"""``triax train``: a training run from one file."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from ..base.errors import ConfigError

if TYPE_CHECKING:
    from ..train.job import Job


def train(
    file: Annotated[
        Path | None, typer.Argument(help="Training file: .yaml, .toml or .json (docs/training-files.md).")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Argument(help="Keys to change: batch.size=16 grid.pipe=2.", metavar="KEY=VALUE")
    ] = None,
    explained: Annotated[
        bool,
        typer.Option("--explain", help="Print what would run: stages, bytes of each rank by kind, tokens. No ranks."),
    ] = False,
    dry: Annotated[
        bool,
        typer.Option(
            "--dry",
            help="Run one rank of each class of ranks for a step, without values, data or GPUs: docs/launch.md.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --explain: print one JSON object.")] = False,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="With --explain or --dry: number of processes, for grid.data: auto."),
    ] = None,
    table: Annotated[bool, typer.Option("--table", help="Print the table of all keys of a training file.")] = False,
) -> None:
    """Train a model from a file. The processes are started here, or by triax run, torchrun or srun."""
    if table or file is None:
        if not table or file is not None:
            raise ConfigError("Give a FILE to train, or --table.")
        from ..options.table import markdown
        from ..train.schema import WHOLE, TrainingFile

        typer.echo(markdown(TrainingFile, WHOLE))
        return
    from ..train.file import read_training_file
    from ..train.job import resolve
    from .explain import explain, text

    run, source = read_training_file(file, changes or [])
    if as_json and not explained:
        raise ConfigError("--json belongs to --explain: add it.")
    if processes is not None and not (explained or dry):
        raise ConfigError(
            f"--processes {processes} belongs to --explain or --dry: add one of them. To train, leave it out: the "
            "launcher (triax run, torchrun, srun) says how many processes there are."
        )
    try:
        if explained:
            found = explain(resolve(run, processes), processes)
            typer.echo(json.dumps(found, indent=2) if as_json else text(found))
            return
        if dry:
            _dry_run(resolve(run, processes))
        from ..train.start import make_job, start  # needs torch

        job = make_job(run)
    except ConfigError as error:
        raise ConfigError(source.place(str(error))) from error
    start(job)


def _dry_run(job: Job) -> NoReturn:
    """Run a training file as ranks of a cluster without the cluster, print what was found, and exit."""
    from ..plugins.dry_run.dry_run import dry_run  # imported only where it is used: it needs torch
    from ..plugins.dry_run.rank import Settings
    from ..plugins.dry_run.report import report
    from .dry_run import JobSteps

    found = dry_run(JobSteps(job), Settings(job.topology.world_size), partial(typer.echo, err=True))
    typer.echo(report(found))
    raise SystemExit(1 if found.problems else 0)
