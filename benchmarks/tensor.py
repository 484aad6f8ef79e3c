"""triax's tensor axis beside DTensor and layers written by hand: step time, bytes sent, activations held.

    python benchmarks/tensor.py                          # a transformer layer, then a GPT, on 2 and then 4 ranks
    python benchmarks/tensor.py --models gpt --ranks 2 --rounds 15

A step is forward and backward of 4,096 tokens. All contenders live in one set of processes on gloo, one thread each,
and take turns: every round runs each of them once, and starts one further down the list than the round before. What is
quoted is the median over rounds of the slowest rank's time, of its speed-up over one process and of the limit's ratio
to it in the same round, and of the bytes that each rank sent. The limit is the time of as many processes that compute
the same and send nothing, plus the bytes of the contender, at the rate of the transport while all ranks compute. Before
any of it, each must have computed the gradients of plain autograd in one process. docs/tensor-parallel.md says more.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from limits import ratios, seconds_per_byte, spread
from measuring import compare, in_turn, timed_and_carried
from rich.console import Console
from rich.table import Table
from sharers import ALONE, Alone, Shape, Triax, held
from sharing_peers import Silent, sharers

import triax
from triax.launcher.launch import launch

WARM_UP = 2
SHAPES = {
    "layer": Shape(layers=1, width=256, heads=4, sequences=16, length=256),
    "gpt": Shape(layers=8, width=256, heads=4, sequences=16, length=256, vocabulary=256),
    "smoke": Shape(layers=2, width=16, heads=4, sequences=2, length=8, vocabulary=32),
}


@dataclass
class Row:
    """Times of one contender."""

    name: str
    times: list[float] = field(default_factory=list)  # of each round's step, in seconds: the slowest rank's
    sent: list[float] = field(default_factory=list)  # of each round: bytes per rank
    limits: list[float] = field(default_factory=list)  # of each round: the least time of a step that sends as much
    counted: float = 0.0  # bytes per rank and step, by triax's own count
    activations: list[int] = field(default_factory=list)  # per rank: bytes held for the backward


def main() -> None:
    options = parse()
    results = {}
    for name in options.models:
        for ranks in options.ranks:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "rows.json"
                code = launch(measure, name, options, str(path), ranks=ranks, threads=1)
                if code:
                    sys.exit(code)
                rows = [Row(**row) for row in json.loads(path.read_text())]
            results[f"{name}, {ranks} ranks"] = [vars(row) for row in rows]
            if not options.json:
                show(rows, name, ranks)
    if options.json:
        print(json.dumps({"torch": torch.__version__, "results": results}, indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", choices=SHAPES, nargs="+", default=["layer", "gpt"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--only", nargs="+", default=[], help=f"contenders whose names contain one of these; and {ALONE}"
    )
    parser.add_argument("--patience", type=float, default=0.0, help="seconds, in all, to repeat disturbed turns")
    parser.add_argument("--json", action="store_true", help="one object instead of tables")
    return parser.parse_args()


# ---------------------------------------------------------------------------------------- on each rank


def measure(name: str, options: argparse.Namespace, path: str) -> None:
    """Time every contender; rank 0 writes the rows to ``path``."""
    warnings.simplefilter("ignore")  # torch's own, of what DTensor calls
    if not dist.is_initialized():
        dist.init_process_group("gloo")  # by torch, for the peers: triax makes groups of its own beside it
    shape, grid = SHAPES[name], triax.Grid(tensor=dist.get_world_size())
    expected = {name: g.clone() for name, g in Alone(shape).gradients().items()}
    running: list[tuple[Row, Alone]] = []
    for contender_name, make in sharers(shape, grid):
        if options.only and contender_name != ALONE and not any(part in contender_name for part in options.only):
            continue
        row, contender = Row(contender_name), make()
        compare(contender_name, contender.gradients(), expected)
        running.append((row, contender))
    silent = Row("")
    running.append((silent, Silent(shape)))
    for _, contender in running:
        for _ in range(WARM_UP):
            contender.step()

    per_byte = seconds_per_byte(grid)
    deadline = time.monotonic() + options.patience
    for row, contender in in_turn(running, options.rounds):
        elapsed, sent = timed_and_carried(grid, contender.step, deadline)
        row.times.append(elapsed)
        row.sent.append(sent)
    running.pop()
    for row, contender in running:
        row.limits = [least + median(row.sent) * per_byte for least in silent.times]
        row.activations = grid.world.all_gather_json(held(contender))
        if isinstance(contender, Triax):
            grid.traffic.clear()
            contender.step()
            row.counted = sum(sent.bytes for sent in grid.traffic.report()["tensor"].values())
    if grid.rank == 0:
        Path(path).write_text(json.dumps([vars(row) for row, _ in running]))


# ------------------------------------------------------------------------------------- in this process


def show(rows: list[Row], name: str, ranks: int) -> None:
    """Print a table."""
    shape = SHAPES[name]
    tokens = shape.sequences * shape.length
    title = f"{name}: {shape.layers} layers of width {shape.width}, {tokens:,} tokens, {ranks} tensor ranks"
    table = Table(title=title, title_justify="left")
    for head in ("", "step, ms", "speed-up", "of the limit", "sent, MB", "activations, MB"):
        table.add_column(head, justify="right" if head else "left")
    alone = next(row for row in rows if row.name == ALONE)
    for row in rows:
        sent = f"{median(row.sent) / 1e6:.1f}" + (f" (counted {row.counted / 1e6:.1f})" if row.counted else "")
        of_limit = "" if row is alone else spread(ratios(row.limits, row.times))
        cells = (spread(ratios(alone.times, row.times)), of_limit, sent, f"{max(row.activations) / 1e6:.1f}")
        table.add_row(row.name, f"{1e3 * median(row.times):.1f}", *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
