"""DeepSpeed's names of engines' members, on engines of ``triax.Engine``: read until they end, with a warning."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

from ...engine.engines import Engine
from ...engine.pipeline_engine import PipelineEngine
from .from_config import ConfiguredEngine, ConfiguredModuleEngine
from .ledger import TABLES

ENDS = "0.3"  # version of triax in which engines made by triax.Engine have them no more
# The member -> what to write in its place.
NEW: dict[str, str] = TABLES["native_members"]


def _member(name: str, engine: Engine) -> Any:
    """Return a member of an engine. Python shows the warning once for each line that uses the name."""
    text = f"engine.{name} is DeepSpeed's name, which engines have until triax {ENDS}: write {NEW[name]}"
    warnings.warn(text, DeprecationWarning, stacklevel=3 if isinstance(engine, PipelineEngine) else 4)
    kind = next(cls for cls in (ConfiguredModuleEngine, ConfiguredEngine) if name in vars(cls))
    return vars(kind)[name].__get__(engine)


MEMBERS = {name: partial(_member, name) for name in NEW}
