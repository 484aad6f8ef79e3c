"""Table of the cuts that the layers' costs give, for ``triax schedule --layers``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..base.tables import table, terminal
from ..pipe.schedules.choose import make_schedule

if TYPE_CHECKING:
    from ..pipe.cuts import StageCut

HEADS = ("partition", "schedule", "chunks", "ms", "bubble", "GB of each rank", "boundaries")


def show_cuts(
    file: Path, name: str, pipe: int, microbatches: int, chunks: int | None, limit: str | None, as_json: bool
) -> None:
    """Print each cut with what a step costs.

    Args:
        file: JSON file with the costs of the layers.
        name, pipe, microbatches, chunks: the schedule of all cuts but ``auto``.
        limit: GB that a rank may take, or one number for each rank, with commas; None: no limit.
        as_json: print one JSON object.

    Raises:
        ValueError: the costs, the limit or the schedule cannot be used.
    """
    from ..pipe.cuts import compare_cuts  # it imports numpy
    from ..pipe.program.layer_costs import LayerCosts

    if name == "auto":
        raise ValueError(
            "--layers always prints a row of auto, the best schedule: give the name of another schedule, or none"
        )
    costs, schedule = LayerCosts.from_json(file), make_schedule(name, pipe, microbatches, chunks)
    cuts = compare_cuts(costs, pipe, microbatches, schedule, chunks, _bytes(limit))
    if as_json:
        typer.echo(json.dumps({"pipe": pipe, "microbatches": microbatches, "cuts": [as_dict(cut) for cut in cuts]}))
        return
    title = f"{len(costs.layers)} layers, pipe {pipe}, microbatches {microbatches}"
    terminal().print(table(HEADS, map(cells, cuts), title))
    best = min(cuts[2:], key=lambda cut: cut.makespan)
    chosen = f"name: {best.schedule.name}, chunks: {best.schedule.chunks}, partition: {list(best.boundaries)}"
    terminal().print(f"schedule: {{{chosen}}}", soft_wrap=True)


def cells(cut: StageCut) -> Sequence[str]:
    """Return the cells of a cut's row."""
    peaks = " ".join(f"{peak / 1e9:.3g}" for peak in cut.peaks)
    own = (cut.method, cut.schedule.name, str(cut.schedule.chunks), f"{1e3 * cut.makespan:.4g}", f"{cut.bubble:.1%}")
    return (*own, peaks, " ".join(map(str, cut.boundaries)))


def as_dict(cut: StageCut) -> dict[str, Any]:
    """Return a cut as an entry of the JSON object."""
    return {
        "partition": cut.method,
        "schedule": cut.schedule.name,
        "chunks": cut.schedule.chunks,
        "seconds": cut.makespan,
        "bubble": cut.bubble,
        "bytes": list(cut.peaks),
        "boundaries": list(cut.boundaries),
        "proved": cut.proved,
    }


def _bytes(limit: str | None) -> float | list[float] | None:
    try:
        sizes = [1e9 * float(each) for each in (limit or "").split(",") if each]
    except ValueError:
        raise ValueError(f"--limit is {limit}: give GB of a rank, such as 20, or one for each rank: 20,20,40") from None
    return sizes[0] if len(sizes) == 1 else sizes or None
