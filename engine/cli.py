"""The command ``triax``."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .checkpoint_cli import checkpoint
from .config import ConfigError
from .config_cli import config
from .formulas import BYTES, STATES, ModelStates, model_states
from .generate_cli import generate
from .report_cli import report
from .run_cli import CONTEXT, run
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
def memory(
    parameters: Annotated[float, typer.Option(help="Of one rank's stages and shards, as 7.5e9.")],
    replicas: Annotated[int, typer.Option(help="The size of the data axis.")] = 1,
    precision: Annotated[str, typer.Option(help=f"One of {', '.join(BYTES)}.")] = "fp32",
    optimizer: Annotated[str, typer.Option(help=f"One of {', '.join(STATES)}.")] = "adamw",
) -> None:
    """Print what the model states take on one rank, by stage of ZeRO, in GB (1e9 bytes)."""
    try:
        rows = [model_states(parameters, replicas, stage, precision, optimizer) for stage in range(4)]
        paper = [model_states(parameters, replicas, stage, precision, optimizer, precision) for stage in range(4)]
    except ValueError as error:
        raise ConfigError(str(error)) from error
    half = BYTES[precision] == 2
    title = f"{parameters:g} parameters, {replicas} replicas, {precision}, {optimizer}: GB on each rank"
    table = Table(title=title, title_justify="left")
    heads = ["stage", *ModelStates._fields, "all", *([f"with gradients in {precision}"] if half else [])]
    for head in heads:
        table.add_column(head, justify="right")
    for stage, (row, narrow) in enumerate(zip(rows, paper, strict=True)):
        figures = [*row, row.total, *([narrow.total] if half else [])]
        table.add_row(str(stage), *(f"{figure / 1e9:.4g}" for figure in figures))
    Console().print(table)


app.command()(config)
app.command()(schedule)
app.command()(generate)
app.command()(report)
app.command(context_settings=CONTEXT)(run)
app.add_typer(checkpoint)


def main() -> None:
    """Run the command; what the user can mend is one line and exit code 2."""
    try:
        app()
    except ConfigError as error:
        Console(stderr=True).print(f"triax: {error}", style="red", soft_wrap=True, highlight=False, markup=False)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
