"""Writer of ``run.json``: grid, configuration, schedule, memory and traffic of a run."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch

from ..grid import VERSION
from .files import RUN, replace_file
from .protocol import RunRecord


def write_run(folder: Path, record: RunRecord) -> None:
    """Write the description of a run into its folder, which is made where it does not exist."""
    header = {
        "triax": VERSION,
        "torch": torch.__version__,
        "written": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / RUN, json.dumps(header | vars(record), indent=1, default=str))
