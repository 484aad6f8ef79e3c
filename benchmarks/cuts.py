"""Cuts by time beside uniform ones, by parameters and by hand: uneven models on 2 stages, one set of processes each.

    python benchmarks/cuts.py                            # a large vocabulary, a hybrid, a tower, a slow rank
    python benchmarks/cuts.py --cases tower --rounds 21

The cases "asleep" have layers that sleep instead of computing, as those of a device that the host waits for, and take
no core: other programs on the machine disturb them little.

All cuts of a model live in the same two gloo processes, one thread each, and take turns: each round runs each of them
once, beginning one further down the list than the round before. The layers are measured before in the same processes.
Quoted are medians over rounds of the slowest rank's time, optimizer included, and of its ratio to the uniform cut's in
the same round. Each cut must have computed the same gradients before it is timed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from rounds import Row, beside, on_ranks, parser, prepared, print_json, show, time_in_turn
from torch import Tensor, nn

import triax
from triax.pipe.partition import uniform

MICROBATCHES = 4
SGD = partial(torch.optim.SGD, lr=1e-4)


# ------------------------------------------------------------------------------------------------ the models


class Mixer(nn.Module):
    """Residual MLP, or attention, or a recurrence, over (B, T, width)."""

    def __init__(self, width: int, kind: str, inner: int = 0) -> None:
        super().__init__()
        self.kind, self.norm = kind, nn.LayerNorm(width)
        if kind == "mlp":
            self.body: nn.Module = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
        elif kind == "attention":
            self.body = nn.Linear(width, 3 * width)
        else:
            self.body = nn.GRU(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(self.norm(x))
        if self.kind == "attention":
            q, k, v = y.unflatten(-1, (3, 4, -1)).movedim(-3, 0).transpose(-2, -3)  # each (B, 4, T, width / 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + (y[0] if self.kind == "recurrence" else y)


class Patches(nn.Module):
    """Convolutions over images (B, 3, H, W); the last one returns tokens (B, T, width)."""

    def __init__(self, inputs: int, outputs: int, last: bool = False) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(inputs, outputs, 3, stride=2 if last else 1, padding=1), last

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.conv(x))
        return F.adaptive_avg_pool2d(y, 8).flatten(2).transpose(1, 2) if self.last else y


class Slowed(Mixer):
    """MLP that takes twice as long on the second rank, forward and backward."""

    def __init__(self, width: int, inner: int, grid: triax.Grid) -> None:
        super().__init__(width, "mlp", inner)
        self.slow = grid.rank == 1

    def forward(self, x: Tensor) -> Tensor:
        if not self.slow:
            return super().forward(x)
        again = partial(super().forward, x.detach())
        with torch.no_grad():
            again()
        y: Tensor = super().forward(_Again.apply(x, again))
        return y


class _Again(torch.autograd.Function):
    """Identity whose backward pass takes as long as two forward passes more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, again: Callable[[], Tensor]) -> Tensor:
        ctx.again = again
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with torch.no_grad():
            ctx.again()
            ctx.again()
        return gradients[0], None


