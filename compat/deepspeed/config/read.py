"""Reading a configuration: from a dict or a JSON file to a checked ``Section``, by the table of keys."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_origin

from ....base.checks import check_folder_name, check_number
from ....base.errors import ConfigError, close, describe, no_such
from ....base.json_comments import read_json
from ....options.base import check_limits, converted
from ....options.foreign_names import counterpart
from . import checks
from .table import TITLE, Key, Table, table

_A_SECTION = "a section {...} belongs here"


@dataclass(frozen=True)
class Section:
    """Checked section of a configuration, or all of it. Its keys are attributes.

    Attributes:
        table: the rows of its keys.
        values: key -> value; of a key that is not given, its default.
        given: the keys that are given.
    """

    table: Table = field(repr=False, compare=False)
    values: Mapping[str, Any]
    given: frozenset[str] = field(default=frozenset(), compare=False)

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("values", {})
        key = name if name in values else self.table.other_names.get(name) if values else None
        if key is None:
            raise AttributeError(f"the section {self.table.path or self.table.file} has no {name}" if values else name)
        return values[key]

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, as a dict does; the default for a key that is not given."""
        return self.values[key] if key in self.given else default

    def changed(self, **values: Any) -> Section:
        """Return the section with other values for some keys."""
        return Section(self.table, {**self.values, **values}, self.given | values.keys())

    def plain(self, given: bool = False) -> dict[str, Any]:
        """Return the values as a dict; ``given``: without the keys that are not given."""
        return {
            key: value.plain(given) if isinstance(value, Section) else value
            for key, value in self.values.items()
            if not given or key in self.given
        }

    def walk(self) -> Iterator[Section]:
        """Yield the section and all inner ones, outer ones first."""
        yield self
        for value in self.values.values():
            if isinstance(value, Section):
                yield from value.walk()

    def notes(self) -> list[str]:
        """Return notes on the given keys that have no effect, with the reason; those of inner sections too."""
        notes = []
        for section in self.walk():
            switch = section.table.row.get("switch")
            off = switch is not None and is_off(section.values[switch])
            idle = section.table.row.get("idle_params", {})
            params = sorted(idle.keys() & section.values.get("params", ()))
            notes += [f"{section.table.path}.params.{name} does nothing: {idle[name]}" for name in params]
            for name in sorted(section.given & section.table.keys.keys()):
                key, value = section.table.keys[name], section.values[name]
                path = f"{section.table.path}.{name}".lstrip(".")
                if key.status == "idle" or (key.status == "inert" and value != key.default):
                    notes.append(f"{path} does nothing: {key.doc.removeprefix('No effect: ')}")
                elif key.status == "acts" and off and name != switch and value != key.default:
                    notes.append(f"{path} does nothing without {switch}: write {switch}, or leave {name} out")
        return notes


def section(path: str, **values: Any) -> Section:
    """Return the checked section at a path, made of its keys."""
    return checked_section(table().at(path), values)


def read_section(config: Any) -> Section:
    """Return a configuration from a dict, or from the path of a JSON file, with its keys and values checked.

    Raises:
        ConfigError: as ``parse_config``.
    """
    if isinstance(config, (str, Path)):
        config = read_json(config)
    if not isinstance(config, Mapping):
        raise ConfigError(f"{TITLE} is a {type(config).__name__}: pass a dict or the path of a JSON file")
    checked = checked_section(table(), _without_comments(config))
    checks.check_sections(checked)
    return checked


def unknown_keys(values: Mapping[str, Any]) -> list[str]:
    """Return outermost keys of a configuration that are neither a key of any section nor like one of the outermost."""
    known = {name for known_section in table().walk() for name in (*known_section.names, *known_section.other_names)}
    return [
        key
        for key in map(str, values)
        if key not in known and not key.startswith(("_", "$")) and not close(key, table().names)
    ]


