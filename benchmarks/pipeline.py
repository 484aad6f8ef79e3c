"""triax's pipeline beside torch's and DeepSpeed's: step time, overhead per op, memory; the same model in one run.

    python benchmarks/pipeline.py                       # 2 and then 4 stages, 8 microbatches
    python benchmarks/pipeline.py --stages 2 --rounds 15 --json

All contenders live in one set of processes on gloo, one thread each, and take turns: every round runs each of
them once, and starts one further down the list than the round before. What is quoted is the median over rounds of the
slowest rank's time, optimizer included, of its ratio to the fastest peer's (torch's schedules and DeepSpeed) and of the
limit's ratio to it in the same round. The limit is the schedule's simulated makespan, with the costs of the same stages
in plain torch, measured on all ranks at once and without messages. It is left out where ranks share cores. Before any
of it, each must have computed the gradients of plain autograd. docs/benchmarks.md says more.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch.distributed as dist
from contenders import PipelineContender, Silent, Triax, contenders
from limits import ratios
from measuring import DISTURBED, growth, in_turn, timed
from rounds import WARM_UP, Row, beside, on_ranks, parser, prepared, print_json, show
from stacks import GPT, SMOKE, TINY

import triax

MORE = 4  # times the microbatches: by how much longer that takes, an op's overhead is told from a step's
STACKS = {"gpt": GPT, "tiny": TINY, "smoke": SMOKE}


@dataclass
class PipelineRow(Row):
    """Times of one contender on one stack and number of stages."""

    ops: int = 0  # that the busiest rank runs in a step
    more_ops: int = 0  # of a step of MORE times the microbatches, on the tiny stack
    more_times: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)  # of each round: the share of the machine that others took
    memory: list[float] = field(default_factory=list)  # per rank: growth of the process in a step, in MiB
    activations: list[float] = field(default_factory=list)  # per rank: held at once, as simulated


def main() -> None:
    options = parse()
    results = {}
    for stages in options.stages:
        for name in options.stacks:
            rows = [PipelineRow(**row) for row in on_ranks(measure, name, stages, options, ranks=stages)[0]]
            title = f"{name} stack, {stages} stages, {options.microbatches} microbatches"
            results[f"{name}, {stages} stages"] = rows
            if not options.json:
                show_pipeline(rows, title, stages)
    if options.json:
        print_json(results, rounds=options.rounds)


def parse() -> argparse.Namespace:
    arguments = parser(__doc__)
    arguments.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    arguments.add_argument("--stacks", choices=STACKS, nargs="+", default=["gpt", "tiny"])
    arguments.add_argument("--microbatches", type=int, default=8)
    return arguments.parse_args()


# ---------------------------------------------------------------------------------------- on each rank


def measure(stack_name: str, stages: int, options: argparse.Namespace) -> list[PipelineRow]:
    """Time every contender, or those that ``options.only`` names in part."""
    stack, microbatches = STACKS[stack_name], options.microbatches
    if not stack.heads:
        stack = replace(stack, entries=2 * stages)
    dist.init_process_group("gloo")  # by torch, for the peers: triax makes groups of its own beside it
    grid = triax.Grid(pipe=stages)
    found, ran = prepared(contenders(stack, stages, microbatches), options.only)
    more = {} if stack.heads else dict(contenders(stack, stages, MORE * microbatches))
    rows = [PipelineRow(row.name, row.problem) for row in found]
    running: list[tuple[PipelineRow, PipelineContender, PipelineContender | None]] = []
    for plain, contender in ran:
        row = next(each for each in rows if each.name == plain.name)
        longer = more[row.name]() if more else None
        row.ops, row.more_ops = contender.ops, longer.ops if longer is not None else 0
        for each in (contender, longer) * WARM_UP:
            if each is not None:
                each.step()
        running.append((row, contender, longer))
    cores = len(os.sched_getaffinity(0))
    chunks = {c.schedule.chunks for _, c, _ in running if c.schedule is not None} if stages <= cores else set()
    silent = {each: Silent(stack, grid, microbatches, each) for each in sorted(chunks)}

    turns = 1 if stack.heads else 20  # of the tiny stack, a round's turn is so many steps
    deadline = time.monotonic() + options.patience
    for turn, (row, contender, longer) in enumerate(in_turn(running, options.rounds)):
        if turn % len(running) == 0:
            costs = {each: its.measure() for each, its in silent.items()}
        if contender.schedule is not None and silent:
            known, optimizer = costs[contender.schedule.chunks]
            row.limits.append(triax.simulate(contender.schedule, known).makespan + optimizer)
        elapsed, others = timed(grid, contender.step, turns, deadline)
        row.times.append(elapsed)
        row.others.append(others)
        if longer is not None:
            row.more_times.append(timed(grid, longer.step, turns, deadline)[0])
    for row, contender, _ in running:
        row.memory = [float(grown) for grown in grid.world.all_gather_json(growth(grid, contender.step))]
        if isinstance(contender, Triax):
            for rank, (held, simulated) in enumerate(grid.world.all_gather_json(contender.activations())):
                row.activations.append(held)
                if held != simulated:
                    raise AssertionError(f"{row.name}: rank {rank} held {held} activations, simulated {simulated}")
    return rows


# ------------------------------------------------------------------------------------- in this process


def overhead(row: PipelineRow, alone: PipelineRow, stages: int) -> tuple[float, float]:
    """Return seconds beyond a rank's share of the work, which one process does without a pipeline.

    Of an op: by how much longer a step of more microbatches takes. Of a step: what is left.
    """
    work = (median(alone.more_times) - alone.step) / stages
    each = (median(row.more_times) - row.step - work) / (row.more_ops - row.ops)
    return each, row.step - alone.step / stages - each * row.ops


def show_pipeline(rows: list[PipelineRow], title: str, stages: int) -> None:
    """Print a table."""
    if (taken := median(share for row in rows for share in row.others)) > DISTURBED:
        title += f" (others took {taken:.0%} of the machine meanwhile: wait, or give --patience)"
    alone, *others = (row for row in rows if row.times)
    peers = [row for row in others if not row.name.startswith("triax")]
    best = min(peers or others, key=lambda row: row.step)

    def microseconds(which: int) -> Any:
        return lambda row: "" if row is alone else f"{1e6 * overhead(row, alone, stages)[which]:.0f}"

    columns = {
        "step, ms": lambda row: f"{1e3 * row.step:.2f}",
        "ratio": lambda row: beside(row.times, best.times),
        "of the limit": lambda row: beside(row.limits, row.times),
        "speedup": lambda row: f"{median(ratios(alone.times, row.times)):.2f}",
    }
    if alone.more_times:
        columns |= {"overhead, us/op": microseconds(0), "and us/step": microseconds(1)}
    else:
        columns["memory, MiB"] = lambda row: " ".join(f"{grown:.0f}" for grown in row.memory)
        columns["activations held"] = lambda row: " ".join(f"{held:g}" for held in row.activations)
    show(title, rows, columns, f"ratio to {best.name}")


if __name__ == "__main__":
    main()
