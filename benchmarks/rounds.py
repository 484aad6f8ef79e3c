"""Contenders that share one step: measured in rounds, counted, and printed beside the best peer.

For contenders that are subclasses of ``sharers.Alone``: benchmarks/context.py, benchmarks/moe.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from counting import counted
from limits import ratios, seconds_per_byte, spread
from measuring import compare, in_turn, slowest, timed_and_carried
from rich.console import Console
from rich.table import Table
from sharers import ALONE, Alone, held

import triax
from triax.launcher.launch import launch

WARM_UP = 2
Makers = Iterable[tuple[str, Callable[[], Alone]]]


class NotRunning(Exception):
    """A contender does not run here; the message says why."""


@dataclass
class Row:
    """Figures of one contender."""

    name: str
    problem: str = ""  # why it did not run
    times: list[float] = field(default_factory=list)  # of each round's step, in seconds: the slowest rank's
    sent: list[float] = field(default_factory=list)  # of each round: bytes per rank that the loopback carried
    held: list[int] = field(default_factory=list)  # per rank: bytes that autograd holds for the backward
    peak: list[int] = field(default_factory=list)  # per rank: the most bytes that a step has allocated at once
    scores: list[int] = field(default_factory=list)  # per rank: computed by the attention of a forward pass
    limits: list[float] = field(default_factory=list)  # of each round: the least time of a step that sends as much

    @property
    def is_peer(self) -> bool:
        return not self.name.startswith("triax") and self.name != ALONE

    @property
    def balance(self) -> float:
        """The busiest rank's scores over the mean."""
        return max(self.scores) * len(self.scores) / sum(self.scores)


def options(document: str, shapes: Iterable[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=document.split("\n")[0])
    parser.add_argument("--models", choices=list(shapes), nargs="+", default=[next(iter(shapes))])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--only", nargs="+", default=[], help=f"contenders whose names contain one of these; and {ALONE}"
    )
    parser.add_argument("--patience", type=float, default=0.0, help="seconds, in all, to repeat disturbed turns")
    parser.add_argument("--json", action="store_true", help="one object instead of tables")
    return parser.parse_args()


def run(
    given: argparse.Namespace, makers: Callable[[str, triax.Grid], Makers], grid: str, title: Callable[[str, int], str]
) -> None:
    """Measure each model on each number of ranks, in processes of their own, and print tables or one object.

    Args:
        given: from ``options``.
        makers: names of the contenders, and how to make them; the one process first. Called on each rank.
        grid: ``context``, or ``expert`` (over as many replicas).
        title: a table's title.
    """
    results: dict[str, list[dict[str, Any]]] = {}
    for model in given.models:
        for ranks in given.ranks:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "rows.json"
                code = launch(measure, model, makers, grid, given, str(path), ranks=ranks, threads=1)
                if code:
                    sys.exit(code)
                rows = [Row(**row) for row in json.loads(path.read_text())]
            results[f"{model}, {ranks} ranks"] = [vars(row) for row in rows]
            if not given.json:
                show(rows, title(model, ranks))
    if given.json:
        print(json.dumps({"torch": torch.__version__, "results": results}, indent=1))


# ---------------------------------------------------------------------------------------- on each rank


def measure(
    model: str, makers: Callable[[str, triax.Grid], Makers], axis: str, given: argparse.Namespace, path: str
) -> None:
    """Time every contender, and count; rank 0 writes the rows to ``path``."""
    warnings.simplefilter("ignore")  # torch's own, of collectives that it has renamed
    if not dist.is_initialized():
        dist.init_process_group("gloo")  # by torch, for the peers: triax makes groups of its own beside it
    size = dist.get_world_size()
    grid = triax.Grid(context=size) if axis == "context" else triax.Grid(data=size, expert=size)
    rows: list[Row] = []
    running: list[tuple[Row, Alone]] = []
    expected: dict[str, torch.Tensor] = {}
    for name, make in makers(model, grid):
        if given.only and name != ALONE and not any(part in name for part in given.only):
            continue
        row = Row(name)
        rows.append(row)
        try:
            contender = make()
            found = contender.gradients()
        except NotRunning as error:
            row.problem = str(error)
            continue
        expected = expected or {parameter: gradient.clone() for parameter, gradient in found.items()}
        compare(name, found, expected)
        for _ in range(WARM_UP):
            contender.step()
        running.append((row, contender))

    per_byte, silent = seconds_per_byte(grid), []
    deadline = time.monotonic() + given.patience
    for row, contender in in_turn(running, given.rounds):
        elapsed, sent = timed_and_carried(grid, contender.step, deadline)
        row.times.append(elapsed)
        row.sent.append(sent)
        if row.name == ALONE:  # on every rank at once: the work of as many steps, and nothing sent
            silent.append(slowest(grid, contender.run) / size)
    for row, _ in running:
        row.limits = [least + median(row.sent) * per_byte for least in silent]
    for row, contender in running:
        contender.inputs.grad = None
        contender.model.zero_grad()
        counts = counted(contender.step)
        row.held, row.peak, row.scores = (
            list(grid.world.all_gather_json(count)) for count in (held(contender), counts.peak, counts.scores)
        )
    if grid.rank == 0:
        Path(path).write_text(json.dumps([vars(row) for row in rows]))


# ------------------------------------------------------------------------------------- in this process


def show(rows: list[Row], title: str) -> None:
    """Print a table."""
    ran = [row for row in rows if row.times]
    alone = next(row for row in ran if row.name == ALONE)
    best = min([row for row in ran if row.is_peer] or [alone], key=lambda row: median(row.times))
    caption = (
        f"ratio to {best.name}, and of the limit, in the same round: the median, and the middle half of the rounds"
    )
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    table.add_column("")
    with_scores = any(sum(row.scores) for row in ran)
    for head in (
        "step, ms",
        "ratio",
        "of the limit",
        "speed-up",
        "sent, MB",
        "held, MB",
        "peak, MB",
        *["balance"] * with_scores,
    ):
        table.add_column(head, justify="right")
    for row in ran:
        speedup = median([a / b for a, b in zip(alone.times, row.times, strict=True)])
        table.add_row(
            row.name,
            f"{1e3 * median(row.times):.0f}",
            spread(ratios(row.times, best.times)),
            spread(ratios(row.limits, row.times)) if row is not alone else "",
            f"{speedup:.2f}",
            f"{median(row.sent) / 1e6:.1f}",
            f"{max(row.held) / 1e6:.1f}",
            f"{max(row.peak) / 1e6:.1f}",
            *([f"{row.balance:.2f}" if row is not alone else ""] if with_scores else []),
        )
    console = Console(width=130)
    console.print(table)
    for row in rows:
        if row.problem:
            console.print(f"{row.name}: {row.problem}", highlight=False)
