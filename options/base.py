"""Declaration of options: frozen dataclasses whose fields carry their meaning and limits, and check themselves."""

from __future__ import annotations

import functools
import inspect
import math
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from ..base.checks import check_number
from ..base.errors import describe, nearest
from ..base.files import check_output
from ..base.option_error import Note, OptionError, join, refusal, together

_WORDS = {int: "a whole number", float: "a number", str: "a text in quotes", bool: "true or false"}


# Lines of an option in a docstring.
_DOCUMENTED = textwrap.TextWrapper(
    width=100, initial_indent=4 * " ", subsequent_indent=8 * " ", break_long_words=False, break_on_hyphens=False
)

Section = TypeVar("Section", bound="Options")
REQUIRED: Any = MISSING  # default of an option that must be given


def option(
    default: Any,
    doc: str,
    *,
    read: Callable[[Any], Any] | None = None,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    needs: str | None = None,
    writes: tuple[str, ...] = (),
    flags: tuple[str, ...] = (),
) -> Any:
    """Declare an option.

    Args:
        default: value of an option that is not given; ``dict`` for an empty mapping, ``REQUIRED`` for none.
        doc: the meaning, with the unit, in one line.
        read: function from the value in a file to the option's value.
        least, most: the smallest and the largest value.
        above, below: numbers that the value must be above or below.
        needs: option of the same section without which this one has no effect.
        writes: endings of the file to write, whose folder must exist; "" for any.
        flags: names on the command line, if not that of the option.
    """
    limits = {"least": least, "above": above, "most": most, "below": below}
    metadata = {
        "doc": doc,
        "read": read,
        "needs": needs,
        "writes": writes,
        "flags": flags,
        "limits": {k: limit for k, limit in limits.items() if limit is not None},
    }
    if default is dict:
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


class Declared:
    """Base class of frozen dataclasses whose fields are declared by ``option``."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Write every option with its meaning into the docstring, which ``help(triax.Zero)`` and the site show."""
        super().__init_subclass__(**kwargs)
        found = dict[str, Field[Any]]()
        for base in reversed(cls.__mro__[1:]):
            found |= getattr(base, "__dataclass_fields__", {})
        found |= {name: each for name, each in vars(cls).items() if isinstance(each, Field)}
        text = inspect.cleandoc(cls.__doc__ or "")
        lines = [] if "\nAttributes:\n" in text else ["", "Attributes:"]
        for name, each in found.items():
            if "doc" in each.metadata:
                lines.append(_DOCUMENTED.fill(f"{name}: {each.metadata['doc']}"))
        cls.__doc__ = "\n".join([text, *lines])


