"""``triax grid``: the place of each rank on a grid and what it holds, as a table or a picture."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import typer

from ..base.errors import ConfigError, to_install
from ..base.files import PICTURES
from ..base.tables import table, terminal
from ..grid.topology import Topology
from ..options.base import Options, option
from ..pipe.partition import uniform
from .flags import one_line_errors, with_flags

LISTED = 64  # ranks that a table lists and a picture shows
STATES = ("weights", "gradients", "optimizer state")
STAGES = ("#1f5fa8", "#1d7a3f", "#b3541e", "#6b4c9a")  # colors of the pipe stages, dark enough for white letters


class GridRank(NamedTuple):
    """Share of the model that one rank holds.

    Attributes:
        rank: the rank.
        place: its coordinate.
        layers: the first layer of its stage, and the layer after the last one.
        tokens: the parts of each sequence that it holds, of twice as many parts as the context axis is long.
        expert: its shard of each layer's experts.
        replica: its number among the ranks that hold the same stage and tensor shard.
    """

    rank: int
    place: dict[str, int]
    layers: tuple[int, int]
    tokens: tuple[int, int]
    expert: int
    replica: int


@dataclass(frozen=True, kw_only=True)
class GridFlags(Options):
    """Flags of ``triax grid``."""

    pipe: int = option(1, "Size of the pipe axis: the number of stages.", least=1)
    data: int = option(1, "Size of the data axis: the number of replicas.", least=1)
    tensor: int = option(1, "Size of the tensor axis: the shards of a layer.", least=1)
    context: int = option(1, "Size of the context axis: the parts of a sequence.", least=1)
    expert: int = option(1, "Size of the expert axis: the shards of a layer's experts.", least=1)
    layers: int = option(8, "Layers of the model.", least=1)
    zero: int = option(0, "ZeRO stage.", least=0, most=3)
    plot: Path | None = option(None, "Draw to this .png, .svg or .pdf file.", writes=PICTURES)
    json: bool = option(False, "Print one JSON object.")


@with_flags
@one_line_errors
def grid(flags: GridFlags) -> None:
    """Print the place of each rank on a grid, its layers and its shards."""
    sizes = {name: getattr(flags, name) for name in ("pipe", "data", "context", "tensor")}
    if flags.context == 1:  # an axis only where it is asked for
        del sizes["context"]
    topology, cuts, plot = Topology(expert=flags.expert, **sizes), uniform(flags.layers, flags.pipe), flags.plot
    ranks = [_held(topology, rank, cuts) for rank in range(topology.world_size)]
    if plot is not None:
        if len(ranks) > LISTED:
            raise ConfigError(f"You asked for a picture of {len(ranks)} ranks, but a picture shows at most {LISTED}.")
        try:
            _draw(topology, ranks, cuts, flags.zero, plot)
        except ImportError as error:
            raise ConfigError(f"Pictures need matplotlib. Type {to_install('plot')}") from error
    if flags.json:
        typer.echo(json.dumps({"sizes": topology.sizes, "ranks": [held._asdict() for held in ranks]}))
    else:
        _print(topology, ranks, flags.zero)


def _held(topology: Topology, rank: int, cuts: list[int]) -> GridRank:
    coords = topology.coordinate(rank)._asdict()
    parts = topology.size("context")
    part = coords.get("context", 0)
    replica = coords["data"] * parts + part
    stage = coords["pipe"]
    return GridRank(
        rank, coords, (cuts[stage], cuts[stage + 1]), (part, 2 * parts - 1 - part), replica % topology.expert, replica
    )


def _print(topology: Topology, ranks: list[GridRank], zero: int) -> None:
    size, copies = topology.size, topology.size("data") * topology.size("context")
    shown = [name for name in topology.names if size(name) > 1] or ["data"]
    heads = ["rank", *shown, "layers"]
    heads += ["sequence parts"] if size("context") > 1 else []
    heads += ["experts"] if topology.expert > 1 else []
    heads += ["ZeRO shard"] if zero else []
    rows = []
    for rank, coords, (start, stop), tokens, expert, replica in ranks[:LISTED]:
        row = [rank, *(coords[name] for name in shown), _span(start, stop)]
        row += [f"{tokens[0] + 1}, {tokens[1] + 1} of {2 * size('context')}"] if size("context") > 1 else []
        row += [f"{expert + 1} of {topology.expert}"] if topology.expert > 1 else []
        row += [f"{replica + 1} of {copies}"] if zero else []
        rows.append(row)
    console = terminal()
    console.print(table(heads, rows, f"{topology.world_size:,} ranks", left=0))
    if zero:
        console.print(f"A ZeRO shard has {_listed(STATES[3 - zero :])}.")
    if len(ranks) > LISTED:
        console.print(f"and {len(ranks) - LISTED:,} more ranks")


def _listed(words: tuple[str, ...]) -> str:
    return " and ".join([*([", ".join(words[:-1])] if words[1:] else []), words[-1]])


def _span(start: int, stop: int) -> str:
    return str(start) if stop == start + 1 else f"{start} to {stop - 1}"


# ----------------------------------------------------------------------------------------------- the picture


def _draw(topology: Topology, ranks: list[GridRank], cuts: list[int], zero: int, path: Path) -> None:
    """Draw the layers above their stages, a row per replica, and in it a box per rank with what it holds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch, Rectangle

    size = topology.size
    lanes = size("context") * size("tensor")
    copies = size("data") * size("context")
    width, line, gap = (
        (4.0 if size("context") > 1 else 3.4),
        0.21,
        0.16,
    )  # inches: a stage, a line of text, between replicas
    box = max(0.72, 0.37 + line * (1 + (size("context") > 1) + (topology.expert > 1)))  # a rank
    row = lanes * box + gap
    across, down = size("pipe") * width, size("data") * row + 0.85
    figure = Figure(figsize=(across + 1.2, down + 0.55), facecolor="white")
    FigureCanvasAgg(figure)
    axis = figure.add_axes((0, 0, 1, 1), xlim=(-1.1, across + 0.1), ylim=(down + 0.45, -0.1))
    axis.set_axis_off()

    def rectangle(x: float, y: float, w: float, h: float, **style: Any) -> None:
        axis.add_patch(Rectangle((x, y), w, h, **style))

    axis.text(-0.1, 0.36, "layers", ha="right", va="center")
    for stage, (start, stop) in enumerate(pairwise(cuts)):
        step = (width - 0.4) / (stop - start)
        fill = STAGES[stage % len(STAGES)]
        axis.text(stage * width + 0.2, 0.02, f"stage {stage}", va="center", color=fill, weight="bold")
        for i, layer in enumerate(range(start, stop)):
            x = stage * width + 0.2 + i * step
            rectangle(x, 0.2, step * 0.94, 0.32, facecolor=fill)
            if step > 0.15:
                axis.text(x + step * 0.47, 0.36, str(layer), color="white", ha="center", va="center", fontsize=9)
        if stage:
            arrow = {"arrowstyle": "->", "color": "black"}
            axis.annotate("", (stage * width + 0.18, 0.36), (stage * width - 0.22, 0.36), arrowprops=arrow)
    for replica in range(size("data")):
        axis.text(-0.1, 0.85 + replica * row + lanes * box / 2, f"replica {replica}", ha="right", va="center")
    for held in ranks:
        stage, tensor = held.place["pipe"], held.place["tensor"]
        lane = held.place.get("context", 0) * size("tensor") + tensor
        x, y = stage * width + 0.2, 0.8 + held.place["data"] * row + lane * box
        bars = x + width - 1.32
        edge = STAGES[stage % len(STAGES)]
        style = "round,pad=0,rounding_size=0.06"
        axis.add_patch(
            FancyBboxPatch((x, y), width - 0.4, box - 0.08, boxstyle=style, facecolor="white", edgecolor=edge)
        )
        notes = [f"tensor shard {tensor + 1} of {size('tensor')}" if size("tensor") > 1 else "whole layers"]
        if size("context") > 1:
            notes.append(f"sequence parts {held.tokens[0] + 1}, {held.tokens[1] + 1} of {2 * size('context')}")
        if topology.expert > 1:
            notes.append(f"expert shard {held.expert + 1} of {topology.expert}")
        axis.text(x + 0.1, y + 0.16, f"rank {held.rank}", va="center", weight="bold", fontsize=9.5)
        for i, note in enumerate(notes):
            axis.text(x + 0.1, y + 0.16 + (i + 1) * line, note, va="center", fontsize=8.5)
        for i, state in enumerate(STATES):
            top = y + 0.1 + i * 0.18
            full = zero < 3 - i
            axis.text(bars - 0.06, top + 0.06, state, va="center", ha="right", fontsize=7.5)
            rectangle(bars, top, 0.8, 0.12, facecolor="#e4e4e4")
            share = 0.8 / copies
            rectangle(bars + (0 if full else held.replica * share), top, 0.8 if full else share, 0.12, facecolor=edge)
    words = f"{topology.world_size} ranks: " + " x ".join(f"{name} {n}" for name, n in topology.sizes.items() if n > 1)
    shards = (
        f"ZeRO stage {zero} shards {_listed(STATES[3 - zero :])}" if zero else "each replica holds all of its layers"
    )
    axis.text(-0.9, down + 0.12, f"{words}\n{shards}", va="center", linespacing=1.4, fontsize=9.5)
    figure.savefig(path, dpi=130)
