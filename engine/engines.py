"""Engine with both of its kinds: a class registers as one by being a subclass of ``Engine``."""

from __future__ import annotations

from .base import Engine
from .module_engine import ModuleEngine
from .pipeline_engine import PipelineEngine

__all__ = ["Engine", "ModuleEngine", "PipelineEngine"]
