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
import os
from statistics import median
from typing import Any

from limits import seconds_per_byte
from replicas import DDP, Silent, contenders, plain
from rounds import NotRunning, Row, beside, on_ranks, parser, prepared, print_json, show, time_in_turn
from stacks import GPT, SMOKE, Stack

import triax

# 25 million parameters: what is held beside the imports is seen.
LARGE = Stack(entries=8, width=512, microbatch=1, heads=4, length=128, vocabulary=256)
STACKS = {"gpt": GPT, "large": LARGE, "smoke": SMOKE}


def main() -> None:
    options = parse()
    results = {}
    for replicas in options.data:
        if options.memory:
            # Freed blocks go back to the system, as far as glibc lets them.
            os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
            names = [maker.name for maker in contenders(STACKS[options.stack], options.microbatches)]
            asked = [name for name in names if not options.only or name == DDP or any(o in name for o in options.only)]
            rows = [Row(name, **on_ranks(peaks, name, options, ranks=replicas)[0]) for name in asked]
        else:
            rows = [Row(**row) for row in on_ranks(measure, options, ranks=replicas)[0]]
        results[replicas] = rows
        if not options.json:
            show_replicas(rows, f"{options.stack} stack, {replicas} replicas, {options.microbatches} microbatches")
    if options.json:
        print_json(results)


def parse() -> argparse.Namespace:
    arguments = parser(__doc__)
    arguments.add_argument("--data", type=int, nargs="+", default=[2, 4], help="sizes of the data axis")
    arguments.add_argument("--stack", choices=STACKS)
    arguments.add_argument("--microbatches", type=int, default=4)
    arguments.add_argument("--memory", action="store_true", help="the peaks of fresh processes instead of times")
    options = arguments.parse_args()
    options.stack = options.stack or ("large" if options.memory else "gpt")
    return options


# ---------------------------------------------------------------------------------------- on each rank


def measure(options: argparse.Namespace) -> list[Row]:
    """Time every contender."""
    stack, grid = STACKS[options.stack], triax.Grid()
    makers = {maker.name: maker for maker in contenders(stack, options.microbatches)}
    named = ((maker.name, maker.make) for maker in makers.values())
    rows, running = prepared(named, options.only, plain(stack, options.microbatches))
    ran = [(row, makers[row.name]) for row, _ in running]
    silent = {sharded: Row("") for sharded in sorted({maker.sharded for _, maker in ran})}
    apart = [(row, Silent(stack, options.microbatches, sharded)) for sharded, row in silent.items()]
    per_byte = seconds_per_byte(grid, grid.data)
    time_in_turn(grid, [*running, *apart], options)
    for row, maker in ran:
        must_send = min(maker.must_send(stack), median(row.sent))  # stage 3 may keep a layer
        row.limits = [least + must_send * per_byte for least in silent[maker.sharded].times]
    return rows


def peaks(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the peak of each rank's process, beyond that of one that trains next to nothing."""
    grid = triax.Grid()
    try:
        for stack in (SMOKE, STACKS[options.stack]):
            footprint = grid.peak_memory()
            contender = next(maker for maker in contenders(stack, options.microbatches) if maker.name == name).make()
            for _ in range(3):
                contender.step()
            del contender
    except NotRunning as error:
        return {"problem": str(error)}
    return {"peak": grid.world.all_gather_json(grid.peak_memory() - footprint)}


# ------------------------------------------------------------------------------------- in this process


def show_replicas(rows: list[Row], title: str) -> None:
    """Print a table."""
    first = rows[0]
    if first.peak:
        columns = {
            "peak, MB": lambda row: " ".join(f"{peak / 1e6:.0f}" for peak in row.peak),
            "ratio to DDP": lambda row: f"{max(row.peak) / max(first.peak):.2f}",
        }
    else:
        columns = {
            "step, ms": lambda row: f"{1e3 * row.step:.1f}",
            "ratio to DDP": lambda row: beside(row.times, first.times),
            "of the limit": lambda row: beside(row.limits, row.times),
            "sent, MB": lambda row: f"{median(row.sent) / 1e6:.1f}",
        }
    show(title, rows, columns)


if __name__ == "__main__":
    main()
