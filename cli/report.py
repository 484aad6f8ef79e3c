"""``triax report RUN``: write one HTML page about a run, from the files in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run, with metrics.jsonl, run.json or timeline.json.")],
    output: Annotated[
        Path | None, typer.Option(help="File to write. Default: report.html in the run's folder.")
    ] = None,
) -> None:
    """Write one HTML page about a run: loss curves, measured and simulated timeline, memory and traffic.

    Of a run with fault_tolerance it also prints its replicas over time, the time lost by cause, and goodput.
    """
    from ..monitor.report.run_folder import read_run
    from ..monitor.report.write import write_report

    typer.echo(f"{write_report(run, output)}")
    membership = read_run(run).membership
    if membership is not None:
        typer.echo("\n".join(membership.lines()))
