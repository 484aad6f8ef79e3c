"""Functions that tell the two kinds of engines by their models, without an import of the engines themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from ..pipe.module import PipelineModule

if TYPE_CHECKING:
    from .module_engine import ModuleEngine
    from .pipeline_engine import PipelineEngine


def is_pipelined(engine: PipelineEngine | ModuleEngine) -> TypeGuard[PipelineEngine]:
    """Return True for a ``PipelineEngine``, which trains a ``PipelineModule``."""
    return isinstance(engine.module, PipelineModule)
