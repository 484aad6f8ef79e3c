"""The two kinds of engines, told apart by their models: their own modules import what asks here."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from ..pipe.module import PipelineModule

if TYPE_CHECKING:
    from .module_engine import ModuleEngine
    from .pipeline_engine import PipelineEngine


def is_pipelined(engine: PipelineEngine | ModuleEngine) -> TypeGuard[PipelineEngine]:
    """Return True for a ``PipelineEngine``, which trains a ``PipelineModule``."""
    return isinstance(engine.module, PipelineModule)
