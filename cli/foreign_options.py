"""Commands that answer a mistyped line in one line, and know flags of other libraries and of earlier versions."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, ClassVar

from typer.core import TyperCommand

from ..base.errors import ConfigError, close
from ..base.foreign_tables import read_table
from .verbs import NEW_FLAGS, OLDER, path_of, warn_of_older


class Command(TyperCommand):
    """A command that says in one line what is wrong, and names its own flag for another library's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments.

        Raises:
            ConfigError: they are not those of the command.
        """
        while True:
            try:
                return super().parse_args(ctx, list(args))
            except Exception as error:
                if not hasattr(error, "format_message"):  # not click's UsageError, of which typer has a copy
                    raise
                name = getattr(error, "option_name", "") if hasattr(error, "possibilities") else ""
                translated = self.translated(name, args) if name else None
                if translated is None:
                    said = self._unknown(ctx, name) if name else f"{error.format_message().rstrip('.')}. {_help(ctx)}"
                    raise ConfigError(said) from None
                args = translated

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help, which ends with a line to type."""
        path = path_of(ctx).partition(" ")[2]
        self.epilog = f"Example: {read_table(__file__, 'examples.toml')[path]}"
        super().format_help(ctx, formatter)

    def translated(self, name: str, args: list[str]) -> list[str] | None:
        """Return the arguments with this command's flags in place of an unknown one; None if it stays unknown."""
        if (newer := NEW_FLAGS.get(str(self.name), {}).get(name)) is None:
            return None
        warn_of_older(name, newer)
        return [newer + word[len(name) :] if _name(word) == name else word for word in args]

    def _unknown(self, ctx: Any, name: str) -> str:
        """Return the answer to an unknown flag."""
        from ..compat.launcher_options import EQUIVALENTS

        own = [option for parameter in self.params for option in parameter.opts]
        if (older := OLDER.get((ctx.parent.info_name, name))) is not None:
            return f"{name} is a verb now: type {older}."
        if name in ("-q", "--quiet", "-v", "--verbose"):
            return f"{name} stands in front of the command: triax {name} {path_of(ctx).partition(' ')[2]}."
        same = [option for option, others in EQUIVALENTS.items() if _name(name) in others and option in own]
        near = same[0] if same else close(name, own)
        return f"{path_of(ctx)} has no {name}{f'; did you mean {near}?' if near else f'. {_help(ctx)}'}"


class RunCommand(Command):
    """The command ``triax run``, which takes other launchers' options, or says why one has no effect or is refused."""

    # The script's own options follow it. --node_rank, as other launchers write it, is --node-rank.
    SETTINGS: ClassVar[dict[str, Any]] = {
        "allow_interspersed_args": False,
        "allow_extra_args": True,
        "token_normalize_func": lambda option: option.replace("_", "-"),
    }

    def make_parser(self, ctx: Any) -> Any:
        """Return the parser of the arguments, which knows other launchers' names too; ``--help`` shows triax's."""
        from ..compat.launcher_options import SAME

        parser = super().make_parser(ctx)
        for option in self.params:
            if others := [other for name in option.opts for other in SAME.get(name, ())]:
                parser.add_option(option, others, option.name)  # type: ignore[arg-type]
        return parser

    def translated(self, name: str, args: list[str]) -> list[str] | None:
        """Return the arguments with triax's options for another launcher's, or without an idle one, with a warning.

        Raises:
            ConfigError: an option of another launcher that triax does not have.
        """
        from ..compat.launcher_options import IDLE, REFUSED, REPLACED

        if name in REFUSED:
            raise ConfigError(f"triax run has no {name}: {REFUSED[name]}.")
        if name in REPLACED:
            return _replaced(args, name, *REPLACED[name])
        if name not in IDLE:
            return super().translated(name, args)
        values, why = IDLE[name]
        logging.getLogger("triax").warning("triax run: %s does nothing: %s", name, why)
        return _replaced(args, name, values)


def _help(ctx: Any) -> str:
    return f"Type {path_of(ctx)} --help for what it takes."


def _replaced(args: list[str], name: str, values: int, words: Iterable[str] = ()) -> list[str]:
    """Return the arguments with other words in place of an option and its value, which is ``{}`` in the words."""
    short = len(name) == 2  # its value may follow at once: -p22
    at = next(i for i, word in enumerate(args) if (word[:2] if short else _name(word)) == name)
    _, attached, value = args[at].partition(name if short else "=")
    after = at + 1
    if values and not (value if short else attached):
        value, after = "".join(args[after : after + 1]), after + 1
    return [*args[:at], *(word.format(value) for word in words), *args[after:]]


def _name(word: str) -> str:
    return word.partition("=")[0].replace("_", "-")
