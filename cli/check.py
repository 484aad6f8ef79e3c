"""``triax check``: compare a model of your own on grids with one process, and say where a number differs first."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Annotated, Any, NoReturn

import typer

from ..base.errors import escaped
from ..base.tables import table, terminal


def check(
    target: Annotated[
        str,
        typer.Argument(
            help="FILE.py:FUNCTION, which returns the model for a grid; a training file; a Hugging Face folder or id."
        ),
    ],
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            help="Keys of the training file, or fields of the folder's config.json, to change.", metavar="KEY=VALUE"
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Function of FILE.py that returns the batches: lists of (inputs, labels). Without this option: the "
            "function batches of FILE.py; if there is none, random batches.",
            show_default=False,
        ),
    ] = None,
    axes: Annotated[
        str, typer.Option(help="Axes to try, each with 2 ranks, then together: pipe, data, context, tensor, expert.")
    ] = "pipe,data,tensor",
    ranks: Annotated[int, typer.Option(min=1, max=8, help="Maximum number of ranks of a grid.")] = 4,
    timeout: Annotated[float, typer.Option(help="Seconds that a run may take.")] = 120.0,
    over_replicas: Annotated[
        bool,
        typer.Option(
            "--over-replicas",
            help="The loss covers the rows of all replicas together, as CLIP's: compare with one process whose "
            "microbatches have these rows.",
        ),
    ] = False,
    dry: Annotated[
        str | None,
        typer.Option(
            help="Grid of any size: run a step of one rank of each class on the meta device, and compare nothing.",
            metavar="pipe=8,tensor=4",
        ),
    ] = None,
    costs: Annotated[
        bool,
        typer.Option("--costs", help="Print parameters, FLOPs, time and kept bytes of each layer on one process, too."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare a model on grids with one process: losses, metrics and every gradient, in float64.

    The model of a training file, a folder or an id has random weights, and gets random tokens.

    Other parts of a training file, such as LoRA, precision and the optimizer, are not compared.

    The exit status is 0 if all numbers are equal, and 1 if one differs.
    """
    from ..testing.check import check as run
    from ..testing.check import layer_costs
    from ..testing.grids import AXES
    from .check_targets import read_target

    try:
        build, batches = read_target(target, changes or [], data, dry is not None)
        chosen = [name.strip() for name in axes.split(",") if name.strip()]
        if unknown := [name for name in chosen if name not in (*AXES, "expert")]:
            known = ", ".join((*AXES, "expert"))
            raise ValueError(f"--axes has {unknown[0]!r}: give some of {known}, with commas between them")
        sizes = None if dry is None else _sizes(dry)
    except (ValueError, OSError) as error:  # ConfigError is a ValueError
        terminal(stderr=True).print(escaped(f"triax check: {error}"), style="red")
        raise typer.Exit(2) from None
    if sizes is not None:
        _dry(target, build, batches, sizes, as_json)
    rows = list(run(build, batches, chosen, ranks, timeout, over_replicas=over_replicas))
    holds = all(row.holds for row in rows)
    profile, kept = layer_costs(build, batches, timeout) if costs and rows[0].holds else ("", {})
    if as_json:
        found = {"target": target, "holds": holds, "runs": [row.as_json() for row in rows]}
        typer.echo(json.dumps(found | ({"costs": profile, "kept": kept} if costs else {})))
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


def _sizes(text: str) -> dict[str, int]:
    """Return the axes of a grid, by name.

    Raises:
        ValueError: it is no list of an axis and a size.
    """
    from ..testing.grids import AXES

    found = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        if name not in (*AXES, "expert") or not size.isdecimal() or not int(size):
            raise ValueError(f"--dry has {part!r}: give axes and sizes, such as pipe=8,tensor=4,data=2")
        found[name] = int(size)
    return found


def _dry(target: str, build: Any, batches: Any, sizes: dict[str, int], as_json: bool) -> NoReturn:
    """Run a step of each class of ranks without values, print what was found, and exit."""
    from ..plugins.dry_run.dry_run import dry_run
    from ..plugins.dry_run.rank import Settings
    from ..plugins.dry_run.report import report
    from .check_targets import train_without_values

    ranks = math.prod(size for axis, size in sizes.items() if axis != "expert")  # experts lie on the data axis
    found = dry_run(
        partial(train_without_values, build, batches, sizes), Settings(ranks), partial(typer.echo, err=True)
    )
    if as_json:
        typer.echo(json.dumps({"target": target, "holds": not found.problems, "problems": found.problems}))
    else:
        typer.echo(report(found))
    raise typer.Exit(1 if found.problems else 0)


def _result(row: Any) -> str:
    return ("equal" if row.holds else "different") + (", see below" if _details(row) else "")


def _details(row: Any) -> str:
    """Return what was found beside "equal", one statement a line."""
    parts = [row.difference, row.where and f"first: {row.where}", row.cause and f"usually: {row.cause}"]
    return "\n".join((*(part for part in parts if part and not row.holds), *row.notes))


def _sent(row: Any) -> str:
    known = {axis: f" ({size:,.0f})" for axis, size in row.formula.items()}
    return "\n".join(f"{axis} {size:,.0f} B{known.get(axis, '')}" for axis, size in row.sent.items() if size)
