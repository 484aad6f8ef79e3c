"""Dry run of a command's program: ranks of a cluster without the cluster."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import typer


def dry_run(program: Callable[[], None], ranks: int, target: str | None = None, **settings: Any) -> NoReturn:
    """Run one rank of each class of ranks for a step, print what was found, and exit: with 1 if it would fail.

    Args:
        program: what each rank runs.
        ranks: number of ranks of the cluster.
        target: name of the program, for one JSON object in place of the report.
        settings: further fields of ``plugins/dry_run/rank.py``'s ``Settings``.
    """
    from ..plugins.dry_run.dry_run import dry_run as run  # imported only where it is used: it needs torch
    from ..plugins.dry_run.rank import Settings
    from ..plugins.dry_run.report import report

    outcome = run(program, Settings(ranks, **settings), partial(typer.echo, err=True))
    if target is None:
        typer.echo(report(outcome))
    else:
        typer.echo(json.dumps({"target": target, "holds": not outcome.problems, "problems": outcome.problems}))
    raise SystemExit(1 if outcome.problems else 0)
