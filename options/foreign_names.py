"""Keys of other libraries, and the keys here that mean the same: foreign_names.toml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from ..base.foreign_tables import read_table


@cache
def counterparts() -> Mapping[str, Mapping[str, str]]:
    """Return the row of each foreign key, by its name."""
    return {name: row for row in read_table(__file__, "foreign_names.toml")["rows"] for name in row["names"].split()}


def counterpart(place: Sequence[str], key: str, in_training_file: bool) -> str | None:
    """Return what to write instead of another library's key; None if the key is of no library that is known here.

    Args:
        place: the names of the sections that lead to the key, from the outermost one.
        key: the key.
        in_training_file: the key stands in a training file, and not in a configuration.
    """
    name, known = key.lower().replace("-", "_"), counterparts()
    row = known.get(f"{place[-1]}.{name}" if place else name, known.get(name))
    return None if row is None else row["file" if in_training_file else "configuration"]
