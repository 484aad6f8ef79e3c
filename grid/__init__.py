"""The ground floor: ranks and coordinates, this process's groups, where parameters live, and randomness."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .axis import Axis, Pending
    from .environment import Environment, read_environment
    from .grid import Grid
    from .layout import Box, Layout, layout_of, set_layout, split
    from .topology import Topology

_HOME = {
    "Axis": "axis",
    "Pending": "axis",
    "Environment": "environment",
    "read_environment": "environment",
    "Grid": "grid",
    "Box": "layout",
    "Layout": "layout",
    "layout_of": "layout",
    "set_layout": "layout",
    "split": "layout",
    "Topology": "topology",
}

__all__ = [
    "Axis",
    "Box",
    "Environment",
    "Grid",
    "Layout",
    "Pending",
    "Topology",
    "layout_of",
    "read_environment",
    "set_layout",
    "split",
]


def __getattr__(name: str) -> Any:
    # Lazy, so that topology.py and environment.py work where torch is not installed.
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
