"""Texts, tables and JSON objects about schedules and their simulations, which ``triax schedule`` prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..base.tables import table
from ..pipe.program.costs import Costs
from ..pipe.program.draw import text
from ..pipe.program.schedule import Schedule
from ..pipe.program.simulate import Simulation
from ..pipe.program.slices import equal_cost_slices
from ..pipe.schedules.search import Found

MOST_ROWS = 128  # ranks that are drawn in the terminal
HEADS = ("schedule", "chunks", "makespan", "bubble", "peak", "sends")


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
    """Return the object that ``triax schedule NAME --json`` prints."""
    out = chosen.to_dict() | _figures(result)
    if isinstance(chosen, Found):
        out |= {"lower_bound": chosen.lower_bound, "best_named": chosen.best_named}
    return out


def row_report(chosen: Schedule, result: Simulation) -> dict[str, Any]:
    """Return the entry of a schedule in the object that ``triax schedule compare --json`` prints."""
    return {"name": chosen.name, "chunks": chosen.chunks, **_figures(result), "sends": sends(chosen)}


def _figures(result: Simulation) -> dict[str, Any]:
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
    stages = chosen.placement
    crossings = sum(a != b for a, b in pairwise(stages))
    ways = 2 if any(op.kind != "F" for order in chosen.orders for op in order) else 1
    return crossings * ways * chosen.passes


def summary(chosen: Schedule, result: Simulation, costs: Costs, width: int) -> Iterator[RenderableType]:
    """Yield a schedule's drawing and figures, for a terminal of a width."""
    yield Text(title(chosen, costs), "bold")
    if chosen.pipe <= MOST_ROWS:
        yield text(result.timeline, width - len(f"rank {chosen.pipe - 1} "))
    yield f"makespan {result.makespan:g}   bubble {result.bubble:.2%}   sends {sends(chosen)}"
    yield (
        f"bubble / ideal time {result.timeline.bubble_of_ideal:.2%} (Narayanan 2021)   "
        f"within a rank {result.timeline.bubble_paper:.2%} (Qi 2023)"
    )
    yield f"peak activations per rank, microbatches: {_listed(result.peak_activations)}"
    if chosen.chunks > 1:
        yield f"of each stage: {_listed(result.peak_of_stages)}"
    if result.peak_offloaded:
        yield f"in host memory: {_listed(result.peak_offloaded)}"
    if len(chosen.slices) > 1 and costs.attention:
        equal = ",".join(f"{part:.3g}" for part in equal_cost_slices(len(chosen.slices), costs.attention))
        yield f"slices that take equally long in the forward pass: --slices {equal}"
    if isinstance(chosen, Found):
        yield chosen.summary()


def _listed(numbers: Sequence[float]) -> str:
    return " ".join(f"{number:g}" for number in numbers)


def comparison(rows: Sequence[tuple[Schedule, Simulation]], pipe: int, microbatches: int, costs: Costs) -> Table:
    """Return a table of schedules of one size."""
    cells = (
        (
            *(chosen.name, chosen.chunks, f"{result.makespan:.5g}", f"{result.bubble:.2%}"),
            *(f"{max(result.peak_activations):.4g}", sends(chosen)),
        )
        for chosen, result in rows
    )
    return table(HEADS, cells, f"pipe {pipe}, microbatches {microbatches}, {_in_words(costs)}")