@dataclass(frozen=True, kw_only=True)
class Options(Declared):
    """Base class of a section of options. Every value has the type of its annotation and lies within its limits.

    Other forms of a value are accepted too: a list for a tuple; a whole number for a number; for a section, a mapping
    of its options, or the value of its main option, if it has one (``zero=2`` is ``zero=Zero(stage=2)``). True and
    False switch on and off a section that may be None; False switches off a ``SWITCHED`` one too.

    Raises:
        OptionError: a value of another type, or out of its limits, or one that contradicts another option.
    """

    MAIN: ClassVar[str | None] = None  # the option for whose value the section may be left out
    SWITCHED: ClassVar[bool] = False  # False in place of the section sets its main option to None

    def __post_init__(self) -> None:
        check_options(self)
        self.check()

    def check(self) -> None:
        """Check the options against one another.

        Raises:
            OptionError: two of them contradict each other.
        """

    def check_given(self) -> None:
        """Check that a mapping gives no option that has no effect, even with its default as the value.

        Raises:
            OptionError: the mapping gives such an option.
        """

    def notes(self) -> list[Note]:
        """Return notes on options, of this section and of inner ones, that are given and have no effect."""
        found = []
        for each in declared(type(self)):
            value, needed = getattr(self, each.name), each.metadata["needs"]
            if isinstance(value, Options):
                found += [note.within(each.name) for note in value.notes()]
            elif needed is not None and self.changes(each.name) and not getattr(self, needed):
                found.append(Note(each.name, f"does nothing without <{needed}>: give it, or leave <{each.name}> out"))
        return found

    def plain(self, given: bool = False) -> dict[str, Any]:
        """Return the options as values that JSON can hold; functions by their names.

        Args:
            given: leave out options that have their default.
        """
        return {
            each.name: value.plain(given) if isinstance(value, Options) else _plain(value)
            for each in declared(type(self))
            for value in [getattr(self, each.name)]
            if not given or self.changes(each.name)
        }

    @property
    def given(self) -> frozenset[str]:
        """Names of the options that the section was made from, and of all options that differ from their defaults."""
        named: frozenset[str] = self.__dict__.get("_given", frozenset())
        return named | {each.name for each in declared(type(self)) if self.changes(each.name)}

    def changes(self, name: str) -> bool:
        """Return True if an option has another value than its default."""
        return bool(getattr(self, name) != type(self).default_of(name))

    def changed(self, **values: Any) -> Self:
        """Return the section with other values for some options."""
        made = replace(self, **values)
        object.__setattr__(made, "_given", self.given)
        return made

    @classmethod
    def default_of(cls, name: str) -> Any:
        """Return the default of an option; None if it must be given."""
        found = cls.__dataclass_fields__[name]
        if found.default_factory is not MISSING:
            return found.default_factory()
        return None if found.default is REQUIRED else found.default

    @classmethod
    def of(cls, value: Any) -> Self:
        """Return the section for a value that stands for it: a section, a mapping, or its main option's value.

        Raises:
            OptionError: as the class; and for a name that is no option, with the nearest one.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            names, problems = [each.name for each in declared(cls)], list[OptionError]()
            for key in value:
                if key not in names:
                    reason = f"there is no {describe(str(key))}; {nearest(str(key), names)}"
                    problems.append(OptionError("", reason=reason, unknown=str(key)))
            for each in declared(cls):
                if is_required(each) and each.name not in value:
                    problems.append(refusal(f"<{each.name}> is missing: write it"))
            read = {}
            for each in declared(cls):
                if each.metadata["read"] is not None and each.name in value:
                    try:
                        read[each.name] = each.metadata["read"](value[each.name])
                    except ValueError as error:
                        problems.append(OptionError(each.name, value[each.name], str(error)))
            if problems:
                raise together(problems)
            made = cls(**{**value, **read})
            object.__setattr__(made, "_given", frozenset(value))
            made.check_given()
            return made
        if cls.MAIN is None or isinstance(value, Options):
            raise refusal(f"give triax.{cls.__name__}(...), not {describe(value)}")
        read = next(each for each in declared(cls) if each.name == cls.MAIN).metadata["read"]
        try:
            main = value if read is None else read(value)
        except ValueError as error:
            raise OptionError(cls.MAIN, value, str(error)) from error
        return cls(**{cls.MAIN: main})


def check_options(section: Any) -> None:
    """Check each option of a frozen dataclass by its annotation and its limits, and store it in the form of the former.

    Raises:
        OptionError: a value of another type, or out of its limits.
    """
    hints, problems = hints_of(type(section)), list[OptionError]()
    for each in declared(type(section)):
        value = getattr(section, each.name)
        try:
            checked = converted(value, hints[each.name])
            check_limits(checked, each.metadata["limits"])
            if checked is not None and each.metadata["writes"]:
                check_output(checked, each.metadata["writes"])
        except OptionError as error:
            problems.append(error.within(each.name))
        except ValueError as error:
            problems.append(OptionError(each.name, value, str(error)))
        else:
            object.__setattr__(section, each.name, checked)
    if problems:
        raise together(problems)


def as_kind(section: Options, kind: type[Section]) -> Section:
    """Return a section as one of the class that its own class extends."""
    return kind(**{each.name: getattr(section, each.name) for each in fields(kind)})


def declared(section: type) -> list[Field[Any]]:
    """Return the fields of a section that are options."""
    return [each for each in fields(section) if "doc" in each.metadata]


def is_required(found: Field[Any]) -> bool:
    """Return True if an option has no default."""
    return found.default is MISSING and found.default_factory is MISSING


def walk(section: type[Options], prefix: str = "") -> Iterator[tuple[str, type[Options], Any]]:
    """Yield each option by its path, with the class that declares it and its dataclass field; outer ones first."""
    inner = []
    for each in declared(section):
        path = join(prefix, each.name)
        yield path, section, each
        inner += [(path, kind) for kind in sections_in(hints_of(section)[each.name])]
    for path, kind in inner:
        yield from walk(kind, path)


def sections_in(hint: Any) -> list[type[Options]]:
    """Return the classes of sections that an annotation names."""
    kinds = [hint, *get_args(hint)]
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Options)]


def hints_of(section: type) -> dict[str, Any]:
    """Return the annotations of a section's options."""
    key: Any = section
    return _hints(key)


