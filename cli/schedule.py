"""``triax schedule``: pipeline schedules, verified, simulated and drawn without torch and without processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ..base.files import PICTURES
from ..base.tables import terminal
from ..options.base import Options, option
from ..pipe.program.critical import CriticalPath
from ..pipe.program.draw import chrome_trace, picture
from ..pipe.program.ops import Op
from ..pipe.program.pairs import pair_pass
from ..pipe.program.schedule import Schedule
from ..pipe.program.simulate import Simulation, simulate
from ..pipe.program.verify import verify
from ..pipe.schedules.choose import FILES, NAMES, make_schedule, schedule_names, write_schedule
from ..pipe.schedules.registry import RECIPES
from .cuts import cuts
from .flags import one_line_errors, with_flags
from .foreign_options import Command
from .schedule_flags import ChangeFlags, ScheduleFlags, tuned
from .schedule_text import comparison, report, row_report, summary, title
from .verbs import VerbGroup, group

schedule = group(
    "schedule",
    VerbGroup,
    f"triax schedule 1f1b is triax schedule show 1f1b. The names are {', '.join(NAMES)}.",
)

Shown = Annotated[
    str,
    typer.Argument(
        help=f"{', '.join(NAMES)}, the name of an installed package's, or a file: .csv with a line such as 0F0,0F1,0B0 "
        "for each rank, .json, or .txt with the lines that the zero-bubble repository prints.",
        metavar="NAME",
    ),
]


@dataclass(frozen=True, kw_only=True)
class OutputFlags(Options):
    """Outputs of ``triax schedule compare``."""

    plot: Path | None = option(None, "Draw to this .png, .svg or .pdf file.", writes=PICTURES)
    json: bool = option(False, "Print one JSON object.")

    def draw(self, results: list[Simulation], titles: list[str], paths: Any = None) -> None:
        """Draw simulations to the file of ``plot``; ``paths``: the critical path of each."""
        if self.plot is not None:
            picture([result.timeline for result in results], self.plot, titles, paths=paths)


@dataclass(frozen=True, kw_only=True)
class ShowOutputFlags(OutputFlags):
    """Outputs of ``triax schedule show``."""

    plot: Path | None = option(
        None,
        "Draw to this .png, .svg or .pdf file, or write a Chrome trace to this .json file.",
        writes=(*PICTURES, ".json"),
    )
    critical: bool = option(False, "With --plot: draw a line along the critical path.", needs="plot")
    output: Path | None = option(
        None,
        "Write the schedule to this file: .csv for torch's pipelining, .txt as the zero-bubble repository prints it, "
        "or .json.",
        writes=FILES,
    )


@schedule.command(cls=Command)
@with_flags
@one_line_errors
def show(name: Shown, changes: ChangeFlags, outputs: ShowOutputFlags) -> None:
    """Print a pipeline schedule: the operations of each rank, makespan, bubble and peak memory."""
    chosen, costs = changes.made(name), changes.times
    result = simulate(chosen, costs, changes.keep_gathered)
    path = CriticalPath(chosen, costs, changes.keep_gathered).path
    if outputs.plot is not None and outputs.plot.suffix == ".json":
        outputs.plot.write_text(json.dumps(chrome_trace(result.timeline)), encoding="utf-8")
    else:
        outputs.draw([result], [title(chosen, costs)], [path] if outputs.critical else None)
    if outputs.output is not None:
        write_schedule(chosen, outputs.output)
    if outputs.json:
        typer.echo(json.dumps(report(chosen, result) | {"critical_path": [str(span.op) for span in path]}))
    else:
        terminal().print(*summary(chosen, result, costs, terminal().width), sep="\n")


@schedule.command(cls=Command)
@with_flags
@one_line_errors
def explain(
    name: Shown,
    op: Annotated[str, typer.Argument(help="An op, such as 2B3: stage 2, backward, microbatch 3.")],
    changes: ChangeFlags,
) -> None:
    """Explain why an op of a schedule does not start earlier."""
    typer.echo(CriticalPath(changes.made(name), changes.times, changes.keep_gathered).explain(Op.parse(op)))


@schedule.command(cls=Command)
@with_flags
@one_line_errors
def compare(
    sizes: ScheduleFlags,
    outputs: OutputFlags,
    file: Annotated[
        Path | None, typer.Argument(help="A schedule's file, to compare with the others of its size.")
    ] = None,
) -> None:
    """Print a table of all schedules of a size that fit, the fastest first."""
    costs, rows = sizes.times, []
    if file is not None:
        own = sizes.load(file)
        verify(own, sizes.memory)
        sizes = sizes.changed(pipe=own.pipe, microbatches=own.microbatches)
        rows.append((own, simulate(own, costs, sizes.keep_gathered)))
    count = sizes.count()
    rows += named_schedules(sizes, count)
    if not rows:
        limit = "" if sizes.memory is None else f" within --memory {sizes.memory:g}"
        raise ValueError(f"No named schedule runs at this size{limit}. Search for one with triax schedule auto.")
    rows.sort(key=lambda row: row[1].makespan)
    outputs.draw([result for _, result in rows], [title(chosen, costs) for chosen, _ in rows])
    if outputs.json:
        entries = [row_report(chosen, result) for chosen, result in rows]
        typer.echo(json.dumps({"pipe": sizes.pipe, "microbatches": count, "schedules": entries}))
    else:
        terminal().print(comparison(rows, sizes.pipe, count, costs))


def named_schedules(sizes: ScheduleFlags, microbatches: int) -> Iterator[tuple[Schedule, Simulation]]:
    """Yield each schedule that exists in these sizes and holds no more than ``memory``, with its simulation."""
    costs, pipe, chunks = sizes.times, sizes.pipe, sizes.chunks
    for name in schedule_names():
        recipe = RECIPES.get(name)
        if name == "auto" or (recipe and not recipe.trains):
            continue
        if recipe and (not (chunks is None or recipe.accepts(chunks)) or microbatches < recipe.least(pipe)):
            continue
        try:
            chosen = tuned(make_schedule(name, pipe, microbatches, chunks), sizes.mean_times)
        except ValueError:
            if recipe is None:  # a package's, which does not exist at this size
                continue
            raise
        if sizes.pairs and not chosen.pairs:
            chosen = pair_pass(chosen, sizes.mean_times)
        result = simulate(chosen, costs, sizes.keep_gathered)
        if sizes.memory is None or max(result.peak_activations) <= sizes.memory + 1e-9:
            verify(chosen, sizes.memory)
            yield chosen, result


schedule.command(cls=Command)(cuts)
