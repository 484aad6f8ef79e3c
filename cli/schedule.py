"""``triax schedule``: pipeline schedules, verified, simulated and drawn without torch and without processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..base.errors import escaped, no_such
from ..base.option_error import OptionError, refusal
from ..base.tables import terminal
from ..options.base import Options, option
from ..pipe.program.critical import CriticalPath
from ..pipe.program.draw import chrome_trace, picture
from ..pipe.program.offload import offload_pass
from ..pipe.program.ops import Op
from ..pipe.program.pairs import pair_pass
from ..pipe.program.recompute_pass import recompute_pass
from ..pipe.program.schedule import Schedule
from ..pipe.program.simulate import Costs, Simulation, simulate
from ..pipe.program.slices import slice_lengths
from ..pipe.program.verify import verify
from ..pipe.schedules.choose import FILES, NAMES, make_schedule, read_schedule, schedule_names, write_schedule
from ..pipe.schedules.registry import RECIPES
from ..pipe.schedules.search import Found, tune
from .cuts import cuts
from .flags import with_flags
from .foreign_options import Command
from .schedule_text import comparison, report, row_report, summary, title
from .verbs import VerbGroup

LARGEST = 2**20  # passes of a microbatch through a stage
PICTURES = (".png", ".svg", ".pdf")

schedule = typer.Typer(
    name="schedule",
    cls=VerbGroup,
    help="Show, explain and compare pipeline schedules. triax schedule 1f1b is triax schedule show 1f1b.",
    no_args_is_help=True,
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
class Sizes(Options):
    """Sizes of a schedule, and what its passes cost."""

    pipe: int = option(4, "Size of the pipe axis.", least=1)
    microbatches: int | None = option(
        None,
        "Microbatches per step. Default: twice --pipe, or the least number of a schedule that needs more.",
        least=1,
    )
    chunks: int | None = option(None, "Stages per rank. Default: as the schedule needs.", least=1)
    costs: tuple[float, ...] = option(
        (1.0, 1.0, 1.0),
        "F,I,W[,COMM[,GATHER[,O[,R]]]]: time of a rank's forward, input-gradient and weight-gradient passes of one "
        "microbatch, of a message, of gathering the rank's weights in ZeRO stage 3, and of copying the activations of "
        "one microbatch to the host and back.",
        least=0,
    )
    collectives: tuple[float, ...] = option(
        (0.0,),
        "AR[,A2A]: time of the tensor axis's all-reduces, and of the expert axis's all-to-alls, in a rank's forward or "
        "input-gradient pass of one microbatch.",
        least=0,
    )
    memory: float | None = option(
        None, "Limit of activations per rank, in units of one microbatch through 1/pipe of the model.", above=0
    )
    pairs: bool = option(False, "Join passes into pairs if that hides collectives and shortens the step.")
    keep_gathered: bool = option(False, "ZeRO stage 3: gather weights once per step, not for each pass.")

    def check(self) -> None:
        """Check the number of the costs."""
        if not 3 <= len(self.costs) <= 7:
            wanted = "give F,I,W[,COMM[,GATHER[,O[,R]]]]. An example is 1,1,1,0.05"
            raise OptionError("costs", self.costs, wanted)
        if len(self.collectives) > 2:
            raise OptionError("collectives", self.collectives, "give AR[,A2A]. An example is 0.25")

    @property
    def times(self) -> Costs:
        """The costs of the passes."""
        return Costs(*self.costs, **dict(zip(("AR", "A2A"), self.collectives)))

    @property
    def lengths(self) -> tuple[float, ...]:
        """Relative lengths of the slices of a sequence."""
        return slice_lengths(1)

    def count(self, name: str = "") -> int:
        """Return the number of microbatches of a schedule.

        Raises:
            OptionError: the schedule would be too large to be simulated.
        """
        count = self.microbatches or max(2 * self.pipe, RECIPES[name].least(self.pipe) if name in RECIPES else 1)
        passes = self.pipe * count * (self.chunks or 1) * len(self.lengths)
        if passes > LARGEST:
            at_most = f"gives {passes:,} passes of a microbatch through a stage, but at most {LARGEST:,} are simulated"
            raise refusal(f"<pipe> {self.pipe} <microbatches> {count} {at_most}: give smaller sizes")
        return count

    def read(self, file: Path) -> Schedule:
        """Return the schedule of a file, which says its sizes.

        Raises:
            ValueError: the file is no schedule, or one of other sizes than those that were typed.
        """
        own = read_schedule(file)
        for name, field in (("pipe", "pipe"), ("microbatches",) * 2, ("chunks",) * 2, ("slices", "lengths")):
            if name in self.given and getattr(self, field) != (found := getattr(own, name)):
                raise OptionError(name, getattr(self, name), f"{file} has {name}={found}. Leave it out")
        verify(own)
        return own


@dataclass(frozen=True, kw_only=True)
class Changes(Sizes):
    """Sizes of one schedule, and changes of it."""

    slices: int | tuple[float, ...] = option(
        1, "Slices of each sequence: their number, or their relative lengths, such as 4 or 3,2,2,1.", above=0
    )
    attention: float = option(
        0.0,
        "With --slices: share of causal attention in F and I. Later slices have more of it.",
        least=0,
        most=1,
    )
    offload: float = option(
        0.0, "Share of the activations to offload to the host, if their copies fit.", least=0, most=1
    )
    recompute: float = option(0.0, "Share of the activations to recompute by ops of the schedule.", least=0, most=1)

    @property
    def times(self) -> Costs:
        """The costs of the passes."""
        return replace(super().times, attention=self.attention)

    @property
    def lengths(self) -> tuple[float, ...]:
        """Relative lengths of the slices of a sequence."""
        return slice_lengths(self.slices)

    def made(self, name: str) -> Schedule:
        """Return the schedule of a name or a file, with the changes.

        Raises:
            ValueError: it does not exist in this size, the file has another one, or it would hang or hold too much.
        """
        chosen = self.read(Path(name)) if name.endswith(FILES) else self._named(name)
        if self.attention and len(chosen.slices) == 1:
            raise OptionError(
                "attention", self.attention, "it is for slices of sequences: give <slices> too, such as 4"
            )
        unused, costs, searched = list[str](), self.times, isinstance(chosen, Found)
        if self.pairs:
            chosen = pair_pass(chosen, costs)
            if not chosen.pairs:
                unused.append("--pairs joins no passes: no pair hides enough of --collectives to shorten the step")
        if self.offload and not (searched and self.memory is not None):
            chosen = offload_pass(chosen, self.offload, costs=costs)
            if not chosen.offloads:
                unused.append("--offload copies nothing: no copy fits into the step and lowers a peak")
        if self.recompute and not searched:
            chosen = recompute_pass(chosen, self.recompute, costs=costs)
            if not chosen.recomputes:
                unused.append("--recompute recomputes nothing: no peak would become smaller")
        for note in unused:
            terminal(stderr=True).print(escaped(f"triax schedule: {note}"), style="yellow")
        verify(chosen, self.memory)
        return chosen

    def _named(self, name: str) -> Schedule:
        if name not in (*NAMES, *(names := schedule_names())):
            raise ValueError(no_such("triax schedule", name, (*names, "compare", "explain", "cuts")))
        searched = name == "auto"  # it chooses what is recomputed, and within a limit what is offloaded
        shares = self.offload * (searched and self.memory is not None), self.recompute * searched
        sizes = self.pipe, self.count(name), self.chunks
        return tuned(make_schedule(name, *sizes, self.times, self.memory, *shares, slices=self.lengths), self.times)


@dataclass(frozen=True, kw_only=True)
class Outputs(Options):
    """Outputs of ``triax schedule compare``."""

    plot: Path | None = option(None, "Draw to this .png, .svg or .pdf file.")
    json: bool = option(False, "Print one JSON object.")

    def draw(self, results: list[Simulation], titles: list[str], paths: Any = None) -> None:
        """Draw simulations to the file of ``plot``; ``paths``: the critical path of each.

        Raises:
            ValueError: the file cannot be such a picture.
        """
        file = self.plot
        if file is None:
            return
        if not file.parent.is_dir():
            raise ValueError(f"--plot is {file}, but there is no folder {file.parent}: mkdir -p {file.parent}")
        if file.suffix not in PICTURES:
            raise ValueError(f"--plot is {file}, but it must end in {', '.join(PICTURES)}.")
        picture([result.timeline for result in results], file, titles, paths=paths)


@dataclass(frozen=True, kw_only=True)
class ShowOutputs(Outputs):
    """Outputs of ``triax schedule show``."""

    plot: Path | None = option(
        None, "Draw to this .png, .svg or .pdf file, or write a Chrome trace to this .json file."
    )
    critical: bool = option(False, "With --plot: draw a line along the critical path.", needs="plot")
    write: Path | None = option(
        None,
        "Write the schedule to this file: .csv for torch's pipelining, .txt as the zero-bubble repository prints it, "
        "or .json.",
    )


@schedule.command(cls=Command)
@with_flags
def show(name: Shown, changes: Changes, outputs: ShowOutputs) -> None:
    """Print a pipeline schedule: the operations of each rank, makespan, bubble and peak memory."""
    chosen, costs = changes.made(name), changes.times
    result = simulate(chosen, costs, changes.keep_gathered)
    path = CriticalPath(chosen, costs, changes.keep_gathered).path
    if outputs.plot is not None and outputs.plot.suffix == ".json" and outputs.plot.parent.is_dir():
        outputs.plot.write_text(json.dumps(chrome_trace(result.timeline)), encoding="utf-8")
    else:
        outputs.draw([result], [title(chosen, costs)], [path] if outputs.critical else None)
    if outputs.write is not None:
        write_schedule(chosen, outputs.write)
    if outputs.json:
        typer.echo(json.dumps(report(chosen, result) | {"critical_path": [str(span.op) for span in path]}))
    else:
        terminal().print(*summary(chosen, result, costs, terminal().width), sep="\n")


@schedule.command(cls=Command)
@with_flags
def explain(
    name: Shown,
    op: Annotated[str, typer.Argument(help="An op, such as 2B3: stage 2, backward, microbatch 3.")],
    changes: Changes,
) -> None:
    """Explain why an op of a schedule does not start earlier."""
    typer.echo(CriticalPath(changes.made(name), changes.times, changes.keep_gathered).explain(Op.parse(op)))


@schedule.command(cls=Command)
@with_flags
def compare(
    sizes: Sizes,
    outputs: Outputs,
    file: Annotated[
        Path | None, typer.Argument(help="A schedule's file, to compare with the others of its size.")
    ] = None,
) -> None:
    """Print a table of all schedules of a size that fit, the fastest first."""
    costs, rows = sizes.times, []
    if file is not None:
        own = sizes.read(file)
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


def named_schedules(sizes: Sizes, microbatches: int) -> Iterator[tuple[Schedule, Simulation]]:
    """Yield each schedule that exists in these sizes and holds no more than ``memory``, with its simulation."""
    costs, pipe, chunks = sizes.times, sizes.pipe, sizes.chunks
    for name in schedule_names():
        recipe = RECIPES.get(name)
        if name == "auto" or (recipe and not recipe.trains):
            continue
        if recipe and (not (chunks is None or recipe.accepts(chunks)) or microbatches < recipe.least(pipe)):
            continue
        try:
            chosen = tuned(make_schedule(name, pipe, microbatches, chunks), costs)
        except ValueError:
            if recipe is None:  # a package's, which does not exist at this size
                continue
            raise
        if sizes.pairs and not chosen.pairs:
            chosen = pair_pass(chosen, costs)
        result = simulate(chosen, costs, sizes.keep_gathered)
        if sizes.memory is None or max(result.peak_activations) <= sizes.memory + 1e-9:
            verify(chosen, sizes.memory)
            yield chosen, result


def tuned(chosen: Schedule, costs: Costs) -> Schedule:
    """Adapt a zero-bubble schedule to unequal costs of F, I and W, as in the zero-bubble paper."""
    recipe = RECIPES.get(chosen.name)
    tunable = recipe is not None and recipe.tunable
    return tune(chosen, costs) if tunable and costs != Costs() and len(chosen.slices) == 1 else chosen


schedule.command(cls=Command)(cuts)