class Asleep(nn.Module):
    """Linear layer that sleeps as long as it would compute elsewhere, and twice as long backward; it takes no core.

    Args:
        seconds: of the forward pass.
        slower: the second rank takes so many times longer.
    """

    def __init__(self, seconds: float, slower: float, grid: triax.Grid) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(16, 16), seconds * (slower if grid.rank == 1 else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        y: Tensor = self.linear(_Again.apply(x, partial(time.sleep, self.seconds)))
        return y


@dataclass(frozen=True)
class Case:
    """A model, its data, and the cut that one would write by hand.

    Attributes:
        layers: the list of layers.
        inputs, labels: one microbatch.
        hand: boundaries: as many blocks on each stage, less one where the head or the data's side looks heavy.
        token_loss: cross entropy of tokens; False: a mean square.
    """

    layers: list[Any]
    inputs: Tensor
    labels: Tensor
    hand: list[int]
    token_loss: bool = True

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a microbatch."""
        if self.token_loss:
            return F.cross_entropy(outputs.flatten(0, 1), labels.flatten())
        return (outputs - labels).square().mean()


def vocabulary() -> Case:
    """A head of 262,144 words, an embedding that computes nothing forward, and 10 blocks."""
    words, width = 262_144, 32
    blocks = [triax.LayerSpec(Mixer, width, "mlp", 8192) for _ in range(10)]
    ids = torch.randint(words, (1, 33), generator=torch.Generator().manual_seed(0))
    head = triax.LayerSpec(nn.Linear, width, words, bias=False)
    return Case([triax.LayerSpec(nn.Embedding, words, width), *blocks, head], ids[:, :-1], ids[:, 1:], [0, 7, 12])


def hybrid() -> Case:
    """Three kinds of layers; the slowest kind, recurrences, lies at the end."""
    kinds = ["attention", "mlp", "mlp"] * 3 + ["attention", "recurrence", "recurrence", "recurrence"]
    layers = [triax.LayerSpec(Mixer, 128, kind, 256) for kind in kinds]
    x, y = torch.randn(2, 2, 64, 128, generator=torch.Generator().manual_seed(0))
    return Case(layers, x, y, [0, 9, 13], token_loss=False)


def tower() -> Case:
    """Convolutions over images, and then 8 blocks over 64 tokens."""
    sizes = [(3, 32, False), (32, 32, False), (32, 32, False), (32, 128, True)]
    layers = [triax.LayerSpec(Patches, *each) for each in sizes]
    layers += [triax.LayerSpec(Mixer, 128, "mlp", 512) for _ in range(8)] + [triax.LayerSpec(nn.Linear, 128, 1000)]
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, 3, 32, 32, generator=generator)
    return Case(layers, images, torch.randint(1000, (2, 64), generator=generator), [0, 6, 13])


def slow_rank() -> Case:
    """12 equal blocks on two ranks; the second rank takes twice as long for each block."""
    layers = [triax.LayerSpec(Slowed, 128, 512) for _ in range(12)]
    x, y = torch.randn(2, 2, 64, 128, generator=torch.Generator().manual_seed(0))
    return Case(layers, x, y, [0, 8, 12], token_loss=False)


def asleep(milliseconds: Sequence[float], hand: int, slower: float = 1.0) -> Case:
    """Layers that sleep, for a machine on which other programs run."""
    layers = [triax.LayerSpec(Asleep, each / 1e3, slower) for each in milliseconds]
    x, y = torch.randn(2, 2, 16, generator=torch.Generator().manual_seed(0))
    return Case(layers, x, y, [0, hand, len(layers)], token_loss=False)


CASES: dict[str, Callable[[], Case]] = {
    "vocabulary, asleep": partial(asleep, [0.0, *[8.0] * 10, 40.0], 7),
    "hybrid, asleep": partial(asleep, [*[4.0, 8.0, 8.0] * 3, 4.0, 24.0, 24.0, 24.0], 9),
    "tower, asleep": partial(asleep, [30.0, 30.0, 20.0, 10.0, *[6.0] * 8, 2.0], 6),
    "slow rank, asleep": partial(asleep, [8.0] * 12, 7, 2.0),
    "vocabulary": vocabulary,
    "hybrid": hybrid,
    "tower": tower,
    "slow rank": slow_rank,
}


# ------------------------------------------------------------------------------------------- on each rank


class CutContender:
    """An engine with one cut."""

    def __init__(self, grid: triax.Grid, case: Case, cut: Any, schedule: Any) -> None:
        model = triax.PipelineModule(case.layers, grid=grid, loss_fn=case.loss, partition=cut)
        batch = triax.Batch(size=MICROBATCHES * len(case.inputs), microbatch=len(case.inputs))
        self.engine: Any = triax.Engine(model, optimizer=SGD, batch=batch, schedule=schedule)
        self.boundaries = model.boundaries
        self._batch = [(case.inputs, case.labels)] * MICROBATCHES

    def step(self) -> None:
        """Train a step."""
        self.engine.train_batch(iter(self._batch))

    def gradients(self) -> dict[str, Tensor]:
        """Return the whole model's gradients of a step."""
        self.step()
        found: dict[str, Tensor] = self.engine.gather("gradients")
        return found


@dataclass
class CutRow(Row):
    """Row of a cut.

    Attributes:
        boundaries: its boundaries.
        schedule: name of the schedule.
        simulated: seconds of the passes of a step, by the measured costs of the layers.
    """

    boundaries: tuple[int, ...] = ()
    schedule: str = "1f1b"
    simulated: float = 0.0


def measure(name: str, options: argparse.Namespace) -> list[CutRow]:
    """Time the cuts of a case."""
    grid, case = triax.Grid(pipe=2), CASES[name]()
    engine_options = triax.EngineOptions(optimizer=SGD)
    costs = triax.measure_layers(
        case.layers, (case.inputs, case.labels), grid=grid, loss_fn=case.loss, options=engine_options, repeats=9
    )
    found = [triax.find_cut(method, costs, 2, MICROBATCHES) for method in ("time", "auto")]
    cuts: dict[str, tuple[Any, Any]] = {
        "uniform": (uniform(len(case.layers), 2), "1f1b"),
        "parameters": ("parameters", "1f1b"),
        "by hand": (case.hand, "1f1b"),
    }
    cuts |= {cut.method: (list(cut.boundaries), cut.schedule) for cut in found}
    makers = [(method, partial(CutContender, grid, case, *cut)) for method, cut in cuts.items()]
    plain, running = prepared(makers, options.only)
    time_in_turn(grid, running, options)
    rows = []
    for row, (_, contender) in zip(plain, running, strict=True):
        schedule = contender.engine.program.schedule
        step = triax.simulate(schedule, costs.of_stages(contender.boundaries, schedule.placement)).makespan
        own = {key: value for key, value in vars(row).items() if key in ("name", "problem", "times")}
        rows.append(CutRow(**own, boundaries=tuple(contender.boundaries), schedule=schedule.name, simulated=step))
    return rows


# -------------------------------------------------------------------------------------- in this process


def main() -> None:
    arguments = parser(__doc__, rounds=15)
    arguments.add_argument("--cases", choices=CASES, nargs="+", default=[*CASES])
    options = arguments.parse_args()
    results = {}
    for name in options.cases:
        told = on_ranks(measure, name, options, ranks=2)[0]
        results[name] = rows = [CutRow(**row) for row in told]
        if not options.json:
            show_cuts(name, rows)
    if options.json:
        print_json(results, options=vars(options))


def show_cuts(name: str, rows: list[CutRow]) -> None:
    """Print a table of a case."""
    best = min((row for row in rows if row.name not in ("time", "auto")), key=lambda row: row.step)
    columns = {
        "boundaries": lambda row: " ".join(map(str, row.boundaries)),
        "schedule": lambda row: row.schedule,
        "simulated, ms": lambda row: f"{1e3 * row.simulated:.1f}",
        "step, ms": lambda row: f"{1e3 * median(row.times):.1f}",
        "to uniform": lambda row: beside(row.times, rows[0].times),
        "to the best of the first three": lambda row: beside(row.times, best.times),
    }
    show(f"{name}: {len(rows[0].times)} rounds", rows, columns)


if __name__ == "__main__":
    main()
