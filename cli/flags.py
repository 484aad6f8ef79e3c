"""Flags of a command from classes of options: each option gives a flag its name, type, default, meaning and limits."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import Field
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from ..base.errors import ConfigError
from ..base.option_error import OptionError
from ..options.base import Options, declared, hints_of, is_required
from ..options.words import flag

_METAVARS: dict[Any, str] = {int: "N", float: "X", str: "TEXT", Path: "PATH", bool: " "}
_CONTEXT = "called"  # name of the argument that has typer's context, in functions that ask for it too
_SIGNS = {"least": ">=", "above": ">", "most": "<=", "below": "<"}


def with_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command in which each argument whose annotation is a class of options stands for that class's flags.

    The function is called with an object of the class, made from the flags that were typed. A mistake is one line with
    the flag's name: ``--top-k = 0: give 1 or more.``

    Raises:
        ConfigError: a value that a class refuses, or a flag that has no effect without another one.
    """
    hints, own = get_type_hints(function, include_extras=True), inspect.signature(function).parameters
    sections = {name: hint for name, hint in hints.items() if isinstance(hint, type) and issubclass(hint, Options)}
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(_CONTEXT, keyword, annotation=typer.Context)]
    for name, parameter in own.items():
        if name in sections:
            kinds = hints_of(sections[name])
            parameters += [_parameter(option, kinds[option.name]) for option in declared(sections[name])]
        elif name != _CONTEXT:
            parameters.append(parameter.replace(annotation=hints[name], kind=keyword))

    @functools.wraps(function)
    def command(**given: Any) -> Any:
        typed = {name: given[name] for name in given if _is_typed(given[_CONTEXT], name)}
        arguments = {name: given[name] for name in own if name in given}
        try:
            for name, section in sections.items():
                arguments[name] = _made(section, typed)
            return function(**arguments)
        except OptionError as error:
            raise ConfigError(f"{error.spelled(flag)}.".replace(" or None, not ", ", not ")) from error

    vars(command)["__signature__"] = inspect.Signature(parameters)
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def one_line_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose ``ValueError``, ``OSError`` and ``ImportError`` are mistakes of the user."""

    @functools.wraps(function)
    def called(*arguments: Any, **given: Any) -> Any:
        try:
            return function(*arguments, **given)
        except ConfigError:
            raise
        except (ValueError, OSError, ImportError) as error:
            raise ConfigError(str(error)) from error

    return called


def _is_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _made(section: type[Options], typed: Mapping[str, Any]) -> Options:
    """Return the section of the flags that were typed.

    Raises:
        OptionError: the section refuses a value.
        ConfigError: a flag has no effect without another one.
    """
    hints = hints_of(section)
    own_options = {option.name: option for option in declared(section) if option.name in typed}
    made = section.of({name: _value(typed[name], _kinds(hints[name])) for name in own_options})
    if notes := made.notes():
        raise ConfigError(f"{notes[0].spelled(flag)}.")
    return made


def _value(typed: Any, kinds: list[Any]) -> Any:
    """Return what was typed, in a type of an option; the option's class refuses a text that stays one."""
    if isinstance(typed, list):
        return tuple(typed)
    if not isinstance(typed, str):
        return typed
    with suppress(ValueError):
        for kind in kinds:
            if get_origin(kind) is tuple and ("," in typed or len(kinds) == 1):
                return tuple(get_args(kind)[0](item) for item in typed.split(","))
        for kind in (int, float):
            if kind in kinds:
                return kind(typed)
    return typed


def _kinds(hint: Any) -> list[Any]:
    """Return the types that an annotation allows, without None."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return [kind for kind in kinds if kind is not type(None)]


def _parameter(found: Field[Any], hint: Any) -> inspect.Parameter:
    """Return a parameter from which typer makes the flag of an option, with its text as the value."""
    default: Any = ... if is_required(found) else found.default
    kind, annotation = _kinds(hint)[-1], str
    metavar, choices = _METAVARS.get(kind, "X,X,..."), list[str]()
    if kind in (bool, Path):
        annotation = kind
    elif get_origin(kind) is Literal:
        choices = list(get_args(kind))
        metavar = "|".join(choices)
    elif get_args(kind)[:1] == (str,):  # the flag may be repeated
        annotation, metavar, default = list[str], "TEXT", list(default)  # type: ignore[assignment]
    elif isinstance(default, tuple):
        default = ",".join(f"{number:g}" for number in default)
    limits = " ".join(f"{_SIGNS[sign]}{limit:g}" for sign, limit in found.metadata["limits"].items())
    described = typer.Option(
        *(found.metadata["flags"] or [flag(found.name)]),
        help=found.metadata["doc"],
        metavar=f"{metavar} {limits}" if limits else metavar,
        autocompletion=(lambda: choices) if choices else None,
    )
    keyword = inspect.Parameter.KEYWORD_ONLY
    if isinstance(default, (int, float)) and annotation is str:
        default = f"{default:g}"
    return inspect.Parameter(found.name, keyword, default=default, annotation=Annotated[annotation | None, described])
