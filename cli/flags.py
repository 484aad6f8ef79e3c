"""Flags of a command from classes of options: each option gives a flag its name, type, default, meaning and limits."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import Field
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from ..base.errors import ConfigError
from ..base.option_error import OptionError
from ..options.base import Options, declared, hints_of, is_required

_METAVARS: dict[Any, str] = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


def with_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command in which each argument whose annotation is a class of options stands for that class's flags.

    The function is called with an object of the class. An option's check names the flags: ``--top-k = 0: give 1 or
    more``.
    """
    hints = get_type_hints(function, include_extras=True)
    sections = {name: hint for name, hint in hints.items() if isinstance(hint, type) and issubclass(hint, Options)}
    parameters: list[inspect.Parameter] = []
    for name, each in inspect.signature(function).parameters.items():
        if name in sections:
            kinds = hints_of(sections[name])
            parameters += [_parameter(found, kinds[found.name]) for found in declared(sections[name])]
        else:
            parameters.append(each.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(function)
    def command(*ordered: Any, **given: Any) -> Any:
        for name, section in sections.items():
            values = {each.name: given.pop(each.name) for each in declared(section) if each.name in given}
            try:
                given[name] = section(**{key: _without_list(value) for key, value in values.items()})
            except OptionError as error:
                raise ConfigError(f"{error.spelled(flag)}.") from error
        return function(*ordered, **given)

    vars(command)["__signature__"] = inspect.Signature(parameters)
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def flag(name: str) -> str:
    """Return the flag of an option: ``top_k`` is ``--top-k``."""
    return f"--{name.replace('_', '-')}"


def _parameter(found: Field[Any], hint: Any) -> inspect.Parameter:
    """Return a parameter from which typer makes the flag of an option."""
    limits = found.metadata["limits"]
    default: Any = ... if is_required(found) else found.default
    kinds = [each for each in (get_args(hint) or (hint,)) if each not in (type(None), ...)]
    if get_origin(hint) is tuple:  # the flag may be repeated
        hint, default = list[kinds[0]], list(default)  # type: ignore[valid-type]
    names = [flag(found.name)] if default is False else []  # no --no-chat beside --chat
    described = typer.Option(
        *names,
        help=found.metadata["doc"],
        min=limits.get("least"),
        max=limits.get("most"),
        metavar=_METAVARS.get(kinds[0]),
    )
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(found.name, kind, default=default, annotation=Annotated[hint, described])


def _without_list(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
