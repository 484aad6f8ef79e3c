"""Writer of the report page of a run, or of the page that compares runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ....base.errors import ConfigError
from ..files import METRICS, RUN, TIMELINE
from .page import comparison_page, page
from .run_folder import read_run


def write_report(run: Path, *others: Path, output: Path | None = None) -> Path:
    """Write the page of a run, or of several that it compares, and return its path.

    Args:
        run: folder of the run.
        others: folders of the runs to compare it with; with none, the page is of the run alone.
        output: file of the page; None: ``report.html`` in the run's folder, or ``comparison.html``.

    Raises:
        ConfigError: a folder holds no run, the runs cannot be compared, or the page cannot be written.
    """
    text = report_page([run, *others])
    file = output or run / ("comparison.html" if others else "report.html")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"The page {file} cannot be written: {error.strerror}. Give another --output.") from error
    return file


def report_page(folders: Sequence[Path], live: bool = False) -> str:
    """Return the page of the run in a folder, or the page that compares the runs of several.

    Args:
        folders: folders of the runs.
        live: with a script that shows the page anew when the runs' files change.

    Raises:
        ConfigError: a folder holds no run, or the runs cannot be compared.
    """
    runs = []
    for folder in folders:
        _require_run(folder)
        runs.append(read_run(folder))
    if len(runs) == 1:
        return page(runs[0], live)
    if len({run.name for run in runs}) < len(runs):  # such as two folders "run" in different places
        for run, folder in zip(runs, folders, strict=True):
            run.name = str(folder)
    try:
        return comparison_page(runs, live)
    except ValueError as error:
        raise ConfigError(f"{error}.") from error


def _require_run(run: Path) -> None:
    """Raise ConfigError if a folder holds no run."""
    if not run.is_dir():
        raise ConfigError(f"There is no folder {run}. Give the folder of a run: output_path/job_name of json_monitor.")
    names = (METRICS, RUN, TIMELINE, f"replica-*/{METRICS}")
    if not any(path.is_file() for name in names for path in run.glob(name)):
        inner = sorted(path.parent.name for path in run.glob(f"*/{METRICS}"))
        advice = (
            f"Did you mean {run / inner[0]}?" if inner else "Enable json_monitor in the configuration to write them."
        )
        raise ConfigError(f"The folder {run} has no {METRICS}, {RUN} or {TIMELINE}. {advice}")
