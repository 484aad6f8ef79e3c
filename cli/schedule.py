"""``triax schedule``: verify, simulate and draw a pipeline schedule, without torch and without processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from ..base.errors import escaped
from ..base.tables import table, terminal
from ..pipe.program.critical import CriticalPath
from ..pipe.program.draw import chrome_trace, picture, text
from ..pipe.program.offload import offload_pass
from ..pipe.program.ops import Op
from ..pipe.program.pairs import pair_pass
from ..pipe.program.recompute_pass import recompute_pass
from ..pipe.program.schedule import Schedule
from ..pipe.program.simulate import Costs, Simulation, simulate
from ..pipe.program.slices import equal_cost_slices, slice_lengths
from ..pipe.program.timeline import Span
from ..pipe.program.verify import verify
from ..pipe.schedules.choose import NAMES, make_schedule, read_schedule, schedule_names, write_schedule
from ..pipe.schedules.registry import RECIPES
from ..pipe.schedules.search import Found, tune
from .cuts import show_cuts

LARGEST = 2**20  # passes of a microbatch through a stage
MOST_ROWS = 128  # ranks that are drawn in the terminal


def schedule(
    name: Annotated[
        str | None,
        typer.Argument(help=f"Name of the schedule: {', '.join(NAMES)}, or one of an installed package."),
    ] = None,
    pipe: Annotated[int | None, typer.Option(help="Size of the pipe axis. Default: 4, or the file's.")] = None,
    microbatches: Annotated[
        int | None,
        typer.Option(
            help="Microbatches per step. Default: twice --pipe, or the least number of a schedule that needs more, or "
            "the file's."
        ),
    ] = None,
    chunks: Annotated[int | None, typer.Option(help="Stages per rank. Default: as the schedule needs.")] = None,
    costs: Annotated[
        str,
        typer.Option(
            help="F,I,W[,COMM[,GATHER[,O[,R]]]]: time of a rank's forward, input-gradient and weight-gradient passes "
            "of one microbatch, of a message, of gathering the rank's weights in ZeRO stage 3, and of copying "
            "the activations of one microbatch to the host and back."
        ),
    ] = "1,1,1",
    memory: Annotated[
        float | None,
        typer.Option(help="Limit of activations per rank, in units of one microbatch through 1/pipe of the model."),
    ] = None,
    slices: Annotated[
        str | None,
        typer.Option(help="Slices of each sequence: their number, or their relative lengths, such as 4 or 3,2,2,1."),
    ] = None,
    attention: Annotated[
        float,
        typer.Option(help="With --slices: share of causal attention in F and I, 0 to 1. Later slices have more of it."),
    ] = 0.0,
    layers: Annotated[
        Path | None,
        typer.Option(
            help="JSON file with the costs of each layer: print where to cut the layers, by default for 1f1b."
        ),
    ] = None,
    limit: Annotated[
        str | None, typer.Option(help="With --layers: GB that a rank may take, or one for each rank: 20,20,40.")
    ] = None,
    collectives: Annotated[
        str,
        typer.Option(
            help="AR[,A2A]: time of the tensor axis's all-reduces, and of the expert axis's all-to-alls, in a rank's "
            "forward or input-gradient pass of one microbatch."
        ),
    ] = "0",
    pairs: Annotated[
        bool, typer.Option("--pairs", help="Join passes into pairs if that hides collectives and shortens the step.")
    ] = False,
    offload: Annotated[
        float | None, typer.Option(help="Share of the activations to offload to the host, 0 to 1, if their copies fit.")
    ] = None,
    recompute: Annotated[
        float | None, typer.Option(help="Share of the activations to recompute by ops of the schedule, 0 to 1.")
    ] = None,
    keep_gathered: Annotated[
        bool, typer.Option("--keep-gathered", help="ZeRO stage 3: gather weights once per step, not for each pass.")
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Print a table of all schedules that fit; with --file, also the file's.")
    ] = False,
    file: Annotated[
        Path | None,
        typer.Option(
            help="Read a schedule from a file: .csv with a line such as 0F0,0F1,0B0 for each rank, .json, or .txt with "
            "the lines that the zero-bubble repository prints."
        ),
    ] = None,
    explain: Annotated[
        str | None,
        typer.Option(help="Explain why this op does not start earlier, such as 2B3: stage 2, backward, microbatch 3."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw to this .png, .svg or .pdf file, or write a Chrome trace to this .json file."),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(
            help="Write the schedule to this file: .csv for torch's pipelining, .txt as the zero-bubble repository "
            "prints it, or .json."
        ),
    ] = None,
    critical: Annotated[bool, typer.Option("--critical", help="Draw a line along the critical path.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print a pipeline schedule: the operations of each rank, makespan, bubble and peak memory."""
    try:
        if layers is not None or limit is not None:
            if (
                layers is None
                or compare
                or file
                or explain
                or plot
                or critical
                or write
                or memory
                or offload
                or recompute
                or slices
                or attention
                or costs != "1,1,1"
                or collectives != "0"
                or pairs
            ):
                raise ValueError(
                    "--layers works only with a schedule's name, --pipe, --microbatches, --chunks, --limit and "
                    "--json, and --limit needs --layers"
                )
            sizes = 4 if pipe is None else pipe
            show_cuts(layers, name or "1f1b", sizes, microbatches or 2 * sizes, chunks, limit, as_json)
            return
        if name is not None and (compare or file is not None):
            option = "--compare" if compare else "--file"
            raise ValueError(
                f"{name} and {option} exclude each other: leave out {option} to print {name}, or leave out the name."
            )
        if name is None and not compare and file is None:
            raise ValueError(
                "Give a schedule's name, or --file, or --compare, or --file with --compare. "
                f"The names are {', '.join(schedule_names())}."
            )
        parsed, cut = replace(parse_costs(costs, collectives), attention=attention), parse_slices(slices)
        own = None if file is None else read_schedule(file)
        if own is not None:
            for option, given in (("pipe", pipe), ("microbatches", microbatches)):
                if given not in (None, value := getattr(own, option)):
                    raise ValueError(f"You gave --{option} {given}, but {file} has {option}={value}. Leave it out.")
            verify(own, memory if offload is None and recompute is None and not pairs else None)
            pipe, microbatches, chosen = own.pipe, own.microbatches, own
        if own is None or compare:
            pipe = 4 if pipe is None else pipe
            least = RECIPES[name].least(max(pipe, 1)) if name in RECIPES else 1
            microbatches = max(2 * pipe, least) if microbatches is None else microbatches
            passes = pipe * microbatches * (chunks or 1) * len(cut)
            if passes > LARGEST:
                raise ValueError(
                    f"--pipe {pipe} --microbatches {microbatches} gives {passes:,} passes of a microbatch through a "
                    f"stage, but at most {LARGEST:,} are simulated: give smaller sizes"
                )
            if compare:
                if critical or explain is not None:
                    raise ValueError("--explain and --critical are for one schedule: leave out --compare")
                if slices is not None or attention:
                    raise ValueError("--slices and --attention are for one schedule: leave out --compare")
                if write is not None:
                    raise ValueError("--write is for one schedule: leave out --compare")
                if offload is not None or recompute is not None:
                    raise ValueError("--offload and --recompute are for one schedule: leave out --compare")
                _compare(own, pipe, microbatches, chunks, parsed, memory, plot, as_json, keep_gathered, pairs)
                return
            assert name is not None
            searched = name == "auto"  # it chooses what is recomputed, and within a limit what is offloaded
            shares = (offload or 0.0) * (searched and memory is not None), (recompute or 0.0) * searched
            made = make_schedule(name, pipe, microbatches, chunks, parsed, memory, *shares, slices=cut)
            chosen = _tuned(made, parsed)
        elif slices is not None:
            raise ValueError("--slices is only for a schedule's name: a JSON file has its own slices")
        elif chunks is not None:
            raise ValueError(f"--chunks is only for a schedule's name: {file} has chunks={chosen.chunks}")
        if attention and len(chosen.slices) == 1:
            raise ValueError("--attention is for slices of sequences: give --slices too, such as --slices 4")
        unused = []
        if pairs:
            chosen = pair_pass(chosen, parsed)
            if not chosen.pairs:
                unused.append("--pairs joins no passes: no pair hides enough of --collectives to shorten the step")
        if offload is not None and not (isinstance(chosen, Found) and memory is not None):
            chosen = offload_pass(chosen, offload, costs=parsed)
            if offload and not chosen.offloads:
                unused.append("--offload copies nothing: no copy fits into the step and lowers a peak")
        if recompute is not None and not isinstance(chosen, Found):
            chosen = recompute_pass(chosen, recompute, costs=parsed)
            if recompute and not chosen.recomputes:
                unused.append("--recompute recomputes nothing: no peak would become smaller")
        for note in unused:
            terminal(stderr=True).print(escaped(f"triax schedule: {note}"), style="yellow")
        verify(chosen, memory)
        result = simulate(chosen, parsed, keep_gathered)
        causes = CriticalPath(chosen, parsed, keep_gathered)
        if critical and plot is None:
            raise ValueError("--critical draws a line in a picture: give --plot too, such as --plot schedule.png")
        if plot is not None:
            _plot(plot, [result], [title(chosen, parsed)], [causes.path] if critical else None)
        if write is not None:
            write_schedule(chosen, write)
        if explain is not None:
            typer.echo(causes.explain(Op.parse(explain)))
        elif as_json:
            path = [str(span.op) for span in causes.path]
            typer.echo(json.dumps(report(chosen, result) | {"critical_path": path}))
        else:
            _print(chosen, result, parsed)
    except (ValueError, OSError, ImportError) as error:
        terminal(stderr=True).print(escaped(f"triax schedule: {error}"), style="red")
        raise typer.Exit(2) from None


