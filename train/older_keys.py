"""Older names of a training file's keys (older_keys.toml), which are read until the version in which they end."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from ..base.errors import ConfigError
from ..base.foreign_tables import read_table

ENDS = "0.3"  # version of triax that reads them no more

Values = TypeVar("Values", bound=dict[str, Any])
Moved = Callable[[dict[str, Any], str, dict[str, Any], str], None]

_TABLE = read_table(__file__, "older_keys.toml")
MOVED: Mapping[str, str] = _TABLE["moved"]  # older name -> name
# Keys that 0 switched off, and what does so now.
_OFF = {key: None if off == "null" else off for key, off in _TABLE["off"].items()}


def new_name(key: str) -> str:
    """Return the name of a dotted key, or of the section that it is in, where its older one is given."""
    for older, name in MOVED.items():
        if key == older or key.startswith(f"{older}."):
            key = name + key[len(older) :]
    return key


def renamed(values: Mapping[str, Any], short_forms: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of a file under the names of today; a warning in the log names each older one.

    Args:
        values: the keys and values of the file.
        short_forms: section -> the key of which a plain value in place of the section is the value.

    Raises:
        ConfigError: a key stands there under both names.
    """
    made = _copied(values)
    for note in rename(made, short_forms):
        warn_of_older(note)
    return made


def warn_of_older(note: str) -> None:
    """Log a warning about an older name."""
    text = "%s, which triax %s removes: write the new name, or rewrite the file with triax train FILE --upgrade"
    logging.getLogger("triax").warning(text, note, ENDS)


def rename(values: Values, short_forms: Mapping[str, str], moved: Moved = lambda *_: None) -> Iterator[str]:
    """Give the keys of a file their names of today, in place, and yield a note on each change.

    Args:
        values: the keys and values, changed.
        short_forms: as of ``renamed``.
        moved: called with the older section, the older key, the section and the key, after each move.

    Raises:
        ConfigError: a key stands there under both names.
    """
    for older, name in MOVED.items():
        *outer, last = older.split(".")
        holder = _section(values, outer)
        if holder is None or last not in holder:
            continue
        *sections, key = name.split(".")
        target: dict[str, Any] = values
        for number, section in enumerate(sections):
            found = target.get(section)
            if not isinstance(found, dict):
                main = short_forms.get(".".join(sections[: number + 1]), "")
                target[section] = made = type(values)()
                made.update({} if found is None else {main: found})
                found = made
            target = found
        if key in target:
            raise ConfigError(f"{older} is an older name of {name}: give the second alone")
        target[key] = holder.pop(last)
        moved(holder, last, target, key)
        if not holder:
            del values[outer[0]]
        yield f"{older} is an older name of {name}"
    for key, off in _OFF.items():
        *outer, last = key.split(".")
        holder = _section(values, outer)
        given = None if holder is None else holder.get(last)
        if holder is not None and isinstance(given, (int, float)) and not isinstance(given, bool) and given == 0:
            holder[last] = off
            yield f"{key}: 0 is an older spelling of {key}: {json.dumps(off)}"


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in values.items()}


def _section(values: dict[str, Any], path: list[str]) -> dict[str, Any] | None:
    """Return the section at a path; None if there is none."""
    found: Any = values
    for part in path:
        found = found.get(part) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None
