"""Contenders that share one step over the tensor, context or expert axis: measured in turns, counted, and printed.

For contenders that are subclasses of ``sharers.Alone``: benchmarks/tensor.py, benchmarks/context.py, benchmarks/moe.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any

import torch.distributed as dist
from counting import counted
from limits import ratios, seconds_per_byte
from rounds import Makers, Row, beside, on_ranks, parser, prepared, print_json, show, time_in_turn
from sharers import Alone, held

import triax

Of = Callable[[str, triax.Grid], Makers[Alone]]


class Everywhere:
    """The whole step on every rank at once, with nothing sent: the work of as many steps as there are ranks."""

    def __init__(self, alone: Alone) -> None:
        self.step, self.gradients = alone.run, alone.gradients


def run(
    document: str | None,
    shapes: dict[str, str],
    axis: str,
    makers: Of,
    silent: Callable[[str], Alone] | None = None,
) -> None:
    """Measure each model on each number of ranks, in processes of their own, and print tables or one object.

    Args:
        document: the benchmark's docstring.
        shapes: name of each model -> its sizes, for the title of a table.
        axis: ``tensor``, ``context``, or ``expert`` (over as many replicas).
        makers: the contenders, the one process first. Called on each rank.
        silent: makes the arithmetic of one rank without messages, of which the limit is. None: the limit is 1/n of the
            time of n ranks that each run the whole step, and what a step allocates and computes is counted too.
    """
    arguments = parser(document)
    arguments.add_argument("--models", choices=list(shapes), nargs="+", default=list(shapes)[:-1])
    arguments.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options = arguments.parse_args()
    results = {}
    for model in options.models:
        for ranks in options.ranks:
            found = on_ranks(measure, model, axis, makers, silent, options, ranks=ranks)[0]
            results[f"{model}, {ranks} ranks"] = rows = [Row(**row) for row in found]
            if not options.json:
                show_shares(rows, f"{model}: {shapes[model]}, {ranks} {axis} ranks")
    if options.json:
        print_json(results)


def measure(
    model: str, axis: str, makers: Of, silent: Callable[[str], Alone] | None, options: argparse.Namespace
) -> list[Row]:
    """Time every contender, and count. On each rank."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")  # by torch, for the peers: triax makes groups of its own beside it
    size = dist.get_world_size()
    sizes: dict[str, Any] = {"data": size, "expert": size} if axis == "expert" else {axis: size}
    grid = triax.Grid(**sizes)
    rows, running = prepared(makers(model, grid), options.only)
    apart, parts = (Everywhere(running[0][1]), size) if silent is None else (silent(model), 1)
    least = Row("")
    per_byte = seconds_per_byte(grid)
    time_in_turn(grid, [*running, (least, apart)], options)
    for row, contender in running:
        row.limits = [each / parts + median(row.sent) * per_byte for each in least.times]
        row.held = grid.world.all_gather_json(held(contender))
        contender.inputs.grad = None
        contender.model.zero_grad()
        grid.traffic.clear()
        if silent is None:
            counts = counted(contender.step)
            row.peak, row.scores = (grid.world.all_gather_json(each) for each in (counts.peak, counts.scores))
        else:
            contender.step()
            row.counted = sum(sent.bytes for sent in grid.traffic.report().get(axis, {}).values())
    return rows


def show_shares(rows: list[Row], title: str) -> None:
    """Print a table."""
    ran = [row for row in rows if row.times]
    alone = ran[0]
    best = min([row for row in ran[1:] if not row.name.startswith("triax")] or [alone], key=lambda row: row.step)

    def balance(row: Row) -> str:
        return "" if row is alone else f"{max(row.scores) * len(row.scores) / sum(row.scores):.2f}"

    def sent(row: Row) -> str:
        return f"{median(row.sent) / 1e6:.1f}" + (f" (counted {row.counted / 1e6:.1f})" if row.counted else "")

    columns = {
        "step, ms": lambda row: f"{1e3 * row.step:.1f}",
        "ratio": lambda row: beside(row.times, best.times),
        "of the limit": lambda row: beside(row.limits, row.times) if row is not alone else "",
        "speed-up": lambda row: f"{median(ratios(alone.times, row.times)):.2f}",
        "sent, MB": sent,
        "held, MB": lambda row: f"{max(row.held) / 1e6:.1f}",
    }
    if any(row.peak for row in ran):
        columns["peak, MB"] = lambda row: f"{max(row.peak) / 1e6:.1f}"
    if any(sum(row.scores) for row in ran):
        columns["balance"] = balance
    caption = f"ratio to {best.name}, and of the limit, in the same round: the median, and the middle half"
    show(title, rows, columns, caption)
