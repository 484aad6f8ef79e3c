"""The engine's own cost: a step of triax's engines beside the bare PyTorch loop of the same model and optimizer.

    python benchmarks/engine_cost.py                   # stages 0 to 3 of ZeRO, both engines, without and with clipping
    python benchmarks/engine_cost.py --microbatches 4

One process trains one linear layer of two million parameters with AdamW. The loops take turns: every round runs each
of them for a few steps, and starts one further down the list than the round before. What is quoted is the median over
rounds of a step's time, and of its ratio to the bare loop's in the same round. Before any of it, all of them must have
trained the same weights.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from measuring import in_turn
from rounds import Row, beside, parser, print_json, show, trained_alike
from torch import Tensor, nn
from torch.nn import functional as F

import triax

BARE = "bare loop"
OPTIONS: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01}
LIMIT = 0.01  # the gradient's norm is above it: clipping acts
CHECKED = 3  # steps after which the weights are compared


@dataclass
class Shape:
    """The layer, and what a step is."""

    inputs: int
    outputs: int
    batch: int  # samples of a microbatch
    microbatches: int
    clip: bool

    def model(self) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(self.inputs, self.outputs))

    def data(self) -> list[tuple[Tensor, Tensor]]:
        torch.manual_seed(1)
        sizes = (self.batch, self.inputs), (self.batch, self.outputs)
        return [(torch.randn(sizes[0]), torch.randn(sizes[1])) for _ in range(self.microbatches)]

    def options(self, stage: int) -> triax.EngineOptions:
        return triax.EngineOptions(
            batch=triax.Batch(microbatch=self.batch, microbatches=self.microbatches),
            optimizer=triax.Optimizer("AdamW", **OPTIONS),
            zero=triax.Zero.of(stage),
            clip=LIMIT if self.clip else None,
        )


Made = tuple[Callable[[], object], Callable[[], dict[str, Tensor]]]  # a step, and the weights


def bare(shape: Shape) -> Made:
    """Plain training loop of one process without a toolkit."""
    model, data = shape.model(), shape.data()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)

    def step() -> None:
        for x, y in data:
            loss = F.mse_loss(model(x), y)
            (loss if shape.microbatches == 1 else loss / shape.microbatches).backward()
        if shape.clip:
            nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda: dict(model.state_dict())


def train_batch(shape: Shape, stage: int) -> Made:
    """A ``PipelineModule`` of one layer."""
    module = triax.PipelineModule([*shape.model()], grid=triax.Grid(), loss_fn=nn.MSELoss())
    engine: Any = triax.Engine(module, shape.options(stage))
    data = itertools.cycle(shape.data())

    def weights() -> dict[str, Tensor]:
        return {name.removeprefix("layers."): value for name, value in engine.gather().items()}

    return lambda: engine.train_batch(data), weights


def loop(shape: Shape, stage: int) -> Made:
    """A plain module, and its loop."""
    engine: Any = triax.Engine(shape.model(), shape.options(stage), grid=triax.Grid())
    data = shape.data()

    def step() -> None:
        for x, y in data:
            engine.backward(F.mse_loss(engine(x), y))
            engine.step()

    return step, engine.module_state_dict


def main() -> None:
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    results = {}
    for clip in options.clip:
        shape = Shape(options.inputs, options.outputs, options.batch, options.microbatches, clip == "on")
        results[clip] = rows = measure(shape, options)
        if not options.json:
            title = f"Linear({shape.inputs}, {shape.outputs}), {shape.microbatches} x {shape.batch} samples, "
            show_loops(f"{title}clipping {clip}, {torch.get_num_threads()} threads", rows)
    if options.json:
        print_json(results, threads=torch.get_num_threads())


def show_loops(title: str, rows: list[Row]) -> None:
    """Print a table."""
    columns: dict[str, Callable[[Row], str]] = {
        "step, ms": lambda row: f"{1e3 * row.step:.2f}",
        "ratio to the bare loop": lambda row: beside(row.times, rows[0].times),
    }
    show(title, rows, columns)


def parse() -> argparse.Namespace:
    arguments = parser(__doc__, rounds=15, ranks=False)
    arguments.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3], help="of ZeRO")
    arguments.add_argument("--inputs", type=int, default=1024)
    arguments.add_argument("--outputs", type=int, default=2048)
    arguments.add_argument("--batch", type=int, default=64, help="samples of a microbatch")
    arguments.add_argument("--microbatches", type=int, default=1, help="of a step")
    arguments.add_argument("--clip", nargs="+", choices=("off", "on"), default=["off", "on"])
    arguments.add_argument("--steps", type=int, default=10, help="of each loop in a round")
    arguments.add_argument("--threads", type=int, help="of torch's; by default its own choice")
    arguments.add_argument("--cpu", action="store_true", help="seconds of this process, where others compute too")
    return arguments.parse_args()


def measure(shape: Shape, options: argparse.Namespace) -> list[Row]:
    """Time every loop."""
    makers: dict[str, Callable[[], Made]] = {BARE: partial(bare, shape)}
    for stage in options.stages:
        makers[f"train_batch, stage {stage}"] = partial(train_batch, shape, stage)
        makers[f"plain module, stage {stage}"] = partial(loop, shape, stage)
    running = [*trained_alike(makers.items(), CHECKED, rtol=1e-5, atol=1e-6)]
    clock = time.process_time if options.cpu else time.perf_counter
    for row, step in in_turn(running, options.rounds):
        step()  # its weights come back into the caches
        begin = clock()
        for _ in range(options.steps):
            step()
        row.times.append((clock() - begin) / options.steps)
    return [row for row, _ in running]


if __name__ == "__main__":
    main()
