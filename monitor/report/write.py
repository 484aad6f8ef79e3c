"""Writer of a run's report page."""

from __future__ import annotations

from pathlib import Path

from ...base.errors import ConfigError
from ..files import METRICS, RUN, TIMELINE
from .page import page
from .run_folder import read_run


def write_report(run: Path, output: Path | None = None) -> Path:
    """Write the page of a run and return its path.

    Args:
        run: folder of the run.
        output: file of the page; None: ``report.html`` in the folder.

    Raises:
        ConfigError: the folder holds no run, or the page cannot be written.
    """
    if not run.is_dir():
        raise ConfigError(f"There is no folder {run}. Give the folder of a run: output_path/job_name of json_monitor.")
    names = (METRICS, RUN, TIMELINE, f"replica-*/{METRICS}")
    if not any(path.is_file() for name in names for path in run.glob(name)):
        inner = sorted(path.parent.name for path in run.glob(f"*/{METRICS}"))
        advice = (
            f"Did you mean {run / inner[0]}?" if inner else "Enable json_monitor in the configuration to write them."
        )
        raise ConfigError(f"The folder {run} has no {METRICS}, {RUN} or {TIMELINE}. {advice}")
    file = output or run / "report.html"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(page(read_run(run)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"The page {file} cannot be written: {error.strerror}. Give another --output.") from error
    return file