def is_off(value: Any, off: Iterable[Any] = ()) -> bool:
    """Return True if the value of a refused key switches the feature off, so that the key need not be refused.

    Args:
        value: the value of the key.
        off: values that switch this feature off, beside null, false, {}, [] and ``{"enabled": false}``.
    """
    if value is None or value is False or value == {} or value == []:
        return True
    if isinstance(value, Mapping) and value.get("enabled") is False:
        return True
    return any(type(value) is type(off_value) and value == off_value for off_value in off)


def _without_comments(value: Any) -> Any:
    """Return a value of the configuration without the keys that begin with ``_``, which are comments, at any depth."""
    if isinstance(value, Mapping):
        return {key: _without_comments(inner) for key, inner in value.items() if not str(key).startswith("_")}
    return [_without_comments(inner) for inner in value] if isinstance(value, list) else value


def checked_section(rows: Table, values: Any) -> Section:
    """Return a section whose keys and values are checked by the rows of its table.

    Raises:
        ConfigError: all that is wrong with them.
    """
    problems: list[str] = []
    checked = _section(rows, values, problems)
    if problems:
        raise ConfigError("; ".join(problems))
    assert checked is not None
    return checked


def _section(rows: Table, given: Any, problems: list[str]) -> Section | None:
    """Return a section of checked values; append what is wrong with it to ``problems``."""
    if isinstance(given, Section):
        return given
    if given is None and rows.row.get("optional"):
        return None
    if given is None or isinstance(given, bool):
        given = rows.row.get("short", {}).get(json.dumps(given), given)
    if not isinstance(given, Mapping):
        problems.append(f"{rows.path} = {describe(given)}: {_A_SECTION}")
        return None
    count, where = len(problems), f"{rows.path}: " if rows.path else ""
    try:
        given = _under_own_names(rows, given)
    except ValueError as error:
        problems.append(f"{where}{error}")
        return None
    values: dict[str, Any] = {}
    for name, key in rows.keys.items():
        path = f"{rows.path}.{name}".lstrip(".")
        if name not in given:
            values[name] = key.default
            problems += [f"{path} is missing: write it"] if "required" in key.row else []
            continue
        try:
            values[name] = _value(key, given[name])
        except ValueError as error:
            waits = isinstance(given[name], str) and given[name] == "auto" and key.status != "refused"
            wrong = f'{path} is "auto", which a trainer fills in from its own arguments: write a value'
            shown = "" if isinstance(given[name], Mapping) else f" = {describe(given[name])}"
            problems.append(wrong if waits else f"{path}{shown}: {error}")
    for name, inner in rows.sections.items():
        values[name] = _section(inner, given.get(name, None if inner.row.get("optional") else {}), problems)
    problems += [_no_such_key(rows, str(key)) for key in given if key not in rows.names]
    made = Section(rows, values, frozenset(given))
    if len(problems) == count:
        try:
            _check_types(made)
            getattr(checks, rows.row.get("check", "nothing"))(made)
        except ValueError as error:
            problems.append(f"{where}{error}")
    return made


