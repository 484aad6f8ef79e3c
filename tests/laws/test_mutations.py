"""Whatever `verify` accepts runs to the end with the right gradients: random changes of schedules, run for real."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, PipelineModule, Schedule, make_schedule, verify
from triax.pipe.program.deadlock import ScheduleError
from triax.pipe.program.ops import Op

from support.toys import summed_loss

WIDTH, MICROBATCHES = 4, 5
BASES = [("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("interleaved", 2), ("zb-v", 2), ("v-min", 2)]


def mutate(schedule: Schedule, random_: random.Random) -> Schedule:
    """Some ops swapped with a near one, a whole backward split or two halves joined."""
    orders = [list(order) for order in schedule.orders]
    for _ in range(random_.randint(1, 6)):
        order = random_.choice(orders)
        at = random_.randrange(len(order) - 1)
        other = min(len(order) - 1, at + random_.randint(1, 3))
        if random_.random() < 0.3 and order[at].kind == "B":
            _, stage, mb = order[at]
            order[at] = Op("I", stage, mb)
            order.insert(random_.randint(at + 1, len(order)), Op("W", stage, mb))
        else:
            order[at], order[other] = order[other], order[at]
    s = schedule
    return Schedule("mutant", s.pipe, s.microbatches, s.chunks, s.placement, tuple(map(tuple, orders)))


def accepted(count: int, seed: int) -> list[Schedule]:
    """Mutants that `verify` accepts, and that differ from what they came from."""
    random_ = random.Random(seed)
    found: list[Schedule] = []
    rejected = 0
    while len(found) < count:
        name, chunks = BASES[len(found) % len(BASES)]
        base = make_schedule(name, 2, MICROBATCHES, chunks)
        mutant = mutate(base, random_)
        if mutant.orders == base.orders:
            continue
        try:
            verify(mutant)
            found.append(mutant)
        except ScheduleError:
            rejected += 1
    assert rejected, "mutations that break nothing prove nothing"
    return found


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(MICROBATCHES, 2, 3, WIDTH, generator=generator, dtype=torch.float64)
    return [(a[0:1], a[1:2]) for a in x]


def module(grid: Grid, chunks: int) -> PipelineModule:
    layers: list[Any] = [LayerSpec(nn.Linear, WIDTH, WIDTH), torch.tanh] * 4
    return PipelineModule(
        layers, grid=grid, loss_fn=summed_loss, dtype=torch.float64, partition="uniform", chunks=chunks
    )


def run(schedules: list[str], folder: str) -> list[dict[str, Tensor]]:
    grid = Grid(pipe=2, timeout=30)
    found = []
    for i, text in enumerate(schedules):
        path = f"{folder}/{grid.rank}-{i}.json"
        with open(path, "w") as file:
            file.write(text)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": MICROBATCHES,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "pipeline": {"schedule": path},
            "zero_optimization": {"stage": i % 4},
        }
        engine, *_ = triax.initialize(model=module(grid, Schedule.from_json(text).chunks), config=config)
        engine.train_batch(iter(data()))
        found.append(engine.gather("gradients"))
    return found


def require_accepted_mutants_are_right(ranks: Any, count: int, seed: int, tmp_path: Any) -> None:
    model = module(Grid(), 1)
    terms = [summed_loss(model(x), y) for x, y in data()]
    (torch.stack([t for t, _ in terms]).sum() / sum(w for _, w in terms)).backward()
    wanted = {p.layout.name: p.parameter.grad for p in model.local_parameters()}
    schedules = accepted(count, seed)
    for result in ranks(2, run, [s.to_json() for s in schedules], str(tmp_path), timeout=240):
        for schedule, gradients in zip(schedules, result, strict=True):
            torch.testing.assert_close(
                gradients,
                wanted,
                rtol=1e-10,
                atol=1e-13,
                msg=lambda m, s=schedule: f"{s}\n{m}",  # type: ignore[misc]
            )


def test_mutated_schedules_that_verify_accepts_run(ranks: Any, tmp_path: Any) -> None:
    require_accepted_mutants_are_right(ranks, 36, 0, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(1, 11))
def test_many_accepted_mutants_run(ranks: Any, tmp_path: Any, seed: int) -> None:
    require_accepted_mutants_are_right(ranks, 100, seed, tmp_path)
