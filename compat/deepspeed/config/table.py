"""The table of keys, ``keys.toml``: what each key of a configuration does, by its row."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from ....base.foreign_tables import read_table
from ....options.base import Options, declared, hints_of, sections_in
from ....options.engine import EngineOptions
from ....options.table import in_words_of_a_file

TITLE = "the configuration"
_TYPES: dict[str, Any] = {
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "list of int": tuple[int, ...],
    "list of str": tuple[str, ...],
    "section": dict[str, Any],
    "mapping": Mapping[Any, Any],
}
_LIMITS = ("least", "above", "most", "below")
_NONE = type(None)


@dataclass(frozen=True)
class Key:
    """Row of the table.

    Attributes:
        name: the key in its section.
        status: acts, inert, older, idle or refused.
        doc: its meaning, or the reason.
        hint: type of the value.
        default: value of a key that is not given.
        limits: least, above, most, below -> number.
        row: the row as it is in the file.
    """

    name: str
    status: str
    doc: str
    hint: Any = Any
    default: Any = None
    limits: Mapping[str, float] = field(default_factory=dict)
    row: Mapping[str, Any] = field(default_factory=dict)

    @property
    def option(self) -> str | None:
        """Path of the option that the key sets."""
        option: str | None = self.row.get("option")
        return option

    @property
    def auto(self) -> Any:
        """Value that "auto" stands for; "auto" itself if it stands for none."""
        answer = self.row.get("auto", "auto")
        return self.default if answer is True else answer

    @property
    def kinds(self) -> list[Any]:
        """The types that a value may have, without null."""
        return [kind for kind in _kinds(self.hint) if kind is not _NONE]

    @property
    def takes_null(self) -> bool:
        """True if the value may be null."""
        return self.hint is Any or _NONE in _kinds(self.hint)


@dataclass(frozen=True)
class Table:
    """Rows of one section.

    Attributes:
        path: path of the section; empty for the outermost one.
        row: the row of the section itself.
        keys: keys that hold a value, by name: acting ones first, then those without effect, then refused ones.
        sections: inner sections, by name.
        other_names: another name of a key or an inner section -> its name.
        file: what the outermost section is called in messages.
    """

    path: str
    row: Mapping[str, Any]
    keys: Mapping[str, Key]
    sections: Mapping[str, Table]
    other_names: Mapping[str, str]
    file: str

    @property
    def names(self) -> list[str]:
        """All keys of the section."""
        return [*self.keys, *self.sections]

    def walk(self) -> Iterator[Table]:
        """Yield the section and all inner ones, outer ones first."""
        yield self
        for inner in self.sections.values():
            yield from inner.walk()

    def at(self, path: str) -> Table:
        """Return the inner section at a path."""
        return functools.reduce(lambda found, name: found.sections[name], path.split(".") if path else (), self)


@functools.cache
def table() -> Table:
    """Return the table of the whole configuration."""
    return table_of({name: row for name, row in _file().items() if not name.startswith("names of ")}, TITLE)


def keys(within: Table | None = None) -> Iterator[tuple[str, Key]]:
    """Yield each key by its path, of inner sections too."""
    for section in (within or table()).walk():
        for key in section.keys.values():
            yield f"{section.path}.{key.name}".lstrip("."), key


def key_of(path: str) -> str:
    """Return the key of an option: ``zero.stage`` is ``zero_optimization.stage``."""
    known = _names_of_options()
    if path in known:
        return known[path]
    section, _, last = path.rpartition(".")
    if section in ("optimizer", "lr_scheduler") and last != "type":
        return f"{key_of(section)}.params.{last}"
    return f"{key_of(section)}.{last}" if section else path


def _file() -> Mapping[str, Any]:
    return read_table(__file__, "keys.toml")


@functools.cache
def _names_of_options() -> dict[str, str]:
    names: dict[str, str] = dict(_file()["names of options"])
    for section in table().walk():
        if (option := section.row.get("option", section.row.get("on"))) is not None:
            names.setdefault(option, section.path)
    for path, key in keys():
        if key.option is not None:
            names.setdefault(key.option, path)
    return names


def table_of(rows: Mapping[str, Any], file: str, path: str = "") -> Table:
    """Return the table of a data file's rows, or of those of the section at a path."""
    inner = {name: row for name, row in rows.items() if isinstance(row, dict) and "*" in row}
    own = {name: row for name, row in rows.items() if name not in inner and name != "*"}
    sections = {name: table_of(row, file, f"{path}.{name}".lstrip(".")) for name, row in inner.items()}
    own_keys = {name: _key(name, {"option": row} if isinstance(row, str) else row) for name, row in own.items()}
    other = {key.row["also"]: name for name, key in own_keys.items() if "also" in key.row}
    other |= {section.row["also"]: name for name, section in sections.items() if "also" in section.row}
    return Table(path, rows["*"], own_keys, sections, other, file)


def _key(name: str, row: Mapping[str, Any]) -> Key:
    hint, default, limits, doc = _declared(row["option"]) if "option" in row else (Any, None, {}, "")
    if "type" in row or "choices" in row:
        words = row.get("type", ())
        words = [words] if isinstance(words, str) else words
        hint = _union([_TYPES[word] for word in words] if words else [Literal[tuple(row["choices"])]])
        limits = {}
    limits = {name: row[name] for name in _LIMITS if name in row} or limits
    default = row.get("default", default)
    default = None if default == "null" else tuple(default) if isinstance(default, list) else default
    if hint is not Any:
        takes_null = row.get("null", _NONE in _kinds(hint) or (default is None and "required" not in row))
        kinds = [kind for kind in _kinds(hint) if kind is not _NONE]
        hint = _union([*kinds, *([_NONE] if takes_null else [])])
    status = next((status for status in ("idle", "refused", "inert", "older") if status in row), "acts")
    words = {"inert": "No effect: {}.", "older": "Older name of {}."}.get(status, "{}")
    return Key(name, status, words.format(row.get(status, row.get("doc", doc))), hint, default, limits, row)


def _declared(path: str) -> tuple[Any, Any, Mapping[str, float], str]:
    """Return type, default, limits and meaning of an option, as it declares them; empty ones without a declaration."""
    section, _, last = path.rpartition(".")
    for kind in option_classes(section):
        for declaration in declared(kind):
            if declaration.name == last:
                doc = in_words_of_a_file(declaration.metadata["doc"])
                return hints_of(kind)[last], kind.default_of(last), declaration.metadata["limits"], doc
    return Any, None, {}, ""


def _union(kinds: Sequence[Any]) -> Any:
    return functools.reduce(lambda one, other: one | other, kinds)


def _kinds(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def option_classes(path: str) -> list[type[Options]]:
    """Return the class of the section of options at a path, and its subclasses."""
    kinds: list[type[Options]] = [EngineOptions]
    for name in path.split(".") if path else ():
        kinds = [inner for kind in kinds for inner in sections_in(hints_of(kind)[name])]
        kinds = [subclass for kind in kinds for subclass in _with_subclasses(kind)]
    return kinds


def _with_subclasses(kind: type[Options]) -> list[type[Options]]:
    return [kind, *(subclass for inner in kind.__subclasses__() for subclass in _with_subclasses(inner))]
