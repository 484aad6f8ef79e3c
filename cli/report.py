"""``triax report RUN...``: one HTML page about a run, or a comparison of runs, from the files in their folders."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ..base.option_error import OptionError
from ..options.base import Options, option
from .flags import with_flags


@dataclass(frozen=True, kw_only=True)
class ReportFlags(Options):
    """Flags of ``triax report``."""

    output: Path | None = option(
        None,
        "File to write. Default: report.html, or comparison.html, in the folder of the first run.",
        writes=(".html",),
    )
    serve: bool = option(False, "Serve the page to a browser on this machine while the run continues.")
    port: int = option(0, "With --serve: port; 0: a free one.", least=0, most=65535, needs="serve")

    def check(self) -> None:
        """Check that a page is written or served."""
        if self.serve and self.output is not None:
            raise OptionError("output", str(self.output), "it is written without <serve>: leave one of them out")


@with_flags
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Folder of a run, with metrics.jsonl, run.json or timeline.json. Two to four: they are compared.",
            metavar="RUN...",
        ),
    ],
    flags: ReportFlags,
) -> None:
    """Write one HTML page about a run: loss curves, measured and simulated timeline, memory and traffic.

    For a run with fault_tolerance, also print its replicas over time, the lost time by cause, and goodput.
    """
    from ..engine.monitor.report.run_folder import read_run
    from ..engine.monitor.report.serve import report_server
    from ..engine.monitor.report.write import write_report

    if not flags.serve:
        typer.echo(f"{write_report(*runs, output=flags.output)}")
        for run in runs:
            if (membership := read_run(run).membership) is not None:
                typer.echo("\n".join(membership.lines()))
        return
    with report_server(runs, flags.port) as server:
        typer.echo(f"http://127.0.0.1:{server.server_port}/ (Ctrl-C ends it)")
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
