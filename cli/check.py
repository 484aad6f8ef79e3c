"""``triax check``: compare a model of your own on grids with one process, and say where a number differs first."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NoReturn

import typer

from ..base.errors import ConfigError, escaped
from ..base.option_error import refusal
from ..base.tables import table, terminal
from ..options.base import Options, option
from .dry_report import dry_run
from .flags import one_line_errors, with_flags


@dataclass(frozen=True, kw_only=True)
class CheckFlags(Options):
    """Flags of ``triax check``."""

    data: str | None = option(
        None,
        "Function of FILE.py that returns the batches: lists of (inputs, labels). Without this option: the function "
        "batches of FILE.py; if there is none, random batches.",
    )
    axes: str = option(
        "pipe,data,tensor",
        "Axes to try, each with 2 ranks, then together: pipe, data, context, tensor, expert.",
    )
    processes: int = option(4, "Maximum number of ranks of a grid.", least=1, most=8)
    timeout: float = option(120.0, "Seconds that a run may take.", above=0)
    over_replicas: bool = option(
        False,
        "The loss covers the rows of all replicas together, as CLIP's: compare with one process whose microbatches "
        "have these rows.",
    )
    dry_run: str | None = option(
        None,
        "Grid of any size, such as pipe=8,tensor=4: run a step of one rank of each class on the meta device, and "
        "compare nothing.",
    )
    types: str | None = option(
        None,
        "Grid of any size, such as tensor=8,context=2: follow the type of each tensor (replicated, varying, partial) "
        "on each axis through one rank's forward pass, without values, and name ops whose inputs do not fit.",
    )
    costs: bool = option(False, "Print parameters, FLOPs, time and kept bytes of each layer on one process, too.")
    json: bool = option(False, "Print one JSON object.")

    def check(self) -> None:
        """Check that one judge is asked, and that no option of another one is given."""
        asked = "dry_run" if self.dry_run is not None else "types" if self.types is not None else None
        for name in ("dry_run", "types", "axes", "processes", "over_replicas", "costs"):
            if asked not in (None, name) and self.changes(name):
                raise refusal(f"<{name}> has no effect with <{asked}>: leave one of them out")


@with_flags
def check(
    target: Annotated[
        str,
        typer.Argument(
            help="FILE.py:FUNCTION, which returns the model for a grid; a training file; a Hugging Face folder or id."
        ),
    ],
    flags: CheckFlags,
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            help="Keys of the training file, or fields of the folder's config.json, to change.", metavar="KEY=VALUE"
        ),
    ] = None,
) -> None:
    """Compare a model on grids with one process: losses, metrics and every gradient, in float64.

    The model of a training file, a folder or an id has random weights, and gets random tokens.

    Other parts of a training file, such as LoRA, precision and the optimizer, are not compared.

    The exit status is 0 if all numbers are equal, and 1 if one differs.
    """
    from ..testing.check import check as run
    from ..testing.check import layer_costs

    build, batches = _target(target, changes or [], flags)
    if flags.dry_run is not None:
        _dry(target, build, batches, _sizes("dry-run", flags.dry_run), flags.json)
    if flags.types is not None:
        _types(target, build, batches, _sizes("types", flags.types), flags.json)
    options: dict[str, Any] = {"timeout": flags.timeout, "over_replicas": flags.over_replicas}
    rows = list(run(build, batches, _axes(flags.axes), flags.processes, **options))
    holds = all(row.holds for row in rows)
    profile, kept = layer_costs(build, batches, flags.timeout) if flags.costs and rows[0].holds else ("", {})
    if flags.json:
        result = {"target": target, "holds": holds, "runs": [row.as_json() for row in rows]}
        typer.echo(json.dumps(result | ({"costs": profile, "kept": kept} if flags.costs else {})))
    else:
        heads = ("run", "numbers", "sent per step (ZeRO's formula)")
        terminal().print(table(heads, ((row.what, _result(row), _sent(row)) for row in rows), left=3))
        for row in rows:
            if details := _details(row):
                terminal().print(escaped(f"\n{row.what}\n{details}"))
        if kept:
            typer.echo(profile)
            lines = ((name, f"{size:,}") for name, size in kept.items())
            terminal().print(table(("layer", "bytes of a microbatch kept for the backward pass"), lines))
    raise typer.Exit(0 if holds else 1)


@one_line_errors
def _target(target: str, changes: list[str], flags: CheckFlags) -> tuple[Any, Any]:
    """Return the functions that make the model and its batches."""
    from .check_targets import read_target

    return read_target(target, changes, flags.data, flags.dry_run is not None or flags.types is not None)


def _axes(text: str) -> list[str]:
    """Return the names of the axes to try.

    Raises:
        ConfigError: there is no such axis.
    """
    from ..testing.grids import AXES

    chosen, known = [name.strip() for name in text.split(",") if name.strip()], (*AXES, "expert")
    if unknown := [name for name in chosen if name not in known]:
        raise ConfigError(f"--axes has {unknown[0]!r}: give some of {', '.join(known)}, with commas between them")
    return chosen


def _sizes(flag: str, text: str) -> dict[str, int]:
    """Return the axes of a grid, by name.

    Raises:
        ConfigError: it is no list of an axis and a size.
    """
    from ..testing.grids import AXES

    sizes = {}
    for entry in text.split(","):
        name, _, size = (word.strip() for word in entry.partition("="))
        if name not in (*AXES, "expert") or not size.isdecimal() or not int(size):
            raise ConfigError(f"--{flag} has {entry!r}: give axes and sizes, such as pipe=8,tensor=4,data=2")
        sizes[name] = int(size)
    return sizes


def _dry(target: str, build: Any, batches: Any, sizes: dict[str, int], as_json: bool) -> NoReturn:
    """Run a step of each class of ranks without values, print what was found, and exit."""
    from .check_targets import train_without_values

    ranks = math.prod(size for axis, size in sizes.items() if axis != "expert")  # experts lie on the data axis
    dry_run(partial(train_without_values, build, batches, sizes), ranks, target if as_json else None)


@one_line_errors
def _types(target: str, build: Any, batches: Any, sizes: dict[str, int], as_json: bool) -> NoReturn:
    """Check the types of one rank's tensors, print what does not fit, and exit."""
    from ..plugins.sharding_types.check_types import check_types

    found = check_types(build, batches, sizes)
    if as_json:
        typer.echo(json.dumps({"target": target, "holds": found.holds, **found.as_json()}))
    else:
        for finding in found.findings:
            terminal().print(escaped(f"{finding}\n"))
        count = len(found.findings)
        said = (
            "all types fit" if found.holds else f"{count} {'op' if count == 1 else 'ops'} with inputs that do not fit"
        )
        typer.echo(f"{found.ranks:,} ranks, {found.layers} layers, {found.ops:,} ops in {found.seconds:.1f} s: {said}")
    raise typer.Exit(0 if found.holds else 1)


def _result(row: Any) -> str:
    return ("equal" if row.holds else "different") + (", see below" if _details(row) else "")


def _details(row: Any) -> str:
    """Return what was found beside "equal", one statement a line."""
    parts = [row.difference, row.where and f"first: {row.where}", row.cause and f"usually: {row.cause}"]
    return "\n".join((*(part for part in parts if part and not row.holds), *row.notes))


def _sent(row: Any) -> str:
    known = {axis: f" ({size:,.0f})" for axis, size in row.formula.items()}
    return "\n".join(f"{axis} {size:,.0f} B{known.get(axis, '')}" for axis, size in row.sent.items() if size)
