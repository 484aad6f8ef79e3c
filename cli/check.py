"""``triax check``: compare a model on grids with the same model on one process."""

from __future__ import annotations

import json
from typing import Annotated, NoReturn

import typer

from ..base.errors import ConfigError


def check(
    target: Annotated[
        str,
        typer.Argument(help="script.py:build, where build(grid) returns a PipelineModule; a training file; a folder."),
    ],
    changes: Annotated[
        list[str] | None,
        typer.Argument(help="Keys of the training file, or fields of the folder's configuration.", metavar="KEY=VALUE"),
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(help="Grid to try, such as pipe=2,tensor=2. Repeatable. Default: each axis alone."),
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, max=8, help="Ranks of the largest grid, without --grid.")] = 4,
    batch: Annotated[
        str, typer.Option(help="Function of the script that returns the microbatches. Default: batch, or made ones.")
    ] = "",
    rows: Annotated[int, typer.Option(min=1, help="Rows of a made microbatch.")] = 2,
    length: Annotated[int, typer.Option(min=2, help="Length of the sequences of a made microbatch.")] = 16,
    microbatches: Annotated[int, typer.Option(min=1, help="Microbatches of a made batch, over all replicas.")] = 4,
    rtol: Annotated[
        float, typer.Option(min=0.0, help="Largest difference, relative to a tensor's largest element.")
    ] = (1e-10),
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds that a run may take.")] = 60.0,
    costs: Annotated[
        bool, typer.Option("--costs", help="Print time and activation bytes of layers, and bytes sent, too.")
    ] = False,
    dry: Annotated[
        bool,
        typer.Option("--dry", help="Say whether the model trains on each --grid, without values and without ranks."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare a model on grids with one process; name the first op and gradient that differ. Exit code 1: they do."""
    from ..check.grids import count, parse_grid
    from ..check.target import read_target

    grids = [parse_grid(each) for each in grid or []]
    if large := [each for each in grids if count(each) > 8 and not dry]:
        raise ConfigError(f"--grid has {count(large[0])} ranks, and at most 8 run here: give fewer, or --dry.")
    chosen = read_target(target, batch, changes or (), rows=rows, length=length, microbatches=microbatches)
    if dry:
        from ..check.dry import dry_check

        _end(*dry_check(chosen, grids or [(("pipe", 2), ("data", 2))]), as_json)
    from ..check.check import check as run

    report = run(chosen, grids or None, ranks=ranks, rtol=rtol, timeout=timeout, costs=costs)
    _end(report.holds, report.text(), report.to_dict(), as_json)


def _end(holds: bool, text: str, values: dict[str, object], as_json: bool) -> NoReturn:
    """Print the result, and exit: 0 if all holds, 1 if not."""
    typer.echo(json.dumps(values) if as_json else text)
    raise typer.Exit(0 if holds else 1)
