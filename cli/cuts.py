"""``triax schedule cuts``: where to cut a list of layers into stages, by the costs of its layers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..base.option_error import OptionError
from ..base.tables import table, terminal
from ..options.base import option
from ..options.schedule import ScheduleOptions
from ..pipe.schedules.choose import make_schedule
from .flags import one_line_errors, with_flags
from .schedule_flags import SizeFlags

if TYPE_CHECKING:
    from ..pipe.cuts import StageCut

HEADS = ("partition", "schedule", "chunks", "ms", "bubble", "GB of each rank", "boundaries")


@dataclass(frozen=True, kw_only=True)
class CutFlags(SizeFlags):
    """Flags of ``triax schedule cuts``."""

    schedule: str = option("1f1b", "Schedule of all cuts but auto, which is the best schedule.")
    limit: float | tuple[float, ...] | None = option(
        None, "GB (1e9 bytes) that a rank may take, or one for each rank: 20,20,40.", above=0
    )
    json: bool = option(False, "Print one JSON object.")

    def check(self) -> None:
        """Check that the schedule is not the one that is always searched."""
        if self.schedule == "auto":
            raise OptionError("schedule", "auto", "a row of auto is always printed: give another schedule, or none")


@with_flags
@one_line_errors
def cuts(
    costs: Annotated[
        Path, typer.Argument(help="JSON file with the costs of each layer, as triax plan --layer-costs writes it.")
    ],
    flags: CutFlags,
) -> None:
    """Print where to cut a list of layers into stages, and what a step costs then."""
    from ..pipe.cuts import compare_cuts  # it imports numpy
    from ..pipe.program.layer_costs import LayerCosts

    pipe, microbatches = flags.pipe, flags.microbatches or 2 * flags.pipe
    read, limit = LayerCosts.from_json(costs), ScheduleOptions(limit=flags.limit).limits
    compared = compare_cuts(
        read, pipe, microbatches, make_schedule(flags.schedule, pipe, microbatches, flags.chunks), flags.chunks, limit
    )
    if flags.json:
        typer.echo(json.dumps({"pipe": pipe, "microbatches": microbatches, "cuts": [as_dict(cut) for cut in compared]}))
        return
    terminal().print(
        table(HEADS, map(cells, compared), f"{len(read.layers)} layers, pipe {pipe}, microbatches {microbatches}")
    )
    best = min(compared[2:], key=lambda cut: cut.makespan)
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
