"""Names of commands, and commands with verbs. The first verb may be left out: ``triax schedule 1f1b``."""

from __future__ import annotations

import logging
from typing import Any

import typer
from typer.core import TyperGroup

from ..base.errors import ConfigError, no_such
from ..train.older_keys import ENDS

# Group -> command -> what `triax --help` says of it. The command is the function or the group of that name, in the file
# of that name.
GROUPS = {
    "Start": {
        "demo": "Train a small GPT on two stages for less than a minute.",
        "new": "Make a project: a GPT as a list of layers, with its program and tests.",
        "recipe": "List the recipes, or write one: a training file and its commands.",
        "env": "Print versions and devices, and what is missing for each feature.",
    },
    "Train": {
        "run": "Run a script on many processes, on this host or on several.",
        "train": "Train a model from a file.",
        "generate": "Continue a prompt, or answer messages.",
        "evaluate": "Evaluate a model on tasks of lm-eval.",
        "replicas": "Run the coordinator of a run's replicas, or ask a replica to leave.",
    },
    "Understand": {
        "schedule": "Show, explain and compare pipeline schedules.",
        "grid": "Print the place of each rank on a grid, its layers and its shards.",
        "memory": "Print the memory of each pipe rank of a model on a grid.",
        "plan": "Find the fastest layouts of a run on a cluster.",
        "machine": "Time this machine, or fit a machine's figures to runs, for triax plan.",
        "check": "Compare a model on grids with one process, or check its types of sharding.",
        "report": "Write one HTML page about a run, or one that compares runs.",
    },
    "Files": {
        "data": "Tokenize text, and show and verify tokens.",
        "checkpoint": "Show, verify, convert, compare and prune checkpoints.",
        "compat": "Check configurations that are written for another library.",
    },
}
COMMANDS = {name: (group, text) for group, commands in GROUPS.items() for name, text in commands.items()}


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


def group(name: str, kind: type[CommandGroup] = CommandGroup, more: str = "") -> typer.Typer:
    """Return a command with further commands, which its help lists.

    Args:
        name: of the command.
        kind: ``VerbGroup`` if the first of them may be left out.
        more: what its help says behind the text of ``COMMANDS``.
    """
    text = f"{COMMANDS[name][1]} {more}".strip()
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
