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
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from contenders import ALONE, Contender, OneProcess, Silent, Triax, contenders
from limits import ratios, spread
from measuring import DISTURBED, compare, growth, in_turn, timed
from rich.console import Console
from rich.table import Table
from stacks import GPT, SMOKE, TINY

import triax
from triax.launcher.launch import launch

WARM_UP = 2
MORE = 4  # times the microbatches: by how much longer that takes, an op's overhead is told from a step's
STACKS = {"gpt": GPT, "tiny": TINY, "smoke": SMOKE}


@dataclass
class Row:
    """Times of one contender on one stack and number of stages."""

    name: str
    problem: str = ""  # why it did not run
    ops: int = 0  # that the busiest rank runs in a step
    times: list[float] = field(default_factory=list)  # of each round's step, in seconds: the slowest rank's
    limits: list[float] = field(default_factory=list)  # of each round: the schedule's makespan, and the optimizer
    more_ops: int = 0  # of a step of MORE times the microbatches, on the tiny stack
    more_times: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)  # of each round: the share of the machine that others took
    memory: list[float] = field(default_factory=list)  # per rank: growth of the process in a step, in MiB
    activations: list[tuple[float, float]] = field(default_factory=list)  # per rank: held at once; as simulated

    @property
    def step(self) -> float:
        return median(self.times)

    @property
    def is_peer(self) -> bool:
        return self.name.startswith(("torch", "DeepSpeed"))


def main() -> None:
    options = parse()
    results: dict[str, dict[str, Any]] = {}
    for stages in options.stages:
        for name in options.stacks:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "rows.json"
                code = launch(measure, name, stages, options, str(path), ranks=stages, threads=1)
                if code:
                    sys.exit(code)
                rows = [Row(**row) for row in json.loads(path.read_text())]
            result = summary(rows, name, stages, options.microbatches)
            results[f"{name}, {stages} stages"] = result
            if not options.json:
                show(result)
    if options.json:
        print(json.dumps({"torch": torch.__version__, "rounds": options.rounds, "results": results}, indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--stacks", choices=STACKS, nargs="+", default=["gpt", "tiny"])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", default=[], help="contenders whose names contain one of these")
    parser.add_argument(
        "--patience", type=float, default=0.0, help="seconds, in all, to repeat turns that other programs disturbed"
    )
    parser.add_argument("--json", action="store_true", help="one object, with every round's times, instead of tables")
    return parser.parse_args()


# ---------------------------------------------------------------------------------------- on each rank


def measure(stack_name: str, stages: int, options: argparse.Namespace, path: str) -> None:
    """Time every contender, or those that ``options.only`` names in part; rank 0 writes the rows to ``path``."""
    stack, microbatches = STACKS[stack_name], options.microbatches
    if not stack.heads:
        stack = replace(stack, entries=2 * stages)
    dist.init_process_group("gloo")  # by torch, for the peers: triax makes groups of its own beside it
    grid = triax.Grid(pipe=stages)
    expected = OneProcess(stack, stages, microbatches).gradients()
    more = {} if stack.heads else dict(contenders(stack, stages, MORE * microbatches))
    rows: list[Row] = []
    running: list[tuple[Row, Contender, Contender | None]] = []
    for name, make in contenders(stack, stages, microbatches):
        if options.only and name != ALONE and not any(part in name for part in options.only):
            continue
        row = Row(name)
        rows.append(row)
        try:
            contender, longer = make(), more[name]() if name in more else None
        except ImportError as error:
            row.problem = f"{error}: pip install -e '.[bench]'"
            continue
        row.ops = contender.ops
        compare(name, contender.gradients(), expected)
        row.more_ops = longer.ops if longer is not None else 0
        for _ in range(WARM_UP):
            contender.step()
            if longer is not None:
                longer.step()
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
            row.activations = grid.world.all_gather_json(contender.activations())
            for rank, (held, simulated) in enumerate(row.activations):
                if held != simulated:
                    raise AssertionError(f"{row.name}: rank {rank} held {held} activations, simulated {simulated}")
    if grid.rank == 0:
        Path(path).write_text(json.dumps([vars(row) for row in rows]))


# ------------------------------------------------------------------------------------- in this process


def summary(rows: list[Row], stack: str, stages: int, microbatches: int) -> dict[str, Any]:
    """The figures of one table, as plain data."""
    ran = [row for row in rows if row.times]
    fastest = min([row for row in ran if row.is_peer] or ran, key=lambda row: row.step)
    alone = next(row for row in ran if row.name == ALONE)
    made: list[dict[str, Any]] = []
    for row in rows:
        if not row.times:
            made.append({"name": row.name, "problem": row.problem})
            continue
        figures = {
            "name": row.name,
            "step": row.step,
            "ratio": median(ratios(row.times, fastest.times)),
            "to_fastest": spread(ratios(row.times, fastest.times)),
            "of_limit": spread(ratios(row.limits, row.times)) if row.limits else "",
            "speedup": median(ratios(alone.times, row.times)),
            "ops": row.ops,
            **(overhead(row, alone, stages) if row.more_times and row is not alone else {}),
            "memory": row.memory,
            "activations": [held for held, _ in row.activations],
            "times": row.times,
            "limits": row.limits,
            "others": row.others,
        }
        made.append(figures)
    return {"stack": stack, "stages": stages, "microbatches": microbatches, "fastest": fastest.name, "rows": made}


def overhead(row: Row, alone: Row, stages: int) -> dict[str, float]:
    """Seconds beyond a rank's share of the work, which one process does without a pipeline.

    Of an op: by how much longer a step of more microbatches takes. Of a step: what is left.
    """
    work = (median(alone.more_times) - alone.step) / stages
    each = (median(row.more_times) - row.step - work) / (row.more_ops - row.ops)
    return {"overhead_op": each, "overhead_step": row.step - alone.step / stages - each * row.ops}


def show(result: dict[str, Any]) -> None:
    """Print a table."""
    title = f"{result['stack']} stack, {result['stages']} stages, {result['microbatches']} microbatches"
    shares = [share for row in result["rows"] for share in row.get("others", ())]
    if median(shares) > DISTURBED:
        title += f" (others took {median(shares):.0%} of the machine meanwhile: wait, or give --patience)"
    table = Table(title=title, title_justify="left", caption=f"ratio to {result['fastest']}", caption_justify="left")
    table.add_column("")
    tiny = any("overhead_op" in row for row in result["rows"])
    last = ("overhead, us/op", "and us/step") if tiny else ("memory, MiB", "activations held")
    for head in ("step, ms", "ratio", "of the limit", "speedup", *last):
        table.add_column(head, justify="right")
    for row in result["rows"]:
        if "problem" in row:
            table.add_row(row["name"], row["problem"])
            continue
        cells = {
            "op": f"{1e6 * row['overhead_op']:.0f}" if "overhead_op" in row else "",
            "step": f"{1e6 * row['overhead_step']:.0f}" if "overhead_op" in row else "",
            "memory": " ".join(f"{grown:.0f}" for grown in row["memory"]),
            "activations": " ".join(f"{held:g}" for held in row["activations"]),
        }
        table.add_row(
            row["name"],
            f"{1e3 * row['step']:.2f}",
            row["to_fastest"],
            row["of_limit"],
            f"{row['speedup']:.2f}",
            *(cells[key] for key in (("op", "step") if tiny else ("memory", "activations"))),
        )
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
