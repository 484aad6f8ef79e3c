"""Checks of a configuration's arguments against the signature of an optimizer or a schedule."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from ...base.checks import check_number
from ...base.errors import ConfigError, close, describe
from ...base.option_error import refusal

Made = TypeVar("Made")


def check_arguments(
    where: str, name: str, made: Callable[..., Any], params: Mapping[str, Any], skip: Sequence[str] = ("self",)
) -> None:
    """Check that a class takes the arguments, and that each has the type of its default.

    Args:
        where: path of the option whose arguments these are: ``optimizer``.
        name: name of the class, for messages.
        made: the class.
        params: the arguments.
        skip: arguments that a configuration does not give.

    Raises:
        ConfigError: an argument that does not exist, one that is missing, or a value of another type.
    """
    taken = {key: p for key, p in inspect.signature(made).parameters.items() if key not in skip}
    for key in params:
        if key not in taken:
            near = close(key, taken)
            guess = f" (did you mean {near!r}?)" if near else ""
            raise refusal(f"{arguments_of(where)}: {name} has no {key[:60]}; it takes {', '.join(taken)}{guess}")
    for key, parameter in taken.items():
        required = parameter.default is inspect.Parameter.empty
        if required and key not in params:
            raise refusal(f"{arguments_of(where)}: {name} needs {key}: write it")
        if key in params and not _same(params[key], parameter.default):
            wanted = _mismatch(params[key], parameter.default, parameter.annotation)
            if wanted:
                raise refusal(f"<{where}.{key}>: give {wanted}, not {describe(params[key])}")


def arguments_of(where: str) -> str:
    """Return the mention of all arguments of an optimizer or a schedule."""
    return f"<{where}.arguments>" if "." not in where else f"<{where}>"


def trial(where: str, given: Mapping[str, Any], make: Callable[[Mapping[str, Any]], Made]) -> Made:
    """Call ``make`` once to check that an optimizer or schedule accepts the arguments, and return the result.

    Args:
        where: as in ``check_arguments``.
        given: the arguments.
        make: function that makes the object from the arguments. After an error it is called again without one
            argument after the other, to find the argument that causes the error.

    Raises:
        ConfigError: the object cannot be made of these arguments. The message names the one that causes the error.
        Exception: the error itself, if it does not come from the arguments: an import that fails, memory that is full.
    """
    try:
        return make(given)
    except (ConfigError, ImportError, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a class of torch's raises for its arguments
        # The second try comes before those without an argument, which may leave traces: a schedule sets initial_lr.
        guilty = None if (by_chance := _is_made(make, given)) else _to_blame(given, make, error)
        if by_chance or (guilty is None and not isinstance(error, (TypeError, ValueError))):
            raise  # no argument causes it
        position = (
            f"<{where}.{guilty}> = {describe(given[guilty])}"
            if guilty
            else f"{arguments_of(where)} ({', '.join(given)})"
        )
        raise refusal(f"{position}: {error or type(error).__name__}") from error


def defaults_of(cls: type, first: str) -> dict[str, Any]:
    """Return the defaults of a class's arguments, without its first argument."""
    parameters = inspect.signature(cls).parameters.values()
    return {p.name: p.default for p in parameters if p.name != first and p.default is not inspect.Parameter.empty}


def _is_made(make: Callable[[Mapping[str, Any]], Any], given: Mapping[str, Any]) -> bool:
    """Return True if the arguments work the second time, so that they were not the cause of an error."""
    try:
        make(given)
    except Exception:
        return False
    return True


def _to_blame(given: Mapping[str, Any], make: Callable[[Mapping[str, Any]], Any], error: Exception) -> str | None:
    """Return the argument whose removal removes or changes the error, or None if there is no such argument."""
    another = None
    for key in given:
        try:
            make({name: value for name, value in given.items() if name != key})
            return key
        except Exception as other:
            if another is None and (type(other), str(other)) != (type(error), str(error)):
                another = key
    return another


def _same(value: Any, default: Any) -> bool:
    """Return True if a value is an argument's default, which JSON writes as a list if it is a tuple."""
    return isinstance(default, tuple) and isinstance(value, (list, tuple)) and tuple(value) == default


def _mismatch(value: Any, default: Any, annotation: Any) -> str | None:
    """Return a type in words, for an error message, if a value has neither the default's type nor the annotated one.

    None if the value fits.
    """
    words = set(re.findall(r"[a-z]+", str(annotation).lower()))
    if value is None:
        return None if default is None or "none" in words else "a value"
    for item in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(item, float):
            try:
                check_number(item)
            except ValueError as error:
                return str(error).removeprefix("give ")
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
