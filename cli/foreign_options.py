"""Commands that know other libraries' options: they name their own in place of them, and ``triax run`` takes them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand

from ..base.errors import ConfigError


class Command(TyperCommand):
    """A command that suggests its own option for another library's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; an unknown option's error names the option of this command that means the same."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # click's NoSuchOption, which typer has a copy of
            from ..compat.launcher_options import EQUIVALENTS

            name = _name(getattr(error, "option_name", ""))
            mine = {option for parameter in self.params for option in parameter.opts}
            if same := [option for option, others in EQUIVALENTS.items() if name in others and option in mine]:
                vars(error)["possibilities"] = same
            raise


class RunCommand(Command):
    """The command ``triax run``, which takes other launchers' options, or says why one has no effect or is refused."""

    def make_parser(self, ctx: Any) -> Any:
        """Return the parser of the arguments, which knows other launchers' names too; ``--help`` shows triax's."""
        from ..compat.launcher_options import SAME

        parser = super().make_parser(ctx)
        for option in self.params:
            if others := [other for name in option.opts for other in SAME.get(name, ())]:
                parser.add_option(option, others, option.name)  # type: ignore[arg-type]
        return parser

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; write triax's options for other launchers', and leave out idle ones with a warning.

        Raises:
            ConfigError: an option of another launcher that triax does not have.
        """
        from ..compat.launcher_options import IDLE, REFUSED, REPLACED

        while True:
            try:
                return super().parse_args(ctx, list(args))
            except Exception as error:  # click's NoSuchOption, which typer has a copy of
                name = getattr(error, "option_name", "")
                if name in REFUSED:
                    raise ConfigError(f"triax run has no {name}: {REFUSED[name]}.") from None
                if name in REPLACED:
                    args = _replaced(args, name, *REPLACED[name])
                elif name in IDLE:
                    values, why = IDLE[name]
                    args = _replaced(args, name, values)
                    logging.getLogger("triax").warning("triax run: %s does nothing: %s", name, why)
                else:
                    raise


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
