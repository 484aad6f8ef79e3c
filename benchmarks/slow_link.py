"""Steps with and without pairs of passes, on tensor ranks behind a slow link.

    python benchmarks/slow_link.py                       # 2 tensor ranks, products on the CPU's cores
    python benchmarks/slow_link.py --pipe 2 --product 2  # 2 x 2 ranks with a stand-in for a device each

The link is slowed down by hand: each collective over the tensor axis takes ``--delay`` milliseconds from its start, or
from the end of the one before if that is later, and keeps no core busy. The ranks run the executor as it is. With
``--product`` a matrix product takes that many milliseconds, in which its rank waits and no core is busy.

Contenders take turns in each round: a schedule, the same with pairs (pair_pass), and STP if it exists for the size.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from rounds import on_ranks
from rounds import parser as arguments
from timeline import Device
from torch import Tensor

import triax
from triax.base.tables import table, terminal
from triax.grid.comm.pending import Pending, started
from triax.grid.comm.transport import Transport
from triax.models.gpt import GPTConfig, GPTLoss, gpt_layers
from triax.pipe.program.ops import COMPUTE
from triax.pipe.program.pairs import pair_pass

VOCABULARY, HEADS = 512, 8


class SlowLink(Transport):
    """Transport of an axis whose all-reduces take ``seconds`` each, one after the other.

    Attributes:
        seconds: time of each all-reduce.
        count: all-reduces so far.
    """

    seconds, count, _free = 0.0, 0, 0.0

    def all_reduce(self, tensor: Tensor, op: str, async_op: bool) -> Pending:
        pending = super().all_reduce(tensor, op, True)
        self._free = max(self._free, time.perf_counter()) + self.seconds
        self.count += 1
        return started(_Late(pending, self._free), async_op)


class _Late:
    """Handle of an operation that ends at a given time at the earliest."""

    def __init__(self, pending: Pending, end: float) -> None:
        self._pending, self._end = pending, end

    def wait(self) -> None:
        self._pending.wait()
        time.sleep(max(0.0, self._end - time.perf_counter()))


def main() -> None:
    options = parse()
    results = on_ranks(measure, vars(options), ranks=options.pipe * options.tensor)
    first: dict[str, Any] = results[0]
    if options.json:
        print(json.dumps(first))
        return
    plain = first["times"][options.schedule]
    rows = []
    for name, times in first["times"].items():
        ratios = sorted(a / b for a, b in zip(times, plain, strict=True))
        rows.append(
            (
                name,
                f"{1e3 * median(times):.1f}",
                f"{median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})",
                f"{first['simulated'][name] / first['simulated'][options.schedule]:.3f}",
            )
        )
    shape = f"pipe {options.pipe}, tensor {options.tensor}, {options.microbatches} microbatches"
    spans = ", ".join(f"{kind} {1e3 * cost:.1f}" for kind, cost in first["costs"].items())
    title = f"{shape}, {options.delay:g} ms a collective; of a rank's share of a microbatch, ms: {spans}"
    terminal().print(table(("schedule", "step, ms", "to the first", "simulated"), rows, title))


def parse() -> argparse.Namespace:
    made = arguments(__doc__, ranks=False)
    made.add_argument("--pipe", type=int, default=1)
    made.add_argument("--tensor", type=int, default=2)
    made.add_argument("--microbatches", type=int, default=8)
    made.add_argument("--schedule", default="eager-1f1b")
    made.add_argument("--delay", type=float, default=4.0, help="milliseconds of a collective of the tensor axis")
    made.add_argument("--product", type=float, default=0.0, help="milliseconds of a matrix product; 0: what it takes")
    made.add_argument("--layers", type=int, default=4)
    made.add_argument("--width", type=int, default=256)
    made.add_argument("--length", type=int, default=256)
    return made.parse_args()


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the times of each contender's steps on this rank, the costs of passes, and what the simulation says."""
    options = argparse.Namespace(**settings)
    grid = triax.Grid(pipe=options.pipe, tensor=options.tensor)
    own = grid.tensor.transport
    link = grid.tensor.transport = SlowLink(own.name, own.ranks, own.rank, own.group)
    plain = triax.make_schedule(options.schedule, options.pipe, options.microbatches)
    engine = engine_of(grid, plain, options)
    # One step without the delay gives the products, its all-reduces the time of the collectives.
    engine.record_timeline = True
    link.seconds = 0.0
    for _ in range(2):
        link.count = 0
        step(engine, options)
    passes = [span for row in engine.timeline.rows for span in row if span.op.kind in COMPUTE]
    share = options.pipe * options.microbatches
    took = {
        kind: sum(span.end - span.start for span in passes if span.op.kind in kinds) / share
        for kind, kinds in (("F", "F"), ("B", "BIW"))
    }
    engine.record_timeline = False
    collectives = link.count / options.microbatches * options.delay / 1e3
    costs = triax.Costs(F=took["F"], I=took["B"] / 2, W=took["B"] / 2, AR=collectives / 2)
    paired = pair_pass(plain, costs)
    schedules = {options.schedule: plain, f"{options.schedule} with pairs": paired}
    if options.microbatches >= 3 * options.pipe - 1 and options.layers >= 2 * options.pipe:
        schedules["stp"] = triax.make_schedule("stp", options.pipe, options.microbatches)
    engines = {options.schedule: engine}
    engines |= {name: engine_of(grid, each, options) for name, each in schedules.items() if name != options.schedule}
    link.seconds = options.delay / 1e3
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _, (name, each) in itertools.product(range(1 + options.rounds), engines.items()):
        grid.world.barrier()
        begin = time.perf_counter()
        step(each, options)
        grid.world.barrier()
        times[name].append(time.perf_counter() - begin)
    simulated = {name: triax.simulate(replace(each, name=name), costs).makespan for name, each in schedules.items()}
    return {
        "times": {name: each[1:] for name, each in times.items()},
        "simulated": simulated,
        "costs": {**took, "AR": collectives / 2},
    }


def engine_of(grid: triax.Grid, schedule: triax.Schedule, options: argparse.Namespace) -> Any:
    """Return an engine of a GPT with a schedule."""
    shape = GPTConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=options.length,
        hidden_size=options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=HEADS,
    )
    engine = triax.Engine(
        triax.PipelineModule(gpt_layers(shape), grid=grid, loss_fn=GPTLoss(grid, vocab_size=VOCABULARY), seed=1),
        batch=triax.Batch(microbatch=1, microbatches=options.microbatches),
        optimizer=triax.Optimizer("SGD", lr=1e-3),
        schedule=schedule,
    )
    if options.product:
        # A mode is of one thread, and the second pass of a pair has a thread of its own.
        engine.spans.read(lambda span: Device(options.product / 1e3), *COMPUTE)
    return engine


def step(engine: Any, options: argparse.Namespace) -> None:
    """Train one step on the same tokens."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(VOCABULARY, (options.microbatches, options.length + 1), generator=generator)
    engine.train_batch(iter([(row[None, :-1], row[None, 1:]) for row in rows]))


if __name__ == "__main__":
    main()