def parse_costs(text_: str, collectives: str = "0") -> Costs:
    """Return the costs of ``--costs`` and ``--collectives``."""
    try:
        exposed = [float(part) for part in collectives.split(",")]
    except ValueError:
        exposed = []
    if not 1 <= len(exposed) <= 2:
        raise ValueError(f"--collectives is {collectives}, but it must be AR[,A2A]. An example is 0.25.")
    try:
        values = [float(part) for part in text_.split(",")]
    except ValueError:
        values = []
    if not 3 <= len(values) <= 7:
        raise ValueError(f"--costs is {text_}, but it must be F,I,W[,COMM[,GATHER[,O[,R]]]]. An example is 1,1,1,0.05.")
    return Costs(*values, **dict(zip(("AR", "A2A"), exposed)))


def parse_slices(text_: str | None) -> tuple[float, ...]:
    """Return the relative lengths of slices from their number, or from the lengths between commas."""
    try:
        if text_ is None or text_.strip().isdecimal():
            return slice_lengths(int(text_ or 1))
        return slice_lengths([float(part) for part in text_.split(",")])
    except ValueError:
        raise ValueError(f"--slices is {text_}: give the number of slices, or their lengths, such as 3,2,2,1") from None


def title(chosen: Schedule, costs: Costs) -> str:
    """Return name, sizes and costs of a schedule in one line."""
    sizes = f"pipe {chosen.pipe}, microbatches {chosen.microbatches}, chunks {chosen.chunks}"
    if len(chosen.slices) > 1:
        sizes += f", slices {len(chosen.slices)}"
    return f"{chosen.name}: {sizes}, {_in_words(costs)}"


