"""The roof: the only place that knows all three wings."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import profiler
    from .config import Config, ConfigError
    from .create import initialize
    from .engine import Engine

__all__ = ["Config", "ConfigError", "Engine", "initialize", "profiler"]

_HOME = {"Config": "config", "ConfigError": "config", "Engine": "engine", "initialize": "create"}


def __getattr__(name: str) -> Any:
    # Lazy, so that the commands that need no torch start at once.
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    if name == "profiler":  # the front door has it as a whole: triax.profiler.FlopsProfiler
        return importlib.import_module(".profiler", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
