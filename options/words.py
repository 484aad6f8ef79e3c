"""Options as words of a command line."""

from __future__ import annotations

from .base import Options, declared


def flag(name: str) -> str:
    """Return the flag of an option: ``top_k`` is ``--top-k``."""
    return f"--{name.replace('_', '-')}"


def words_of(options: Options) -> list[str]:
    """Return the flags and values that stand for options on a command line; those with their defaults are left out."""
    words = []
    for each in declared(type(options)):
        value, name = getattr(options, each.name), (*each.metadata["flags"], flag(each.name))[0]
        if value is True:
            words.append(name)
        elif options.changes(each.name):
            words += [word for part in (value if isinstance(value, tuple) else (value,)) for word in (name, str(part))]
    return words
