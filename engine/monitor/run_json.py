"""Writer of ``run.json``: grid, configuration, schedule, memory and traffic of a run."""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ...base import VERSION
from ...base.files import parse_json, read_text
from .files import RUN, replace_file
from .records import RunRecord


def write_run(folder: Path, record: RunRecord) -> None:
    """Write the description of a run into its folder, which is made where it does not exist.

    Of a resumed run, ``earlier`` lists the grids that the folder's steps before were taken on.
    """
    header = {
        "triax": VERSION,
        "torch": torch.__version__,
        "written": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": _command(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    content = header | vars(record) | {"earlier": _earlier(folder / RUN, record.since_step)}
    replace_file(folder / RUN, json.dumps(content, indent=1, default=str))


def _command() -> str:
    """Return the command line of this program: its file's name, or ``python -m`` and its module."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)  # None of a file
    name = ["python", "-m", spec.name.removesuffix(".__main__")] if spec else [Path(sys.argv[0]).name]
    return shlex.join([*name, *sys.argv[1:]])


def _earlier(file: Path, since: int) -> list[dict[str, Any]]:
    """Return what the last run.json says of the steps before ``since``: grid, ranks, batch, schedule, ZeRO stage."""
    try:
        old = parse_json(read_text(file))
        last = {key: old[key] for key in ("since_step", "grid", "batch", "zero")}
        last |= {"ranks": len(old["ranks"]), "schedule": (old["schedule"] or {}).get("name")}
        return [run for run in (*old["earlier"], last) if run["since_step"] < since]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # none, or not one that triax wrote
        return []
