"""Functions of DeepSpeed's module ``deepspeed.launcher.runner`` that read a hostfile."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from logging import getLogger
from pathlib import Path
from typing import Any

from ...grid.launcher.hosts import parse_hostfile, select

DLTS_HOSTFILE = "/job/hostfile"


def fetch_hostfile(hostfile_path: str | Path) -> dict[str, int] | None:
    """Return host -> number of slots of a hostfile; None, and a warning in the log, if there is no such file."""
    path = Path(hostfile_path)
    if not path.is_file():
        getLogger("triax").warning("there is no hostfile %s: only this host is used", path)
        return None
    return parse_hostfile(path.read_text(encoding="utf-8"), str(path))


def parse_inclusion_exclusion(resource_pool: Mapping[str, int], inclusion: str, exclusion: str) -> dict[str, list[int]]:
    """Return host -> the slots to use: all of a pool, those of ``inclusion``, or all but those of ``exclusion``."""
    return {host: list(slots) for host, slots in select(resource_pool, inclusion, exclusion).items()}


def encode_world_info(world_info: Mapping[str, Any]) -> str:
    """Return hosts and slots as text of letters and digits, base64 of JSON."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()
