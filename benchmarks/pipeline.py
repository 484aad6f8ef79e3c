"""triax's pipeline beside torch's and DeepSpeed's: step time, overhead per op, memory; the same model in one run.

    python benchmarks/pipeline.py                       # 2 and then 4 stages, 8 microbatches
    python benchmarks/pipeline.py --stages 2 --rounds 15 --json

All contenders live in one set of processes on gloo, one thread each, and take turns: every round runs each of
them once, and starts one further down the list than the round before. What is quoted is the median over rounds of the
slowest rank's time, optimizer included, and its ratio to the fastest peer's (torch's schedules and DeepSpeed).
Before any of it, each must have computed the gradients of plain autograd. docs/benchmarks.md says more.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from contenders import Contender, OneProcess, Triax, contenders
from rich.console import Console
from rich.table import Table
from stacks import GPT, SMOKE, TINY

import triax
from triax.engine.launch import launch

WARM_UP = 2
STACKS = {"gpt": GPT, "tiny": TINY, "smoke": SMOKE}


@dataclass
class Row:
    """What one contender took, on one stack and so many stages."""

    name: str
    problem: str = ""  # why it did not run
    ops: int = 0  # that the busiest rank runs in a step
    times: list[float] = field(default_factory=list)  # of each round's step, in seconds: the slowest rank's
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
                code = launch(
                    measure, name, stages, options.microbatches, options.rounds, str(path), ranks=stages, threads=1
                )
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
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--stacks", choices=STACKS, nargs="+", default=["gpt", "tiny"])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="one object, with every round's times, instead of tables")
    return parser.parse_args()


# ---------------------------------------------------------------------------------------- on each rank


def measure(stack_name: str, stages: int, microbatches: int, rounds: int, path: str) -> None:
    """Time every contender; rank 0 writes the rows to ``path``."""
    stack = STACKS[stack_name]
    grid = triax.Grid(pipe=stages)
    expected = OneProcess(stack, stages, microbatches).gradients()
    rows: list[Row] = []
    running: list[tuple[Row, Contender]] = []
    for name, make in contenders(stack, stages, microbatches):
        row = Row(name)
        rows.append(row)
        try:
            contender = make()
        except ImportError as error:
            row.problem = f"{error}: pip install -e '.[bench]'"
            continue
        row.ops = contender.ops
        compare(name, contender.gradients(), expected)
        for _ in range(WARM_UP):
            contender.step()
        running.append((row, contender))

    gc.collect()
    gc.freeze()  # what exists by now is no garbage: let no contender pay for looking through the others
    turns = 1 if stack.heads else 20  # of the tiny stack, a round's turn is so many steps
    for round_ in range(rounds):
        for i in range(len(running)):
            row, contender = running[(round_ + i) % len(running)]
            row.times.append(timed(grid, contender.step, turns))
    for row, contender in running:
        row.memory = [float(grown) for grown in grid.world.all_gather_object(growth(grid, contender.step))]
        if isinstance(contender, Triax):
            row.activations = grid.world.all_gather_object(contender.activations())
            for rank, (held, simulated) in enumerate(row.activations):
                if held != simulated:
                    raise AssertionError(f"{row.name}: rank {rank} held {held} activations, simulated {simulated}")
    if grid.rank == 0:
        Path(path).write_text(json.dumps([vars(row) for row in rows]))


def compare(name: str, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """A benchmark of other numbers is worth nothing.

    Raises:
        AssertionError: a gradient is missing, or not plain autograd's.
    """
    if not found:
        raise AssertionError(f"{name} left no gradients")
    for parameter, gradient in found.items():
        message = f"{name}, {parameter}: {{}}".format
        torch.testing.assert_close(gradient, expected[parameter], rtol=1e-4, atol=1e-6, msg=message)


def timed(grid: triax.Grid, step: Callable[[], None], turns: int) -> float:
    """A step's time on the slowest rank: the mean of ``turns`` in a row."""
    grid.world.barrier()
    begin = time.perf_counter()
    for _ in range(turns):
        step()
    elapsed = torch.tensor([(time.perf_counter() - begin) / turns])
    grid.world.all_reduce(elapsed, op="max")
    return float(elapsed)


def growth(grid: triax.Grid, step: Callable[[], None]) -> float:
    """By how much the process grows in a step, in MiB, at its largest; NaN where the system does not tell.

    glibc is told to give memory back as soon as it is free. What it keeps all the same makes this a rough figure.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: larger blocks are mapped one by one
        libc.malloc_trim(0)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the largest size so far is the present one
        before = _status("VmHWM")
    except (OSError, AttributeError):
        return float("nan")
    grid.world.barrier()
    step()
    return (_status("VmHWM") - before) / 1024


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1])


# ------------------------------------------------------------------------------------- in this process


def summary(rows: list[Row], stack: str, stages: int, microbatches: int) -> dict[str, Any]:
    """The figures of one table, as plain data."""
    ran = [row for row in rows if row.times]
    fastest = min((row for row in ran if row.is_peer), key=lambda row: row.step)
    alone = next(row for row in ran if row.name == "one process")
    made: list[dict[str, Any]] = []
    for row in rows:
        if not row.times:
            made.append({"name": row.name, "problem": row.problem})
            continue
        figures = {
            "name": row.name,
            "step": row.step,
            "ratio": row.step / fastest.step,
            "speedup": alone.step / row.step,
            "ops": row.ops,
            # A rank's own share of the work, done without a pipeline, is not overhead.
            "overhead": (row.step - alone.step / stages) / row.ops if row is not alone else 0.0,
            "memory": row.memory,
            "activations": [held for held, _ in row.activations],
            "times": row.times,
        }
        made.append(figures)
    return {"stack": stack, "stages": stages, "microbatches": microbatches, "fastest": fastest.name, "rows": made}


def show(result: dict[str, Any]) -> None:
    """Print a table."""
    title = f"{result['stack']} stack, {result['stages']} stages, {result['microbatches']} microbatches"
    table = Table(title=title, title_justify="left", caption=f"ratio to {result['fastest']}", caption_justify="left")
    table.add_column("")
    for head in ("step, ms", "min to max", "ratio", "speedup", "overhead, us/op", "memory, MiB", "activations held"):
        table.add_column(head, justify="right")
    for row in result["rows"]:
        if "problem" in row:
            table.add_row(row["name"], row["problem"])
            continue
        low, high = (f"{1e3 * f(row['times']):.1f}" for f in (min, max))
        table.add_row(
            row["name"],
            f"{1e3 * row['step']:.2f}",
            f"{low} to {high}",
            f"{row['ratio']:.2f}",
            f"{row['speedup']:.2f}",
            f"{1e6 * row['overhead']:.0f}" if row["overhead"] else "",
            " ".join(f"{grown:.0f}" for grown in row["memory"]),
            " ".join(f"{held:g}" for held in row["activations"]),
        )
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
