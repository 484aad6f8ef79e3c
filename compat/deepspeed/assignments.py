"""Assignments to members of DeepSpeed's engines, on an object or on its class: they act, or raise an error.

Scripts replace methods of DeepSpeed's engine classes and set attributes that DeepSpeed's engines read. What triax's
engines do not call or read would have no effect, without a word. A name that DeepSpeed's engines do not have is the
script's own.
"""

from __future__ import annotations

import inspect
from functools import partialmethod
from typing import Any

from ...base.foreign_tables import answers
from .ledger import MEMBERS, SENTENCES

# Member of DeepSpeed's engines that triax's do not call or read -> what to do instead.
_LINES = answers(MEMBERS)


class EngineType(type):
    """Class of DeepSpeed's engine classes, whose members scripts assign."""

    def __setattr__(cls, name: str, value: Any) -> None:
        _check(cls, name)
        super().__setattr__(name, value)

    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(f"{cls.__name__} has no {name}{reason(name)}")


def reason(name: str) -> str:
    """Return why an engine has no member of DeepSpeed's, as the end of a sentence; nothing for other names."""
    return f", which DeepSpeed's engine has: {_LINES[name]}" if name in _LINES else ""


def check_assignment(engine: Any, name: str, value: Any) -> None:
    """Check an assignment to a member of an engine.

    Raises:
        AttributeError: it would have no effect. The message says what to do instead.
    """
    if name in ("enable_backward_allreduce", "pipeline_enable_backward_allreduce") and value is True:
        return  # as it is
    if name == "optimizer" and vars(engine).get(name) not in (None, value):
        raise AttributeError(
            "engine.optimizer was assigned another optimizer, which would have no effect, because the engine's own "
            "optimizer steps this rank's shards: pass the optimizer, or a function that makes it, to "
            "initialize(optimizer=...)"
        )
    _check(type(engine), name)


def _check(cls: type, name: str) -> None:
    member = inspect.getattr_static(cls, name, None)
    computed = isinstance(member, partialmethod) or (isinstance(member, property) and member.fset is None)
    line = _LINES.get(name, SENTENCES["VALUES"] if computed else None)
    if line is not None:
        raise AttributeError(
            f"{cls.__name__}.{name} was assigned, which would have no effect, because triax's engine does not call or "
            f"read it: {line}"
        )
