"""A real step on 4 stages beside its simulation with measured costs, in one picture.

    python benchmarks/timeline.py                                  # docs/timeline.png; says how far apart they are
    python benchmarks/timeline.py --schedules zb-h1 --plot my.svg

Four ranks that compute at once need four devices, and a laptop has not as many cores. So the ranks get a stand-in
for a device each: a matrix product takes a fixed time, in which its rank waits and no core is busy, as the host
does while a GPU computes. Everything else is real: processes, messages, autograd, split backward, optimizer.

The simulation knows nothing of it but medians: of each stage's F, I and W (or B), and of each boundary's message.
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path
from typing import Any

import torch
from rounds import on_ranks
from stacks import Stack
from torch.utils._python_dispatch import TorchDispatchMode

import triax
from triax.pipe.program.draw import picture
from triax.pipe.program.measured_costs import costs_of
from triax.pipe.program.simulate import simulate
from triax.pipe.program.timeline import Timeline
from triax.pipe.schedules.registry import RECIPES

STACK = Stack(entries=8, width=32, microbatch=1, heads=2, length=16, vocabulary=32)
PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.addmm_.default,
}


class Device(TorchDispatchMode):
    """Within it a matrix product takes ``seconds``, whatever its size, and keeps no core busy."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            time.sleep(self._seconds)
        return result


def main() -> None:
    options = parse()
    shown: list[Timeline] = []
    titles: list[str] = []
    for schedule in options.schedules:
        args = (schedule, options.stages, options.microbatches, options.steps, options.milliseconds)
        steps = [*map(Timeline.from_json, on_ranks(record, *args, ranks=options.stages)[0])]
        made = triax.make_schedule(schedule, options.stages, options.microbatches, chunks(schedule))
        costs = costs_of(steps, made.placement)
        expected = simulate(made, costs).timeline
        step = sorted(steps, key=lambda timeline: timeline.makespan)[len(steps) // 2]
        print(f"{schedule}, median of {len(steps)} steps: measured {described(step)}, ", end="")
        print(f"simulated {described(expected)}: {step.makespan / expected.makespan - 1:+.1%}")
        print("  per stage, ms: " + ", ".join(f"{kind} {in_ms(getattr(costs, kind))}" for kind in ("F", "I", "W")))
        print(f"  messages, ms: {in_ms(costs.COMM)}")
        shown += [milliseconds(step), milliseconds(expected)]
        titles += [f"{schedule}, measured:", f"{schedule}, simulated with its costs:"]
    picture(shown, options.plot, titles, " ms")
    print(options.plot)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zb-v"])
    parser.add_argument("--stages", type=int, default=4, help="ranks of the pipe axis")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=9, help="measured, after two that are not")
    parser.add_argument("--milliseconds", type=float, default=4.0, help="that a matrix product takes")
    parser.add_argument("--plot", type=Path, default=Path(__file__).parents[1] / "docs" / "timeline.png")
    return parser.parse_args()


def record(schedule: str, stages: int, microbatches: int, steps: int, ms: float) -> list[str]:
    """Train on each rank, and return each step's timeline."""
    module = triax.PipelineModule(
        [triax.LayerSpec(STACK.build, index) for index in range(STACK.entries)],
        grid=triax.Grid(pipe=stages),
        loss_fn=STACK.loss,
        partition="uniform",
        chunks=chunks(schedule),
    )
    engine: Any = triax.Engine(
        module,
        batch=triax.Batch(microbatch=STACK.microbatch, microbatches=microbatches),
        optimizer=triax.Optimizer("SGD", lr=1e-3),
        schedule=schedule,
    )
    engine.record_timeline = True
    data, lines = itertools.cycle(STACK.batch(microbatches)), []
    for _ in range(2 + steps):
        with Device(ms / 1e3):
            engine.train_batch(data)
        assert engine.timeline is not None
        lines.append(engine.timeline.to_json())
    return lines[2:]


def chunks(schedule: str) -> int:
    """The fewest that the schedule accepts."""
    return next(n for n in (1, 2) if RECIPES[schedule].accepts(n))


def described(timeline: Timeline) -> str:
    return f"{1e3 * timeline.makespan:.1f} ms (bubble {timeline.bubble:.1%})"


def milliseconds(timeline: Timeline) -> Timeline:
    rows = (tuple(span._replace(start=1e3 * span.start, end=1e3 * span.end) for span in row) for row in timeline.rows)
    return Timeline(tuple(rows))


def in_ms(costs: Any) -> str:
    return " ".join(f"{1e3 * cost:.2f}" for cost in costs)


if __name__ == "__main__":
    main()
