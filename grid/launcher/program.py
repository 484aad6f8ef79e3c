"""Program that ``triax run`` starts on every rank: a script, a module or an executable, and its arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...base.errors import ConfigError
from ...base.files import read_text
from ...options.launch import LaunchOptions
from .worker import LOCAL_RANK, Executable, Module

_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
_LOCAL_RANK = re.compile(r"""add_argument\(\s*["'](--local[_-]rank)["']""")


@dataclass(frozen=True)
class LaunchedProgram:
    """Program of all ranks.

    Attributes:
        target: the script, module or executable.
        arguments: its arguments.
    """

    target: Path | Module | Executable
    arguments: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        """The words that stand for it behind the options of ``triax run``."""
        if isinstance(self.target, Path):
            return [str(self.target), *self.arguments]
        return ["--no-python" if isinstance(self.target, Executable) else "-m", self.target.name, *self.arguments]


def program_of(script: str, arguments: Sequence[str], options: LaunchOptions) -> LaunchedProgram:
    """Return the program that the words of a command line name.

    Raises:
        ConfigError: there is no such script, or ``python`` before it has options of its own.
    """
    if options.no_python:
        return LaunchedProgram(Executable(script), tuple(arguments))
    script, is_module, arguments = _without_python(script, options.module, arguments)
    if is_module:
        return LaunchedProgram(Module(script), tuple(arguments))
    if not Path(script).is_file():
        raise ConfigError(f"There is no file {script}. Give a Python file, or -m and the name of a module.")
    own = [] if options.no_local_rank else _local_rank(Path(script))
    return LaunchedProgram(Path(script), (*own, *arguments))


def _without_python(script: str, is_module: bool, arguments: Sequence[str]) -> tuple[str, bool, Sequence[str]]:
    """Return the script or module and its arguments. ``python`` before them is left out, as other launchers take it.

    Raises:
        ConfigError: ``python`` has options of its own, or no script.
    """
    if not _PYTHON.fullmatch(Path(script).name) or not arguments:
        return script, is_module, arguments
    first, *rest = arguments
    if first == "-m" and rest:
        return rest[0], True, rest[1:]
    if first.startswith("-"):
        raise ConfigError(f"You wrote {script} {first}, but options of Python have no effect here. Leave {first} out.")
    return first, is_module, rest


def _local_rank(script: Path) -> list[str]:
    """Return the option by which other launchers tell a script its rank on the host, if the script has it."""
    match = _LOCAL_RANK.search(read_text(script, "replace"))
    return [] if match is None else [f"{match[1]}={LOCAL_RANK}"]
