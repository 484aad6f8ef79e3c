"""The west wing: stages in time. Schedules as values, and what runs them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .module import PipelineModule
    from .ops import Op
    from .passes import Program, lower
    from .schedule import Schedule
    from .schedules import make_schedule
    from .search import find_schedule
    from .simulate import Costs, Timeline
    from .spec import LayerSpec, TiedLayerSpec
    from .verify import ScheduleError

__all__ = [
    "Costs",
    "LayerSpec",
    "Op",
    "PipelineModule",
    "Program",
    "Schedule",
    "ScheduleError",
    "TiedLayerSpec",
    "Timeline",
    "find_schedule",
    "lower",
    "make_schedule",
]

# (`verify`, `simulate` and `partition` are modules here; the front door has the first two as functions.)
_HOME = {
    "Costs": "simulate",
    "LayerSpec": "spec",
    "Op": "ops",
    "PipelineModule": "module",
    "Program": "passes",
    "Schedule": "schedule",
    "ScheduleError": "verify",
    "TiedLayerSpec": "spec",
    "Timeline": "simulate",
    "find_schedule": "search",
    "lower": "passes",
    "make_schedule": "schedules",
}


def __getattr__(name: str) -> Any:
    # Lazy, so that what needs no torch works where it is not installed.
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
