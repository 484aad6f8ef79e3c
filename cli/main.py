"""The command ``triax``."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..grid.errors import ConfigError
from ..plan.formulas import BYTES, STATES, ModelStates, model_states
from .checkpoint import checkpoint
from .config import config
from .data import data
from .env import env
from .foreign_options import RunCommand
from .generate import generate
from .grid import grid
from .plan import plan
from .report import report
from .run import CONTEXT, run
from .schedule import schedule
from .train import train

app = typer.Typer(
    name="triax",
    help="Train models in three dimensions: pipe, tensor and data.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def memory(
    parameters: Annotated[
        float, typer.Option(help="Parameters of one rank's pipeline stages and tensor shards, such as 7.5e9.")
    ],
    data: Annotated[int, typer.Option(min=1, help="Size of the data axis: the number of replicas.")] = 1,
    precision: Annotated[str, typer.Option(help=f"Dtype of the weights: {', '.join(BYTES)}.")] = "fp32",
    optimizer: Annotated[str, typer.Option(help=f"Optimizer: {', '.join(STATES)}.")] = "adamw",
) -> None:
    """Print the memory of the model states on one rank, for each stage of ZeRO, in GB (1e9 bytes)."""
    try:
        rows = [model_states(parameters, data, stage, precision, optimizer) for stage in range(4)]
        paper = [model_states(parameters, data, stage, precision, optimizer, precision) for stage in range(4)]
    except ValueError as error:
        raise ConfigError(str(error)) from error
    half = BYTES[precision] == 2
    title = f"{parameters:g} parameters, {data} replicas, {precision}, {optimizer}: GB on each rank"
    table = Table(title=title, title_justify="left")
    heads = ["stage", *ModelStates._fields, "all", *([f"with gradients in {precision}"] if half else [])]
    for head in heads:
        table.add_column(head, justify="right")
    for stage, (row, narrow) in enumerate(zip(rows, paper, strict=True)):
        figures = [*row, row.total, *([narrow.total] if half else [])]
        table.add_row(str(stage), *(f"{figure / 1e9:.4g}" for figure in figures))
    Console().print(table)


app.command()(config)
app.command()(grid)
app.command()(schedule)
app.command()(train)
app.command()(generate)
app.command()(plan)
app.command()(report)
app.command(cls=RunCommand, context_settings=CONTEXT)(run)
app.command()(env)
app.add_typer(checkpoint)
app.add_typer(data)


def main() -> None:
    """Run the command ``triax``. An error in the user's input is printed as one line, with exit code 2."""
    try:
        app()
    except ConfigError as error:
        Console(stderr=True).print(f"triax: {error}", style="red", soft_wrap=True, highlight=False, markup=False)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
