"""Writing unsharded tensors of another library as a checkpoint, on one process."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...grid import Grid
from ..lineage import Lineage
from ..snapshot import Snapshot
from ..writer import Writer


def write_whole(
    folder: Path,
    tag: str,
    snapshot: Snapshot,
    run: dict[str, Any],
    origin: str,
    model: dict[str, Any] | None = None,
) -> None:
    """Write unsharded tensors as a checkpoint.

    Args:
        folder, tag: folder of checkpoints, and the new checkpoint's name.
        snapshot: the tensors, and the numbers of the optimizer's state. A header is added to it.
        run: counters and schedules of the run, with ``global_steps``.
        origin: the library and the folder from which the tensors were read.
        model: description of the model, as ``formats.describe`` returns it.

    Raises:
        RuntimeError: if the checkpoint could not be written.
    """
    snapshot.header = {
        "tag": tag,
        "step": run["global_steps"],
        "versions": {"torch": torch.__version__, "from": origin},
        "grid": {},
        "config": {},
        "dtype": None,
        "model": model,
        "run": run,
        "client_state": {},
    }
    problem = Writer(Grid(), snapshot, folder, tag, lambda text: [text], True, Lineage(secrets.token_hex(6))).run()
    if problem is not None:
        raise RuntimeError(problem)


def renamed(name: str, renames: Mapping[str, str]) -> str:
    """Return a name with its prefix replaced. If several old prefixes match, the longest is replaced."""
    for old in sorted(renames, key=len, reverse=True):
        if name.startswith(old):
            return renames[old] + name[len(old) :]
    return name
