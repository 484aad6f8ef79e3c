"""What every section of the configuration has in common: no unknown key, no silent conversion, a reason for each no.

A key is one of three kinds. Most act. Some are *idle*: DeepSpeed's files have them, nothing here depends on them, and
a note says so. Some are *refused*: they ask for what triax does not do, and the message says what to write instead;
values that ask for nothing (false, null, ``{"enabled": false}``) are taken.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator


class ConfigError(ValueError):
    """The configuration cannot be used; the message says which key, why, and what to write."""


_NOTHING: Any = object()


def setting(
    default: Any,
    description: str,
    *,
    auto: bool = False,
    auto_is: Any = _NOTHING,
    status: str | None = None,
    **limits: Any,
) -> Any:
    """A key that acts. With ``auto``, "auto", as Hugging Face's files have it, is the default; or it is ``auto_is``.

    Its status may be ``inert``: it changes nothing, whichever of its values it has; or ``older``: a name of before.
    """
    extra: Any = {"x-auto": default if auto_is is _NOTHING else auto_is} if auto or auto_is is not _NOTHING else {}
    extra |= {"x-status": status} if status else {}
    return Field(default=default, description=description, json_schema_extra=extra, **limits)


def idle(reason: str) -> Any:
    """A key that is taken and does nothing; ``reason`` says why."""
    return Field(default=None, description=reason, json_schema_extra={"x-status": "idle"})


def refused(reason: str, *nothing: Any) -> Any:
    """A key that is refused for ``reason``, which ends with what to write instead; ``nothing`` asks for nothing."""
    extra: dict[str, Any] = {"x-status": "refused", "x-nothing": list(nothing)}
    return Field(default=None, description=reason, json_schema_extra=extra)


def extra_of(field: Any) -> dict[str, Any]:
    """What ``setting``, ``idle`` and ``refused`` put on a field."""
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}


class Section(BaseModel):
    """A section of the configuration: an unknown key is an error, and a value is of its type or refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _acts(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        field = cls.model_fields[info.field_name]
        extra = extra_of(field)
        if extra.get("x-status") == "refused" and not asks_nothing(value, extra["x-nothing"]):
            raise ValueError(f"refused: {field.description}")
        if isinstance(value, str) and value == "auto" and "x-auto" in extra:
            return extra["x-auto"]
        kinds = kinds_of(field.annotation)
        if kinds is not None:
            check_kind(value, kinds)
        return value

    def notes(self) -> list[str]:
        """What the user asked for that changes nothing here, and why; sections within this one too."""
        notes = []
        for key in sorted(self.model_fields_set):
            field, value = type(self).model_fields[key], getattr(self, key)
            if isinstance(value, Section):
                notes += [f"{key}.{note}" for note in value.notes()]
            elif extra_of(field).get("x-status") == "idle":
                notes.append(f"{key} does nothing: {field.description}")
        return notes


def asks_nothing(value: Any, nothing: Iterable[Any] = ()) -> bool:
    """Whether a value of a refused key asks for nothing."""
    if value is None or value is False or value == {} or value == []:
        return True
    if isinstance(value, Mapping) and value.get("enabled") is False:
        return True
    return any(type(value) is type(each) and value == each for each in nothing)


def kinds_of(annotation: Any) -> set[type] | None:
    """The plain types that an annotation names; None where that is not all that it allows."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return kinds_of(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        found: set[type] = set()
        for part in get_args(annotation):
            kinds = kinds_of(part)
            if kinds is None:
                return None
            found |= kinds
        return found
    if origin is Literal:
        return {type(value) for value in get_args(annotation)}
    return {annotation} if annotation in (int, float, str, bool, type(None)) else None


def check_kind(value: Any, kinds: set[type]) -> None:
    """A number is a number, true and false are no numbers, and text is neither.

    Raises:
        ValueError: the value is of another type.
    """
    words = {int: "a whole number", float: "a number", str: "a text in quotes", bool: "true or false"}
    fits = (
        (isinstance(value, bool) and bool in kinds)
        or (isinstance(value, (int, float)) and not isinstance(value, bool) and bool(kinds & {int, float}))
        or (isinstance(value, str) and str in kinds)
        or (value is None and type(None) in kinds)
    )
    if not fits:
        wanted = " or ".join(words[kind] for kind in (bool, int, float, str) if kind in kinds)
        raise ValueError(f"give {wanted}, not {describe(value)}")


def describe(value: Any) -> str:
    """A value as JSON has it, short."""
    if isinstance(value, Mapping):
        return "a section {...}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) < 60 else f"{text[:57]}..."


def nearest(name: str, known: Iterable[str]) -> str:
    """What to write instead of a name that does not exist: the nearest of those known, or all of them."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1) or difflib.get_close_matches(
        name.lower(), [each.lower() for each in names], n=1
    )
    near = [each for each in names if near and each.lower() == near[0].lower()]
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}"


def no_such(where: str, name: str, known: Iterable[str]) -> str:
    """The message about a key or a name that does not exist."""
    return f"{where}: there is no {name!r}; {nearest(name, known)}"
