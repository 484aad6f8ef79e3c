"""``triax train``: a training run from one file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ..base.errors import ConfigError
from ..base.option_error import OptionError
from ..options.base import Options, option
from .dry_report import dry_run
from .flags import with_flags


@dataclass(frozen=True, kw_only=True)
class TrainFlags(Options):
    """Flags of ``triax train``."""

    explain: bool = option(False, "Print what would run: stages, bytes of each rank by kind, tokens. No ranks.")
    dry_run: bool = option(
        False, "Run one rank of each class of ranks for a step, without values, data or GPUs: docs/launch.md."
    )
    json: bool = option(False, "With --explain: print one JSON object.", needs="explain")
    processes: int | None = option(
        None, "With --explain or --dry-run: number of processes, for grid.data: auto.", least=1
    )
    table: bool = option(False, "Print the table of all keys of a training file.")
    upgrade: bool = option(False, "Rewrite the file under today's names of its keys; comments stay.")

    def check(self) -> None:
        """Check that the number of processes is not one of a run, and that one thing alone is asked for."""
        asked = [name for name in ("explain", "dry_run", "table", "upgrade") if getattr(self, name)]
        if self.upgrade and len(asked) > 1:
            other = next(name for name in asked if name != "upgrade")
            raise OptionError("upgrade", True, f"it rewrites the file and does nothing else: leave out <{other}>")
        if self.processes is not None and not (self.explain or self.dry_run):
            raise OptionError(
                "processes",
                self.processes,
                "it belongs to <explain> or <dry_run>: add one of them. To train, leave it out: the launcher (triax "
                "run, torchrun, srun) says how many processes there are",
            )


@with_flags
def train(
    flags: TrainFlags,
    file: Annotated[
        Path | None, typer.Argument(help="Training file: .yaml, .toml or .json (docs/training-files.md).")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Argument(help="Keys to change: batch.size=16 grid.pipe=2.", metavar="KEY=VALUE")
    ] = None,
) -> None:
    """Train a model from a file. The processes are started here, or by triax run, torchrun or srun."""
    if flags.table or file is None:
        if not flags.table or file is not None:
            raise ConfigError("Give a FILE to train, or --table.")
        from ..options.table import markdown
        from ..train.sections import WHOLE, TrainingFile

        typer.echo(markdown(TrainingFile, WHOLE))
        return
    if flags.upgrade:
        if changes:
            raise ConfigError(f"--upgrade renames keys and changes no values: leave out {changes[0]}")
        from ..train.upgrade import upgrade

        for note in upgrade(file) or [f"{file} has no older name"]:
            typer.echo(note)
        return
    from ..train.file import read_training_file
    from ..train.job import resolve
    from .explain import explain, text

    run, source = read_training_file(file, changes or [])
    try:
        if flags.explain:
            explanation = explain(resolve(run, flags.processes), flags.processes)
            typer.echo(json.dumps(explanation, indent=2) if flags.json else text(explanation))
            return
        if flags.dry_run:
            from .dry_run import JobSteps

            job = resolve(run, flags.processes)
            dry_run(JobSteps(job), job.topology.world_size)
        from ..train.start import make_job, start  # needs torch

        job = make_job(run)
    except ConfigError as error:
        raise ConfigError(source.place(str(error))) from error
    start(job)
