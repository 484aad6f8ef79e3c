"""Languages of other libraries in which a part of the options may be given; packages name theirs as entry points."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from ..base.entry_points import offered
from ..base.errors import ConfigError, nearest
from .base import Options
from .engine import EngineOptions

_GROUP = "triax.dialects"  # the entry points of other libraries' languages


class GivenOptions(NamedTuple):
    """Options that keys of another language set.

    Attributes:
        values: the keys, with their values.
        fields: option, or section of options -> value, or the values of some of its options.
    """

    values: dict[str, Any]
    fields: dict[str, Any]

    def over(self, options: EngineOptions) -> EngineOptions:
        """Return the options, with the values that are given here in place of theirs."""
        changes = {}
        for name, value in self.fields.items():
            before = getattr(options, name)
            partial = isinstance(value, dict) and isinstance(before, Options)
            changes[name] = before.changed(**value) if partial else value
        return options.changed(**changes)


class Dialect(Protocol):
    """Protocol of a module that reads another language's keys."""

    TITLE: str  # of a whole configuration, in messages

    def given_keys(self, source: Mapping[str, Any] | str) -> dict[str, Any]:
        """Return the keys of a section, or of the file at a path, with their values."""

    def given_options(self, kept: Mapping[str, Any]) -> GivenOptions:
        """Return the options that keys set.

        Raises:
            ConfigError: keys or values that cannot be.
        """

    def key_of(self, path: str) -> str:
        """Return the key of an option."""


def find_dialect(name: str) -> Dialect:
    """Return the dialect of a name.

    Raises:
        ConfigError: no installed package has it.
    """
    found = {each.name: each for each in offered(_GROUP)}
    if name not in found:
        raise ConfigError(f"there is no dialect {name!r}; {nearest(name, found)}: install the package that has it")
    dialect: Dialect = found[name].load()
    return dialect