def _in_words(costs: Costs) -> str:
    named = [("F", costs.F), ("I", costs.I), ("W", costs.W)]
    named += [(name, cost) for name, cost in (("message", costs.COMM), ("gather", costs.GATHER)) if cost]
    named += [("attention", costs.attention)] if costs.attention else []
    named += [(name, cost) for name, cost in (("O", costs.O), ("R", costs.R)) if cost != 1.0]
    named += [(name, cost) for name, cost in (("AR", costs.AR), ("A2A", costs.A2A)) if cost]
    return f"costs {', '.join(f'{name} {cost:g}' for name, cost in named)}"


def report(chosen: Schedule, result: Simulation) -> dict[str, Any]:
    """Return the object that --json prints."""
    out = chosen.to_dict() | figures(result)
    if isinstance(chosen, Found):
        out |= {"lower_bound": chosen.lower_bound, "best_named": chosen.best_named}
    return out


def figures(result: Simulation) -> dict[str, Any]:
    """Return the numbers of a simulation that --json prints."""
    return {
        "makespan": result.makespan,
        "bubble": result.bubble,
        "bubble_paper": result.timeline.bubble_paper,
        "bubble_of_ideal": result.timeline.bubble_of_ideal,
        "peak_activations": list(result.peak_activations),
        "peak_of_stages": list(result.peak_of_stages),
    } | ({"peak_offloaded": list(result.peak_offloaded)} if result.peak_offloaded else {})


def sends(chosen: Schedule) -> int:
    """Return the number of messages between ranks in a step."""
    place = chosen.placement
    crossings = sum(a != b for a, b in pairwise(place))
    ways = 2 if any(op.kind != "F" for order in chosen.orders for op in order) else 1
    return crossings * ways * chosen.passes


def _tuned(chosen: Schedule, costs: Costs) -> Schedule:
    """Adapt a zero-bubble schedule to unequal costs of F, I and W, as in the zero-bubble paper."""
    recipe = RECIPES.get(chosen.name)
    tunable = recipe is not None and recipe.tunable
    return tune(chosen, costs) if tunable and costs != Costs() and len(chosen.slices) == 1 else chosen