@functools.cache
def _hints(section: Any) -> dict[str, Any]:
    return get_type_hints(section)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, functools.partial):
        return {"type": _plain(value.func), **_plain(value.keywords)}
    return getattr(value, "__qualname__", type(value).__qualname__)


def converted(value: Any, hint: Any) -> Any:
    """Return a value in the form of an option's annotation, as ``Options`` accepts it.

    Raises:
        OptionError: a section that cannot be made of the value.
        ValueError: another type; the message says what to give.
    """
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if Any in kinds or (value is None and type(None) in kinds):
        return value
    sections = [kind for kind in kinds if sections_in(kind)]
    if isinstance(value, bool) and sections and type(None) in kinds:  # switches an optional section on or off
        return sections[0].of({}) if value else None
    if value is False and len(sections) == 1 and sections[0].SWITCHED:
        return sections[0].of({sections[0].MAIN: None})
    if isinstance(value, Options) and any(isinstance(value, kind) for kind in sections):
        return value
    if len(sections) == 1 and (isinstance(value, (Mapping, Options)) or len({*kinds} - {type(None)}) == 1):
        return sections[0].of(value)
    for kind in kinds:
        if get_origin(kind) is Literal and any(type(value) is type(each) and value == each for each in get_args(kind)):
            return value
        if get_origin(kind) is tuple and isinstance(value, (list, tuple)):
            return tuple(converted(each, get_args(kind)[0]) for each in value)
        if get_origin(kind) in (dict, Mapping) and isinstance(value, Mapping):
            return value
        if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return _in_float32(value)
        if isinstance(kind, type) and (type(value) is kind or (kind is Path and isinstance(value, Path))):
            return value
        if callable(value) and kind is Callable:
            return value
    raise ValueError(f"give {_wanted(kinds)}, not {describe(value)}")


def _in_float32(value: float) -> float:
    check_number(value)
    return value


def _wanted(kinds: tuple[Any, ...]) -> str:
    """Return the values that an annotation allows, in words."""
    words = []
    for kind in kinds:
        if get_origin(kind) is Literal:
            words += [repr(each) for each in get_args(kind)]
        elif get_origin(kind) is tuple:
            noun = _WORDS.get(get_args(kind)[0], "value").removeprefix("a ")
            words.append(f"a list of {noun.replace('text', 'texts') if 'text' in noun else f'{noun}s'}")
        elif kind is type(None):
            words.append("None")
        elif get_origin(kind) in (dict, Mapping):
            words.append("a mapping")
        else:
            words.append(_WORDS.get(kind, f"triax.{getattr(kind, '__name__', kind)}(...)"))
    return " or ".join(words)


def check_limits(value: Any, limits: Mapping[str, float]) -> None:
    """Check that a number, or each of several, lies within limits.

    Raises:
        ValueError: a number out of the limits.
    """
    signs = {"least": "or more", "above": "above", "most": "or less", "below": "below"}
    for each in value if isinstance(value, tuple) else (value,):
        if not isinstance(each, (int, float)) or isinstance(each, bool):
            continue
        for kind, limit in limits.items():
            within = {"least": each >= limit, "above": each > limit, "most": each <= limit, "below": each < limit}[kind]
            if not within or not math.isfinite(each):
                shown = f"{limit:,}" if isinstance(limit, int) else f"{limit:g}"
                words = f"{shown} {signs[kind]}" if kind in ("least", "most") else f"a number {signs[kind]} {shown}"
                raise ValueError(f"give {words}")
