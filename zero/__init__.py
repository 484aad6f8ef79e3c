"""The east wing: replicas without redundancy."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .lend import gathered
    from .onebit_adam import OneBitAdam, ZeroOneAdam
    from .onebit_lamb import OneBitLamb
    from .standalone import ShardedOptimizer

_HOME = {
    "OneBitAdam": "onebit_adam",
    "OneBitLamb": "onebit_lamb",
    "ShardedOptimizer": "standalone",
    "ZeroOneAdam": "onebit_adam",
    "gathered": "lend",
}

__all__ = ["OneBitAdam", "OneBitLamb", "ShardedOptimizer", "ZeroOneAdam", "gathered"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_HOME)}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