def _print(chosen: Schedule, result: Simulation, costs: Costs) -> None:
    console = terminal()
    console.print(title(chosen, costs), style="bold")
    if chosen.pipe <= MOST_ROWS:
        console.print(text(result.timeline, console.width - len(f"rank {chosen.pipe - 1} ")))
    peaks = " ".join(f"{peak:g}" for peak in result.peak_activations)
    console.print(
        f"makespan {result.makespan:g}   bubble {result.bubble:.2%}   sends {sends(chosen)}\n"
        f"bubble / ideal time {result.timeline.bubble_of_ideal:.2%} (Narayanan 2021)   "
        f"within a rank {result.timeline.bubble_paper:.2%} (Qi 2023)\n"
        f"peak activations per rank, microbatches: {peaks}"
    )
    if chosen.chunks > 1:
        console.print("of each stage: " + " ".join(f"{peak:g}" for peak in result.peak_of_stages))
    if result.peak_offloaded:
        console.print("in host memory: " + " ".join(f"{peak:g}" for peak in result.peak_offloaded))
    if len(chosen.slices) > 1 and costs.attention:
        equal = ",".join(f"{part:.3g}" for part in equal_cost_slices(len(chosen.slices), costs.attention))
        console.print(f"slices that take equally long in the forward pass: --slices {equal}")
    if isinstance(chosen, Found):
        console.print(chosen.summary())


def _compare(
    own: Schedule | None,
    pipe: int,
    microbatches: int,
    chunks: int | None,
    costs: Costs,
    memory: float | None,
    plot: Path | None,
    as_json: bool,
    keep_gathered: bool,
    pairs: bool,
) -> None:
    rows = [] if own is None else [(own, simulate(own, costs, keep_gathered))]
    for name in schedule_names():
        recipe = RECIPES.get(name)
        if name == "auto" or (recipe and not recipe.trains):
            continue
        if recipe and (not (chunks is None or recipe.accepts(chunks)) or microbatches < recipe.least(pipe)):
            continue
        try:
            chosen = _tuned(make_schedule(name, pipe, microbatches, chunks), costs)
        except ValueError:
            if recipe is None:  # a package's, which does not exist at this size
                continue
            raise
        if pairs and not chosen.pairs:
            chosen = pair_pass(chosen, costs)
        result = simulate(chosen, costs, keep_gathered)
        if memory is None or max(result.peak_activations) <= memory + 1e-9:
            verify(chosen, memory)
            rows.append((chosen, result))
    if not rows:
        limit = "" if memory is None else f" within --memory {memory:g}"
        raise ValueError(f"No named schedule runs at this size{limit}. Search for one with triax schedule auto.")
    rows.sort(key=lambda row: row[1].makespan)
    if plot is not None:
        _plot(plot, [result for _, result in rows], [title(chosen, costs) for chosen, _ in rows])
    if as_json:
        entries = [
            {"name": chosen.name, "chunks": chosen.chunks, **figures(result), "sends": sends(chosen)}
            for chosen, result in rows
        ]
        typer.echo(json.dumps({"pipe": pipe, "microbatches": microbatches, "schedules": entries}))
        return
    cells = (
        (
            *(chosen.name, chosen.chunks, f"{result.makespan:.5g}", f"{result.bubble:.2%}"),
            *(f"{max(result.peak_activations):.4g}", sends(chosen)),
        )
        for chosen, result in rows
    )
    heads = ("schedule", "chunks", "makespan", "bubble", "peak", "sends")
    terminal().print(table(heads, cells, f"pipe {pipe}, microbatches {microbatches}, {_in_words(costs)}"))


def _plot(
    path: Path, results: list[Simulation], names: list[str], paths: Sequence[Sequence[Span]] | None = None
) -> None:
    if not path.parent.is_dir():
        raise ValueError(f"--plot is {path}, but there is no folder {path.parent}: mkdir -p {path.parent}")
    if path.suffix == ".json":
        if len(results) > 1:
            raise ValueError(f"{path} holds one trace, not {len(results)}. Give a schedule's name, or a .png.")
        path.write_text(json.dumps(chrome_trace(results[0].timeline)), encoding="utf-8")
    elif path.suffix in (".png", ".svg", ".pdf"):
        picture([result.timeline for result in results], path, names, paths=paths)
    else:
        raise ValueError(f"--plot is {path}, but it must end in .png, .svg, .pdf, or .json for a trace.")
