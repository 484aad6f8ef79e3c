"""The command ``triax``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .config import ConfigError, batch_sizes, read_config
from .schedule_cli import schedule

app = typer.Typer(
    name="triax",
    help="Training in three dimensions: pipe, tensor and data.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def main_options() -> None:
    """Training in three dimensions: pipe, tensor and data."""


@app.command()
def config(
    file: Annotated[Path, typer.Argument(help="A configuration in DeepSpeed's JSON dialect.")],
    replicas: Annotated[int, typer.Option(min=1, help="The size of the data axis.")] = 1,
) -> None:
    """Check a configuration and print it resolved: defaults filled in, all three batch sizes."""
    checked = read_config(file)
    batch = batch_sizes(checked, replicas)
    resolved = checked.model_dump() | {
        "train_batch_size": batch.train,
        "train_micro_batch_size_per_gpu": batch.micro,
        "gradient_accumulation_steps": batch.accumulation,
    }
    typer.echo(json.dumps(resolved, indent=2))


app.command()(schedule)


def main() -> None:
    """Run the command; what the user can mend is one line and exit code 2."""
    try:
        app()
    except ConfigError as error:
        Console(stderr=True).print(f"triax: {error}", style="red", soft_wrap=True, highlight=False, markup=False)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
