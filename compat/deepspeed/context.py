"""``initialize``, which registers its engines for DeepSpeed's functions that take no engine."""

from __future__ import annotations

from functools import wraps
from typing import Any
from weakref import WeakValueDictionary

from ...engine.base import Engine
from ...engine.initialize import initialize as make_engine

# The one context of this adapter, because DeepSpeed's API is global: engines by id, in the order of their creation,
# which is the same on every rank.
ENGINES: WeakValueDictionary[int, Engine] = WeakValueDictionary()


@wraps(make_engine)
def initialize(*args: Any, **kwargs: Any) -> Any:
    made = make_engine(*args, **kwargs)
    ENGINES[id(made[0])] = made[0]
    return made
