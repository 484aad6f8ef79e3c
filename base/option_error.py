"""Errors and notes about options, which each door of the library shows under its own names.

An option has a path, such as ``zero.stage``: the sections that lead to it, and its name. Its name in Python and in a
training file is the path; in another library's file it is its key there. A text mentions another
option as ``<stage>``: the path from the section whose check wrote the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .errors import ConfigError, describe

_MENTION = re.compile(r"<([a-zA-Z_0-9.]+)>")
_NOT_GIVEN: Any = object()

Names = Callable[[str], str]  # path of an option -> its name at a door


class Note(NamedTuple):
    """Remark on an option that is given and has no effect.

    Attributes:
        path: the option, or the section, that the remark is about.
        text: the remark, which follows the option's name and mentions other options as ``<path>``.
    """

    path: str
    text: str

    def within(self, section: str) -> Note:
        """Return the note with paths that begin one section further out."""
        return Note(join(section, self.path), _further_out(self.text, section))

    def spelled(self, names: Names = str) -> str:
        """Return the note in one line, with each option under its name at a door."""
        name, text = names(self.path) if self.path else "", _spelled(self.text, self.path, names)
        return f"{name}{'' if text.startswith(':') else ' '}{text}".strip()


class OptionError(ConfigError):
    """A value that an option cannot have, alone or beside the others.

    Args:
        path: path of the option or section; empty for several sections.
        value: the value; left out if the reason names it.
        reason: what is wrong, and what to write. Other options are mentioned as ``<path>``.
        unknown: a name that is no option of the section ``path``.
    """

    def __init__(self, path: str, value: Any = _NOT_GIVEN, reason: str = "", unknown: str | None = None) -> None:
        super().__init__(path, value, reason, unknown)
        self.path, self.value, self.reason, self.unknown = path, value, reason, unknown

    def within(self, section: str) -> OptionError:
        """Return the error with paths that begin one section further out."""
        return OptionError(join(section, self.path), self.value, _further_out(self.reason, section), self.unknown)

    def spelled(self, names: Names = str) -> str:
        """Return the message, with each option under its name at a door."""
        reason = _spelled(self.reason, self.path, names)
        if not self.path:
            return reason
        given = "" if self.value is _NOT_GIVEN else f" = {describe(self.value)}"
        return f"{names(self.path)}{given}: {reason}"

    def __str__(self) -> str:
        return self.spelled()


def refusal(reason: str) -> OptionError:
    """Return the error of options that contradict one another, or the model, or the grid.

    Args:
        reason: what is wrong, and what to write. Options are mentioned as ``<path>``.
    """
    return OptionError("", reason=reason)


class OptionErrors(OptionError):
    """Several errors of one section, a line each."""

    def __init__(self, errors: Sequence[OptionError]) -> None:
        super().__init__("", reason="; ".join(map(str, errors)))
        self.errors = errors

    def within(self, section: str) -> OptionErrors:
        """Return the errors with paths that begin one section further out."""
        return OptionErrors([error.within(section) for error in self.errors])

    def spelled(self, names: Names = str, separator: str = "; ") -> str:
        """Return the messages, with each option under its name at a door."""
        return separator.join(error.spelled(names) for error in self.errors)


def together(errors: Sequence[OptionError]) -> OptionError:
    """Return one error for several."""
    flat = [each for error in errors for each in (error.errors if isinstance(error, OptionErrors) else (error,))]
    return flat[0] if len(flat) == 1 else OptionErrors(flat)


def join(section: str, path: str) -> str:
    return f"{section}.{path}" if section and path else section or path


def _further_out(text: str, section: str) -> str:
    return _MENTION.sub(lambda found: f"<{section}.{found[1]}>", text)


def _spelled(text: str, path: str, names: Names) -> str:
    """Return a text with each mentioned option under its name; within a section whose check wrote it, without it."""
    section = f"{names(path)}." if path else ""
    outer = f"{names(path.rpartition('.')[0])}." if "." in path else ""

    def name(found: re.Match[str]) -> str:
        full = names(found[1])
        for prefix in filter(None, (section, outer)):
            if full.startswith(prefix):
                return full.removeprefix(prefix)
        return full

    return _MENTION.sub(name, text)
