"""The arguments that a configuration gives an optimizer or a schedule, held against its signature."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .config_base import ConfigError, describe, nearest


def check_arguments(
    where: str, name: str, made: Callable[..., Any], params: Mapping[str, Any], skip: Sequence[str] = ("self",)
) -> None:
    """Whether ``made`` takes the arguments, and whether each is of its default's type.

    Args:
        where: of the configuration, for messages: ``optimizer.params``.
        name: what is made, for messages.
        made: the class.
        params: the arguments.
        skip: arguments that the configuration does not give.

    Raises:
        ConfigError: an argument that does not exist, one that is missing, or a value of another type.
    """
    taken = {key: p for key, p in inspect.signature(made).parameters.items() if key not in skip}
    for key in params:
        if key not in taken:
            raise ConfigError(f"{where}: {name} has no {key}; it takes {', '.join(taken)} ({nearest(key, taken)})")
    for key, parameter in taken.items():
        required = parameter.default is inspect.Parameter.empty
        if required and key not in params:
            raise ConfigError(f"{where}: {name} needs {key}: write it")
        if key in params:
            wanted = _mismatch(params[key], parameter.default, parameter.annotation)
            if wanted:
                raise ConfigError(f"{where}.{key}: give {wanted}, not {describe(params[key])}")


def trial(where: str, given: Mapping[str, Any], make: Callable[[Mapping[str, Any]], Any]) -> None:
    """Make something once, to see that it can be made; what stops it is said of the argument that is to blame.

    Args:
        where: of the configuration.
        given: the arguments.
        make: makes it from arguments; the blame is found by leaving out one argument after the other.

    Raises:
        ConfigError: it cannot be made.
    """
    error = _fails(make, given)
    if error is None:
        return
    if isinstance(error, ConfigError):
        raise error
    blamed = {key: _fails(make, {k: v for k, v in given.items() if k != key}) for key in given}
    guilty = [key for key, other in blamed.items() if other is None] or [
        key for key, other in blamed.items() if (type(other), str(other)) != (type(error), str(error))
    ]
    place = f"{where}.{guilty[0]} = {describe(given[guilty[0]])}" if guilty else f"{where} ({', '.join(given)})"
    raise ConfigError(f"{place}: {error or type(error).__name__}") from error


def _fails(make: Callable[[Mapping[str, Any]], Any], params: Mapping[str, Any]) -> Exception | None:
    try:
        make(params)
    except Exception as error:  # whatever a class of torch's says of its arguments
        return error
    return None


def _mismatch(value: Any, default: Any, annotation: Any) -> str | None:
    """What a value should have been, where it is not of its default's type, or of its annotation's."""
    words = set(re.findall(r"[a-z]+", str(annotation).lower()))
    if value is None:
        return None if default is None or "none" in words else "a value"
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number"
    if isinstance(default, tuple):
        good = isinstance(value, (list, tuple)) and len(value) == len(default) and all(_number(v) for v in value)
        return None if good else f"a list of {len(default)} numbers"
    if isinstance(default, bool) or (words & {"bool"} and not words & {"int", "float", "str"}):
        return None if isinstance(value, bool) else "true or false"
    if isinstance(default, str):
        return None if isinstance(value, str) else "a text in quotes"
    if isinstance(value, list) and words & {"list", "sequence", "iterable", "rates"}:
        return None if all(_number(v) for v in value) else "a list of numbers"
    if words & {"sequence", "iterable"}:
        return "a list of numbers"
    if "float" in words or "rates" in words or isinstance(default, float):
        return None if _number(value) else "a number"
    if "int" in words or isinstance(default, int):
        return None if _number(value) and (isinstance(value, int) or value.is_integer()) else "a whole number"
    return None


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
