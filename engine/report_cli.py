"""``triax report RUN``: one HTML page about a run, from what it left in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .config import ConfigError
from .report_page import page
from .report_read import METRICS, RUN, TIMELINE, read_run


def report(
    run: Annotated[Path, typer.Argument(help="A run's folder, with metrics.jsonl, run.json or timeline.json in it.")],
    output: Annotated[Path | None, typer.Option(help="The page; report.html in the run's folder unless told.")] = None,
) -> None:
    """Write a page about a run: curves, its timeline beside the simulated one, memory and traffic. No network."""
    typer.echo(f"{write_report(run, output)}")


def write_report(run: Path, output: Path | None = None) -> Path:
    """Write the page; returns where.

    Raises:
        ConfigError: there is no such run, or the page cannot be written.
    """
    if not run.is_dir():
        raise ConfigError(f"{run}: there is no such folder; give a run's, which json_monitor.output_path names")
    if not any((run / name).is_file() for name in (METRICS, RUN, TIMELINE)):
        inner = sorted(path.parent.name for path in run.glob(f"*/{METRICS}"))
        near = f"; {run / inner[0]} has some" if inner else ": enable json_monitor in the configuration"
        raise ConfigError(f"{run} has no {METRICS}, {RUN} or {TIMELINE}{near}")
    file = output or run / "report.html"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(page(read_run(run)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the page {file} cannot be written: {error.strerror}") from error
    return file
