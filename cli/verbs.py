"""Commands with verbs. The first verb may be left out: ``triax schedule 1f1b`` is ``triax schedule show 1f1b``."""

from __future__ import annotations

import logging
from typing import Any

import typer
from typer.core import TyperGroup

from ..base.errors import ConfigError, no_such
from ..train.older_keys import ENDS


class CommandGroup(TyperGroup):
    """A command with further commands, that says in one line which one does not exist."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first word names.

        Raises:
            ConfigError: there is no such command.
        """
        if args[0] not in self.commands and not ctx.resilient_parsing:
            raise ConfigError(no_such(path_of(ctx), args[0], self.commands))
        return super().resolve_command(ctx, args)


class VerbGroup(CommandGroup):
    """A command whose first verb may be left out."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; flags, and a word that is no verb, are those of the first verb."""
        takes_words = any(param.param_type_name == "argument" for param in self.first.params)
        if args and args[0] not in (*self.commands, "-h", "--help") and (args[0].startswith("-") or takes_words):
            args = [str(self.first.name), *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return the verbs and the flags that a word may become, those of the first verb too."""
        return [*super().shell_complete(ctx, incomplete), *self.first.shell_complete(ctx, incomplete)]

    @property
    def first(self) -> Any:
        """The first verb."""
        return next(iter(self.commands.values()))


def group(text: str, kind: type[CommandGroup] = CommandGroup) -> typer.Typer:
    """Return a command with further commands, which its help lists.

    Args:
        text: what its help says first.
        kind: ``VerbGroup`` if the first of them may be left out.
    """
    return typer.Typer(cls=kind, help=text, no_args_is_help=True, add_completion=False)


def path_of(ctx: Any) -> str:
    """Return the command of a context as it is typed."""
    return "triax" if ctx.parent is None else f"{path_of(ctx.parent)} {ctx.info_name}"


# First words of a command that has another name now -> these words.
NEW_COMMANDS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("coordinator",): ("replicas", "coordinator"),
    ("drain",): ("replicas", "drain"),
    ("plan", "measure"): ("machine", "measure"),
    ("plan", "fit"): ("machine", "fit"),
    ("config",): ("compat", "config"),
}
# Flag that has another name now -> this name, by the command that has it.
NEW_FLAGS = {
    "check": {"--ranks": "--processes", "--dry": "--dry-run"},
    "train": {"--dry": "--dry-run"},
    "run": {
        "--dry": "--dry-run",
        "--lost-after": "--host-timeout",
        "--least": "--min-replicas",
        "--silence": "--heartbeat-timeout",
        "--patience": "--straggler-timeout",
    },
    "coordinator": {
        "--least": "--min-replicas",
        "--silence": "--heartbeat-timeout",
        "--patience": "--straggler-timeout",
    },
    "demo": {"--runs": "--output"},
    "recipe": {"--folder": "--output"},
    "tokenize": {"--out": "--output"},
    "train-tokenizer": {"--out": "--output"},
    "show": {"--write": "--output"},
    "search": {"--write": "--output"},
    "fit": {"--write": "--output"},
}


def with_new_names(words: list[str]) -> list[str]:
    """Return the words of a command line, with a command's name of today for an older one, and a warning in the log."""
    for older, newer in NEW_COMMANDS.items():
        if tuple(words[: len(older)]) == older:
            newer = ("train",) if "--upgrade" in words else newer
            warn_of_older(f"triax {' '.join(older)}", f"triax {' '.join(newer)}")
            return [*newer, *words[len(older) :]]
    return words


def warn_of_older(older: str, newer: str) -> None:
    """Log a warning about an older name."""
    text = "%s is an older name of %s, which triax %s removes: type the new one"
    logging.getLogger("triax").warning(text, older, newer, ENDS)


# Flag that a command had before it had verbs -> what to type.
OLDER = {
    ("schedule", "--file"): "triax schedule FILE",
    ("schedule", "--compare"): "triax schedule compare, or with a schedule's file: triax schedule compare FILE",
    ("schedule", "--explain"): "triax schedule explain NAME OP",
    ("schedule", "--layers"): "triax schedule cuts COSTS.json",
    ("schedule", "--limit"): "triax schedule cuts COSTS.json --limit GB",
    ("plan", "--measure"): "triax machine measure FILE.json",
    ("plan", "--fit"): "triax machine fit ROWS.csv",
    ("plan", "--why"): "triax plan compare LAYOUT LAYOUT",
}