def _under_own_names(rows: Table, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a section under their names in the table."""
    own = dict(given)
    for other, name in rows.other_names.items():
        if other in own:
            if name in own:
                raise ValueError(f"{other} is another name of {name}, and both are given: give only {name}")
            own[name] = own.pop(other)
    if "before" in rows.row:
        _BEFORE[rows.row["before"]](own)
    return own


def _any_stage(given: dict[str, Any]) -> None:
    """Remove what has no meaning to a run, and DeepSpeed's words for "any stage" where the stage is searched for."""
    given.pop("$schema", None)  # for editors
    zero, tuning = given.get("zero_optimization"), given.get("autotuning")
    tunes = isinstance(tuning, Mapping) and tuning.get("enabled") is True
    if tunes and isinstance(zero, Mapping) and zero.get("stage") in ("auto", "all"):
        given["zero_optimization"] = {key: value for key, value in zero.items() if key != "stage"}


def _older_offload(given: dict[str, Any]) -> None:
    """Replace DeepSpeed's older keys that are true by the keys of today."""
    if given.get("stage3_gather_fp16_weights_on_model_save") is True:
        del given["stage3_gather_fp16_weights_on_model_save"]
        given["stage3_gather_16bit_weights_on_model_save"] = True
    pin = given.get("cpu_offload_use_pin_memory") is True
    if pin:
        del given["cpu_offload_use_pin_memory"]
    for old, new in (
        ("cpu_offload", "offload_optimizer"),
        ("cpu_offload_params", "offload_param"),
        ("cpu_offload_param", "offload_param"),
    ):
        if given.get(old) is True:
            if given.get(new):
                raise ValueError(f"{old} is an older name of {new}: give only the second")
            given[new] = {"device": "cpu", "pin_memory": pin}
            del given[old]


_BEFORE: dict[str, Callable[[dict[str, Any]], None]] = {"any_stage": _any_stage, "older_offload": _older_offload}
# Other forms of a value.
_READS: dict[str, Callable[[Any], Any]] = {
    "never": lambda value: None if isinstance(value, float) and value == math.inf else value,
    "dynamic": lambda value: None if isinstance(value, str) and value == "dynamic" else value,
    "dtype_name": lambda value: str(value).removeprefix("torch."),  # torch.bfloat16 itself too
    "lower": lambda value: value.lower() if isinstance(value, str) else value,
    "one_or_several": lambda value: [value] if isinstance(value, str) else value,
    "folder_name": lambda value: check_folder_name(value) if isinstance(value, str) else value,
}


def _value(key: Key, value: Any) -> Any:
    """Return the value of a key as its type.

    Raises:
        ValueError: a value that it cannot have; the message says what to give.
    """
    if key.status == "refused" and not is_off(value, key.row.get("off", ())):
        raise ValueError(f"refused: {key.doc}")
    if isinstance(value, str) and value == "auto":
        value = key.auto
    if "reads" in key.row:
        value = _READS[key.row["reads"]](value)
    for number in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(number, float):
            check_number(number)
    if key.hint is Any or (value is None and key.takes_null):
        return value
    kinds = key.kinds
    if [get_origin(kind) for kind in kinds] == [dict] and not _is_section(value):
        raise ValueError(_A_SECTION)
    if int in kinds:
        value = _whole(value)
    elif tuple[int, ...] in kinds and isinstance(value, (list, tuple)):
        value = [_whole(item) for item in value]
    result = converted(value, key.hint)
    check_limits(result, key.limits)
    return float(result) if float in kinds and isinstance(result, int) else result


def _is_section(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def _whole(value: Any) -> Any:
    """Return a whole number that is written as 1e9 as an int."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _check_types(made: Section) -> None:
    """Check that no key is given that belongs to another ``type`` of the section."""
    for name in sorted(made.given & made.table.keys.keys()):
        types = made.table.keys[name].row.get("types")
        if types is not None and made.values[name] is not None and made.values["type"] not in types:
            raise ValueError(
                f"{name} is an option of type {' and '.join(types)}, and the type is {made.values['type']}: leave it "
                "out"
            )


def _no_such_key(rows: Table, name: str) -> str:
    """Return the message for an unknown key: another library's counterpart, the nearest key, or other sections."""
    where = rows.path or rows.file
    if rows.file != TITLE:
        return no_such(where, name, rows.names)
    if (instead := counterpart(rows.path.split(".") if rows.path else [], name, False)) is not None:
        return f"{where}: there is no {name!r}; write {instead}"
    near = close(name, rows.names)
    # A name of one word means something else in each section: the interval of recomputation is not that of checkpoints.
    sections = [keys.path or TITLE for keys in table().walk() if "_" in name and name in _acting(keys)]
    if not near and 0 < len(sections) <= 3:
        return f"{where}: there is no {name!r} here, but in {' and '.join(sections)}: write it there"
    if not near and len(rows.names) > 20:
        return (
            f"{where}: there is no {describe(name)}, and no key like it: `triax compat config --table` lists all keys"
        )
    return no_such(where, name, rows.names)


def _acting(rows: Table) -> set[str]:
    return {key.name for key in rows.keys.values() if key.status not in ("idle", "refused")} | {*rows.sections}
