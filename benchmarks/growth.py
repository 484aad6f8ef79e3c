"""Growth of the host's work: seconds of CPU against layers, microbatches, pipe ranks, simulated ranks and tensors.

    python benchmarks/growth.py                      # a table; and docs/growth.png by --plot docs/growth.png
    python benchmarks/growth.py --largest 64 --json  # sizes up to 64 times the smallest

Every size of a row is 4 times the one before. The growth of a row is the exponent between its two largest sizes: 1 is
linear. What is counted is CPU time of this process, or of the processes that it starts, so other programs on the
machine disturb it little. Each number is the least of three, or the only one above two seconds.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import triax

REPEATS, LONG = 3, 2.0  # of a time; and the seconds from which on it is not repeated


def cpu(of: int = resource.RUSAGE_SELF) -> float:
    """Return the seconds of CPU that this process has used, or its children."""
    used = resource.getrusage(of)
    return used.ru_utime + used.ru_stime


def seconds(work: Callable[[], object]) -> float:
    """Return the CPU time of a call. Objects from before are frozen: Python would search them for garbage."""
    gc.freeze()
    start = cpu()
    work()
    return cpu() - start


def engine_of(layers: int, microbatches: int) -> triax.PipelineEngine:
    """Return an engine of linear layers of one weight."""
    specs = [triax.LayerSpec(nn.Linear, 1, 1, bias=False)] * layers
    model = triax.PipelineModule(specs, loss_fn=nn.functional.mse_loss)
    optimizer = triax.Optimizer("SGD", lr=0.1)
    return triax.Engine(model, optimizer=optimizer, batch=triax.Batch(size=microbatches, microbatch=1))


def step(layers: int, microbatches: int) -> float:
    """Return the time of a step, after one that makes what is made once."""
    engine, row = engine_of(layers, microbatches), torch.zeros(1, 1)
    engine.train_batch(iter([(row, row)] * microbatches))
    return seconds(lambda: engine.train_batch(iter([(row, row)] * microbatches)))


class Sum(nn.Module):
    """The sum of many weights."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.cat([*self.weights]).sum()


def tensors_of(count: int) -> float:
    """Return the time in which an engine is made for a module of many weights, and takes a step."""
    module = Sum(count)

    def work() -> None:
        engine = triax.Engine(module, optimizer=partial(torch.optim.SGD, lr=0.1), zero=1, batch=1)
        engine.backward(engine(torch.ones(1)))
        engine.step()

    return seconds(work)


def dry_run(ranks: int) -> float:
    """Return the time of a dry run of so many ranks: 4 stages, and as many replicas as remain."""
    with tempfile.TemporaryDirectory() as folder:
        given = {"model": {"preset": "bytes-tiny"}, "data": "tokens", "runs": folder, "training": {"steps": 1}}
        given |= {"grid": {"pipe": 4, "data": ranks // 4}, "batch": {"size": ranks, "microbatch": 1}}
        Path(folder, "run.json").write_text(json.dumps(given))
        words = [sys.executable, "-m", "triax.cli.main", "train", "run.json", "--dry-run", "--processes", str(ranks)]
        start = cpu(resource.RUSAGE_CHILDREN)
        subprocess.run(words, cwd=folder, check=True, capture_output=True)
        return cpu(resource.RUSAGE_CHILDREN) - start


def of_schedule(work: Callable[[triax.Schedule], object], pipe: int, microbatches: int) -> float:
    """Return the time of a function of the schedule 1f1b."""
    schedule = triax.make_schedule("1f1b", pipe, microbatches)
    return seconds(lambda: work(schedule))


# Row -> what it counts, and its sizes.
ROWS: dict[str, tuple[Callable[[int], float], Sequence[int]]] = {
    "engine made, by layers": (lambda n: seconds(lambda: engine_of(n, 4)), (8, 32, 128, 512)),
    "step, by layers": (lambda n: step(n, 4), (8, 32, 128, 512)),
    "step, by microbatches": (lambda n: step(8, n), (8, 32, 128, 512)),
    "schedule made, by microbatches": (
        lambda n: seconds(lambda: triax.make_schedule("1f1b", 8, n)),
        (8, 32, 128, 512),
    ),
    "verify, by microbatches": (partial(of_schedule, triax.verify, 8), (8, 32, 128, 512)),
    "simulate, by microbatches": (partial(of_schedule, triax.simulate, 8), (8, 32, 128, 512)),
    "verify, by pipe ranks": (lambda n: of_schedule(triax.verify, n, 64), (4, 16, 64, 256)),
    "simulate, by pipe ranks": (lambda n: of_schedule(triax.simulate, n, 64), (4, 16, 64, 256)),
    "find_schedule, by microbatches": (
        lambda n: seconds(lambda: triax.pipe.find_schedule(4, n)),
        (8, 32, 128),
    ),
    "engine and step, by tensors": (tensors_of, (1000, 4000, 16000, 64000)),
    "dry run, by ranks": (dry_run, (16, 64, 256, 1024, 4096)),
}


def measure(largest: int) -> dict[str, dict[int, float]]:
    """Return the seconds of each row, by size."""
    found: dict[str, dict[int, float]] = {}
    for name, (work, sizes) in ROWS.items():
        work(sizes[0])  # imports, and what else is made once
        found[name] = {size: least(work, size) for size in sizes if size <= largest * sizes[0]}
    return found


def least(work: Callable[[int], float], size: int) -> float:
    """Return the least time of three, or of one that is long."""
    times = [work(size)]
    while len(times) < REPEATS and max(times) < LONG:
        times.append(work(size))
    return min(times)


def growth(times: dict[int, float]) -> float:
    """Return the exponent between the two largest sizes."""
    (first, less), (last, more) = [*times.items()][-2:]
    return math.log(more / less) / math.log(last / first)


def draw(found: dict[str, dict[int, float]], path: str) -> None:
    """Draw each row as a line; a gray line is linear growth."""
    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    for number, (name, times) in enumerate(found.items()):
        color = "black" if number == 10 else f"C{number}"  # C10 is C0 again
        label = f"{name}: {growth(times):.2f}"
        axes.loglog([*times], [*times.values()], color=color, marker="osD^v"[number % 5], label=label)
    axes.loglog([64, 4096], [0.02, 1.28], color="gray", linestyle="--", label="linear: 1")
    axes.set(xlabel="layers, microbatches, ranks or tensors", ylabel="seconds of CPU")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=int, default=4096, help="largest size of a row, in its smallest")
    parser.add_argument("--plot", help="file of a picture")
    parser.add_argument("--json", action="store_true", help="one object instead of a table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(options.largest)
    if options.plot:
        draw(found, options.plot)
    if options.json:
        print(json.dumps({name: {"seconds": times, "growth": growth(times)} for name, times in found.items()}))
        return
    table = Table("", "size: ms of CPU", "growth")
    for name, times in found.items():
        table.add_row(name, ", ".join(f"{n:,}: {1e3 * t:.1f}" for n, t in times.items()), f"{growth(times):.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
