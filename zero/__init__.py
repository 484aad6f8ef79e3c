"""The east wing: replicas without redundancy."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .lend import gathered
    from .standalone import ShardedOptimizer

_HOME = {"ShardedOptimizer": "standalone", "gathered": "lend"}

__all__ = ["ShardedOptimizer", "gathered"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_HOME)}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
