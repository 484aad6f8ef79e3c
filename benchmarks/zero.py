"""triax's data axis beside DDP, FSDP2 and DeepSpeed: step time, memory, bytes sent; the same model in one run.

    python benchmarks/zero.py                       # step time and bytes, on 2 and then 4 ranks, 4 microbatches
    python benchmarks/zero.py --memory              # the peak of fresh processes, on a larger model

All contenders live in one set of processes on gloo, one thread each, and take turns: every round runs each of
them once, and starts one further down the list than the round before. What is quoted is the median over rounds of the
slowest rank's time, optimizer included, of its ratio to DDP's and of the limit's ratio to it in the same round, and of
the bytes that each rank sent. The limit is the time of as many processes that do the same arithmetic and send nothing,
plus the bytes that the method must send, at the rate of the transport while all ranks compute. Before any of it, each
must have computed the gradients of plain autograd. docs/benchmarks.md says more.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from limits import ratios, seconds_per_byte, spread
from measuring import compare, in_turn, timed_and_carried
from replicas import DDP, Replica, Silent, contenders, plain
from rich.console import Console
from rich.table import Table
from stacks import GPT, SMOKE, Stack

import triax
from triax.launcher.launch import launch

WARM_UP = 2
# 25 million parameters: what is held beside the imports is seen.
LARGE = Stack(entries=8, width=512, microbatch=1, heads=4, length=128, vocabulary=256)
STACKS = {"gpt": GPT, "large": LARGE, "smoke": SMOKE}


@dataclass
class Row:
    """Times of one contender."""

    name: str
    problem: str = ""  # why it did not run
    times: list[float] = field(default_factory=list)  # of each round's step, in seconds: the slowest rank's
    sent: list[float] = field(default_factory=list)  # of each round: bytes per rank
    limits: list[float] = field(default_factory=list)  # of each round: the least time of a step of this method
    memory: list[float] = field(default_factory=list)  # per rank: the peak beyond the footprint, in bytes

    @property
    def step(self) -> float:
        return median(self.times) if self.times else float("nan")


def main() -> None:
    options = parse()
    results = {}
    for replicas in options.data:
        rows = memory(replicas, options) if options.memory else times(replicas, options)
        results[replicas] = [vars(row) for row in rows]
        if not options.json:
            show(rows, replicas, options)
    if options.json:
        print(json.dumps({"torch": torch.__version__, "results": results}, indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=int, nargs="+", default=[2, 4], help="sizes of the data axis")
    parser.add_argument("--stack", choices=STACKS)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", default=[], help="contenders whose names contain one of these; and DDP")
    parser.add_argument("--memory", action="store_true", help="the peaks of fresh processes instead of times")
    parser.add_argument("--patience", type=float, default=0.0, help="seconds, in all, to repeat disturbed turns")
    parser.add_argument("--json", action="store_true", help="one object instead of tables")
    options = parser.parse_args()
    options.stack = options.stack or ("large" if options.memory else "gpt")
    return options


def times(replicas: int, options: argparse.Namespace) -> list[Row]:
    """Step times and bytes, all contenders in turn in one set of processes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        code = launch(measure, options, str(path), ranks=replicas, threads=1)
        if code:
            sys.exit(code)
        return [Row(**row) for row in json.loads(path.read_text())]


def memory(replicas: int, options: argparse.Namespace) -> list[Row]:
    """Peaks, each contender in processes of its own. Freed blocks go back to the system, as far as glibc lets them."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    rows = []
    for name, *_ in contenders(STACKS[options.stack], options.microbatches):
        if not wanted(name, options):
            continue
        with tempfile.TemporaryDirectory() as folder:
            code = launch(peak, name, options, folder, ranks=replicas, threads=1)
            if code:
                sys.exit(code)
            rows.append(Row(name, memory=[float(path.read_text()) for path in sorted(Path(folder).iterdir())]))
    return rows


def wanted(name: str, options: argparse.Namespace) -> bool:
    """Return True if a contender was asked for."""
    return not options.only or name == DDP or any(part in name for part in options.only)


# ---------------------------------------------------------------------------------------- on each rank


def measure(options: argparse.Namespace, path: str) -> None:
    """Time every contender; rank 0 writes the rows to ``path``."""
    warnings.simplefilter("ignore")  # torch's own, of what FSDP2 calls
    stack, grid = STACKS[options.stack], triax.Grid()
    expected = plain(stack, options.microbatches)
    rows: list[Row] = []
    running: list[tuple[Row, Replica]] = []
    makers = [maker for maker in contenders(stack, options.microbatches) if wanted(maker.name, options)]
    for maker in makers:
        row = Row(maker.name)
        rows.append(row)
        try:
            contender = maker.make()
        except ImportError as error:
            row.problem = f"{error}: pip install -e '.[bench]'"
            continue
        compare(maker.name, contender.gradients(), expected)
        running.append((row, contender))
    silent = {sharded: Row("") for sharded in sorted({maker.sharded for maker in makers})}
    running += [(row, Silent(stack, options.microbatches, sharded)) for sharded, row in silent.items()]
    for _, contender in running:
        for _ in range(WARM_UP):
            contender.step()

    per_byte = seconds_per_byte(grid, grid.data)
    deadline = time.monotonic() + options.patience
    for row, contender in in_turn(running, options.rounds):
        elapsed, sent = timed_and_carried(grid, contender.step, deadline)
        row.times.append(elapsed)
        row.sent.append(sent)
    for row, maker in zip(rows, makers, strict=True):
        if row.times:
            must_send = min(maker.must_send(stack), median(row.sent))  # stage 3 may keep a layer
            row.limits = [least + must_send * per_byte for least in silent[maker.sharded].times]
    if grid.rank == 0:
        Path(path).write_text(json.dumps([vars(row) for row in rows]))


def peak(name: str, options: argparse.Namespace, folder: str) -> None:
    """The peak of this process, beyond that of one that trains next to nothing."""
    warnings.simplefilter("ignore")
    grid = triax.Grid()
    for stack in (SMOKE, STACKS[options.stack]):
        footprint = grid.peak_memory()
        train(next(maker for maker in contenders(stack, options.microbatches) if maker.name == name).make())
    Path(folder, str(grid.rank)).write_text(str(grid.peak_memory() - footprint))


def train(contender: Replica) -> None:
    for _ in range(3):
        contender.step()


# ------------------------------------------------------------------------------------- in this process


def show(rows: list[Row], replicas: int, options: argparse.Namespace) -> None:
    """Print a table."""
    title = f"{options.stack} stack, {replicas} replicas, {options.microbatches} microbatches"
    table = Table(title=title, title_justify="left")
    heads = ("peak, MB", "ratio to DDP") if options.memory else ("step, ms", "ratio to DDP", "of the limit", "sent, MB")
    for head in ("", *heads):
        table.add_column(head, justify="right" if head else "left")
    first = next(row for row in rows if row.name == DDP)
    for row in rows:
        if row.problem:
            table.add_row(row.name, row.problem)
        elif options.memory:
            ratio = max(row.memory) / max(first.memory)
            table.add_row(row.name, " ".join(f"{peak / 1e6:.0f}" for peak in row.memory), f"{ratio:.2f}")
        else:
            of_peer, of_limit = ratios(row.times, first.times), ratios(row.limits, row.times)
            cells = (f"{1e3 * row.step:.1f}", spread(of_peer), spread(of_limit), f"{median(row.sent) / 1e6:.1f}")
            table.add_row(row.name, *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
