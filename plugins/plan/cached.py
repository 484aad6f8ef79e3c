"""Cache of a method's results in its object, by the arguments.

A method takes as arguments all that its result depends on, as values that are compared fast: a number of a layer's
kind, a ``NamedTuple`` with the part of a layout that counts, an object that equal ones share.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

Owner = TypeVar("Owner")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def cached_method(
    method: Callable[Concatenate[Owner, Arguments], Result],
) -> Callable[Concatenate[Owner, Arguments], Result]:
    """Return a method that computes its result once for equal arguments, which are positional."""
    name = f"_results_of_{method.__name__}"

    @wraps(method)
    def cached(self: Owner, *arguments: Any) -> Result:
        results = self.__dict__.get(name)
        if results is None:
            results = self.__dict__[name] = {}
        if arguments not in results:
            results[arguments] = method(self, *arguments)  # type: ignore[call-arg]
        return results[arguments]

    return cached  # type: ignore[return-value]
