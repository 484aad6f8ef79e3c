"""The east wing: replicas without redundancy."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .lend import gathered
    from .onebit_adam import OneBitAdam, ZeroOneAdam
    from .onebit_lamb import OneBitLamb
    from .powersgd import PowerSGD
    from .sparse_rows import SparseRows
    from .standalone import ShardedOptimizer
    from .topk import TopK

_HOME = {
    "OneBitAdam": "onebit_adam",
    "OneBitLamb": "onebit_lamb",
    "PowerSGD": "powersgd",
    "ShardedOptimizer": "standalone",
    "SparseRows": "sparse_rows",
    "TopK": "topk",
    "ZeroOneAdam": "onebit_adam",
    "gathered": "lend",
}

__all__ = [
    "OneBitAdam",
    "OneBitLamb",
    "PowerSGD",
    "ShardedOptimizer",
    "SparseRows",
    "TopK",
    "ZeroOneAdam",
    "gathered",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_HOME)}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
