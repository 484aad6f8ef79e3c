"""Functions that torch.compile leaves out of its graphs: collectives, and randomness keyed by the step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from .torch_private import note_uncompiled

P = ParamSpec("P")
R = TypeVar("R")


def uncompiled(function: Callable[P, R], reason: str | None = None) -> Callable[P, R]:
    """Decorate a function so that a compiled layer ends its graph before it, runs it as it is, and goes on after it.

    ``torch.compiler.disable`` does the same, but imports the compiler, which takes seconds, also where nothing is
    compiled.

    Args:
        function: the function.
        reason: text of torch's error where a graph may not end (``fullgraph=True``).
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    if reason is not None:
        note_uncompiled(call, reason)
    return call
