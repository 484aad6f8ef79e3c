"""Models as lists of layers: a config in, ``list[LayerSpec]`` out.

``triax.models.gpt`` is the file; the function that makes the list is in it: ``from triax.models.gpt import
gpt``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import GPTConfig
    from .gpt import GPTLoss

_HOME = {"GPTConfig": "config", "GPTLoss": "gpt"}

__all__ = ["GPTConfig", "GPTLoss"]


def __getattr__(name: str) -> Any:
    # Lazy, so that a config can be read and counted where torch is not installed.
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
