"""``triax report RUN...``: one HTML page about a run, or a comparison of runs, from the files in their folders."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from ..base.errors import ConfigError


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Folder of a run, with metrics.jsonl, run.json or timeline.json. Two to four: they are compared.",
            metavar="RUN...",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="File to write. Default: report.html, or comparison.html, in the folder of the first run."),
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the page to a browser on this machine while the run continues.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --serve: port; 0: a free one.")] = 0,
) -> None:
    """Write one HTML page about a run: loss curves, measured and simulated timeline, memory and traffic.

    For a run with fault_tolerance, also print its replicas over time, the lost time by cause, and goodput.
    """
    from ..engine.monitor.report.run_folder import read_run
    from ..engine.monitor.report.serve import report_server
    from ..engine.monitor.report.write import write_report

    if not serve:
        if port:
            raise ConfigError(f"--port {port} belongs to --serve: add it.")
        typer.echo(f"{write_report(*runs, output=output)}")
        for run in runs:
            if (membership := read_run(run).membership) is not None:
                typer.echo("\n".join(membership.lines()))
        return
    if output is not None:
        raise ConfigError(f"--output {output} is written without --serve: leave one of them out.")
    with report_server(runs, port) as server:
        typer.echo(f"http://127.0.0.1:{server.server_port}/ (Ctrl-C ends it)")
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
