"""Base class of the sections: no unknown key, no silent conversion of a value, a reason for each refusal.

A key is of one of three kinds. Most keys are active. *Idle* keys are accepted because DeepSpeed's files have them; they
have no effect, and a note says so. *Refused* keys ask for what triax does not support; the message says what to write
instead. Their off values (false, null, ``{"enabled": false}``) are accepted.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ....base.checks import check_number
from ....base.errors import describe

_NOTHING: Any = object()


def setting(
    default: Any,
    description: str,
    *,
    auto: bool = False,
    auto_is: Any = _NOTHING,
    status: str | None = None,
    needs: str | None = None,
    **limits: Any,
) -> Any:
    """Declare an active key.

    Args:
        default: the value of a key that is not given.
        description: one line for the JSON schema and the table of keys.
        auto: accept "auto", as Hugging Face's files have it, for the default.
        auto_is: accept "auto" for this value.
        status: ``inert``: no value of the key has an effect; ``older``: an older name of another key.
        needs: key of the same section without which this key has no effect, as in DeepSpeed's files; a note says so. In
            a section with a key ``enabled``, all others need it.
        limits: pydantic's limits of the value: ``ge``, ``gt``, ``le``, ``lt``, ...
    """
    extra: Any = {"x-auto": default if auto_is is _NOTHING else auto_is} if auto or auto_is is not _NOTHING else {}
    extra |= {"x-status": status} if status else {}
    extra |= {"x-needs": needs} if needs else {}
    return Field(default=default, description=description, json_schema_extra=extra, **limits)


def idle(reason: str) -> Any:
    """Declare a key that is accepted and has no effect; ``reason`` says why."""
    return Field(default=None, description=reason, json_schema_extra={"x-status": "idle"})


def refused(reason: str, *off: Any) -> Any:
    """Declare a key that is refused. ``reason`` ends with what to write instead; the values ``off`` are accepted."""
    extra: dict[str, Any] = {"x-status": "refused", "x-off": list(off)}
    return Field(default=None, description=reason, json_schema_extra=extra)


def extra_of(field: Any) -> dict[str, Any]:
    """Return what ``setting``, ``idle`` or ``refused`` stored on a field."""
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}


class Section(BaseModel):
    """Section of the configuration. An unknown key, or a value of another type, is an error.

    Every number is finite, and 0 or one that float32 holds.
    """

    OPTIONS: ClassVar[Mapping[str, Sequence[str]]] = {}  # type -> the options of it, in a section with a key ``type``

    TITLE: ClassVar[str] = "the configuration"  # of a file whose outermost section this is

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _acts(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        field = cls.model_fields[info.field_name]
        extra = extra_of(field)
        if extra.get("x-status") == "refused" and not is_off(value, extra["x-off"]):
            raise ValueError(f"refused: {field.description}")
        if isinstance(value, str) and value == "auto" and "x-auto" in extra:
            return extra["x-auto"]
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(each, float):
                check_number(each)
        kinds = kinds_of(field.annotation)
        if kinds is not None and not any(isinstance(each, BeforeValidator) for each in field.metadata):
            check_kind(value, kinds)
        return value

    @model_validator(mode="after")
    def _options_of_its_type(self) -> Self:
        for key in sorted(self.model_fields_set):
            if getattr(self, key) is not None and (types := self.types_of(key)):
                kind = vars(self)["type"]
                raise ValueError(
                    f"{key} is an option of type {' and '.join(types)}, and the type is {kind}: leave it out"
                )
        return self

    def types_of(self, key: str) -> list[str]:
        """Return the types that an option belongs to, if the section has another type."""
        types = [kind for kind, keys in self.OPTIONS.items() if key in keys]
        return [] if not types or vars(self)["type"] in types else types

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, as a dict does; the default for a key that was not given."""
        return getattr(self, key) if key in self.model_fields_set else default

    def notes(self) -> list[str]:
        """Return notes on the given keys that have no effect, with the reason; those of inner sections too."""
        notes = []
        for key in sorted(self.model_fields_set):
            field, value = type(self).model_fields[key], getattr(self, key)
            if isinstance(value, Section):
                notes += [f"{key}.{note}" for note in value.notes()]
                continue
            status, missing = extra_of(field).get("x-status"), self._missing(key)
            if status == "idle" or (status == "inert" and value != field.default):
                notes.append(f"{key} does nothing: {str(field.description).removeprefix('No effect: ')}")
            elif status is None and missing is not None and value != field.default:
                notes.append(f"{key} does nothing without {missing}: write {missing}, or leave {key} out")
        return notes

    def _missing(self, key: str) -> str | None:
        """Return the key that a key of this section needs and that is not given or off; None if nothing is missing."""
        switch = "enabled" if "enabled" in type(self).model_fields and key != "enabled" else None
        needed = extra_of(type(self).model_fields[key]).get("x-needs", switch)
        return needed if needed is not None and is_off(getattr(self, needed)) else None


class SwitchSection(Section):
    """Section that can be switched off by ``false`` or ``null``, as by ``{"enabled": false}``."""

    @model_validator(mode="before")
    @classmethod
    def _off(cls, values: Any) -> Any:
        return {} if values is None or values is False else values


def inner_section(annotation: Any) -> type[Section] | None:
    """Return the section class in a key's annotation, or None if the key holds a plain value."""
    kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
    return next((kind for kind in kinds if issubclass(kind, Section)), None)


def is_off(value: Any, off: Iterable[Any] = ()) -> bool:
    """Return True if the value of a refused key switches the feature off, so that the key need not be refused.

    Args:
        value: the value of the key.
        off: values that switch this feature off, beside false, null and ``{"enabled": false}``.
    """
    if value is None or value is False or value == {} or value == []:
        return True
    if isinstance(value, Mapping) and value.get("enabled") is False:
        return True
    return any(type(value) is type(each) and value == each for each in off)


def kinds_of(annotation: Any) -> set[type] | None:
    """Return the plain types that an annotation names, or None if it also allows values of other types."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return kinds_of(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        found = [kinds_of(part) for part in get_args(annotation)]
        return None if None in found else set[type]().union(*filter(None, found))
    if origin is Literal:
        return {type(value) for value in get_args(annotation)}
    return {annotation} if annotation in (int, float, str, bool, type(None)) else None


def check_kind(value: Any, kinds: set[type]) -> None:
    """Check the type of a value without conversion: a number is not accepted for text, nor true for a number.

    Raises:
        ValueError: the value has another type.
    """
    words = {int: "a whole number", float: "a number", str: "a text in quotes", bool: "true or false"}
    allowed = kinds | {int, float} if kinds & {int, float} else kinds
    if not isinstance(value, tuple(allowed)) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join(words[kind] for kind in (bool, int, float, str) if kind in kinds)
        raise ValueError(f"give {wanted}, not {describe(value)}")
