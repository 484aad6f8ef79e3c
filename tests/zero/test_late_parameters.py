"""Parameters that are frozen or without a gradient in some steps: their step counts do not grow, as in torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import Grid
from triax.zero import ShardedOptimizer, gathered

from support.foreign_optimizers import CountsInGroup, Foreign
from support.training import small_config

WIDTH, STEPS = 5, 8
DECAY = {"weight_decay": 0.5}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "ASGD", "Rprop")},
    "Adagrad": {"lr_decay": 0.3},
    "SGD": {"momentum": 0.9, "dampening": 0.5, **DECAY},
    "SGD with plain momentum": {"momentum": 0.9, **DECAY},
    "RMSprop": DECAY,
    "Adadelta": DECAY,
}
PLACES: list[dict[str, Any]] = [
    *({"stage": stage, "stage3_param_persistence_threshold": 0} for stage in range(4)),
    {"stage": 2, "offload_optimizer": {"device": "cpu"}, "sub_group_size": 10},  # which end within parameters
]


class Thawing(nn.Module):
    """A model whose first layer is frozen in the first steps, and whose branch is left out in others."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.branch, self.leave = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor, branches: bool) -> Tensor:
        x = torch.tanh(self.enter(x))
        x = self.blocks[0](x) + (self.branch(x) if branches else 0.0)
        y: Tensor = self.leave(x)
        return y


def made() -> Thawing:
    torch.manual_seed(0)
    return Thawing().double()


def prepare(model: Thawing, step: int) -> bool:
    """Freeze what is frozen in this step, and return True if the branch runs."""
    model.enter.requires_grad_(step >= 3)
    model.leave.bias.requires_grad_(step not in (2, 5))
    return step % 3 == 1


def batch(step: int, replica: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + replica), dtype=torch.float64)


def class_of(name: str) -> Any:
    return getattr(torch.optim, name.split()[0])


def options(name: str) -> dict[str, Any]:
    return {"lr": 0.01, **OPTIMIZERS[name]}


def plainly(replicas: int, name: str) -> dict[str, Tensor]:
    model = made()
    optimizer = class_of(name)(model.parameters(), **options(name))
    for step in range(STEPS):
        branches = prepare(model, step)
        optimizer.zero_grad()
        for replica in range(replicas):
            (model(batch(step, replica), branches).square().mean() / replicas).backward()
        optimizer.step()
    return dict(model.state_dict())


def engine_of(grid: Grid, place: dict[str, Any], name: str, size: int) -> triax.ModuleEngine:
    optimizer = {"type": class_of(name).__name__, "params": options(name)}
    config = small_config(optimizer, micro=4, zero={**place, "reduce_bucket_size": size})
    return triax.initialize(model=made(), config=config, grid=grid)[0]


def every_place(name: str, folder: Path | None, numbers: Sequence[int] = range(5)) -> list[dict[str, Tensor]]:
    return [trained(PLACES[number], name, folder and folder / str(number)) for number in numbers]


def trained(place: dict[str, Any], name: str, folder: Path | None) -> dict[str, Tensor]:
    """Train, and with a folder go on before steps 2 and 5 in a new engine with other buckets."""
    grid = Grid(timeout=60)
    engine = engine_of(grid, place, name, 100)
    for step in range(STEPS):
        if folder is not None and step % 3 == 2:
            engine.save_checkpoint(folder)
            engine = engine_of(grid, place, name, 40 + 50 * step)
            engine.load_checkpoint(folder)
        branches = prepare(engine.module, step)
        engine.backward(engine(batch(step, grid.data.rank), branches).square().mean())
        engine.step()
    return engine.module_state_dict()


def every_loop(name: str) -> list[dict[str, Tensor]]:
    return [looped(stage, name) for stage in range(4)]


def looped(stage: int, name: str) -> dict[str, Tensor]:
    """Train in a plain loop, with an optimizer that is saved and loaded half way."""
    grid, model = Grid(timeout=60), made()

    def optimizer_of() -> ShardedOptimizer:
        arguments: Any = {"stage": stage, "module": model, "bucket_size": 100, **options(name)}
        return ShardedOptimizer(class_of(name), model.parameters(), grid, **arguments)

    optimizer = optimizer_of()
    for step in range(STEPS):
        if step == 4:
            state = optimizer.state_dict()
            for parameter in model.parameters():
                parameter.requires_grad_(True)
            with gathered(model):
                weights = {key: value.clone() for key, value in model.state_dict().items()}
            model = made()
            optimizer = optimizer_of()
            with gathered(model, modifier_rank=0):
                model.load_state_dict(weights)
            optimizer.load_state_dict(state)
        branches = prepare(model, step)
        optimizer.zero_grad()
        model(batch(step, grid.rank), branches).square().mean().backward()
        optimizer.step()
    with gathered(model):
        return {key: value.clone() for key, value in model.state_dict().items()}


def require_equal(everywhere: list[list[dict[str, Tensor]]], wanted: dict[str, Tensor]) -> None:
    """Compare what each rank found in each stage or place."""
    for found in everywhere:
        torch.testing.assert_close(found, [wanted] * len(found), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_parameter_without_a_gradient_counts_no_step(ranks: Any, name: str) -> None:
    """In one stage, which changes from one optimizer to the next, and with offload; the sweep has all stages."""
    number = [*OPTIMIZERS].index(name)
    places = [number % 4, 4]
    require_equal(ranks(2, every_place, name, None, places), plainly(2, name))


MORE = [(1, "Adam"), (2, "NAdam"), (2, "SGD")]


@pytest.mark.parametrize(
    ("size", "name"), [(1, "SGD"), (2, "Adam"), *(pytest.param(*cell, marks=pytest.mark.exhaustive) for cell in MORE)]
)
def test_checkpoints_keep_the_step_count_of_each_parameter(ranks: Any, tmp_path: Path, size: int, name: str) -> None:
    require_equal(ranks(size, every_place, name, tmp_path), plainly(size, name))


def test_a_plain_loop_counts_the_steps_of_each_parameter(ranks: Any) -> None:
    for name in ("Adam", "SGD"):
        require_equal(ranks(2, every_loop, name), plainly(2, name))


class DecayedMomentum(Foreign):
    """An optimizer of another package, whose momentum contains the decay of the weight."""

    def update(self, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
        momentum = state.setdefault("momentum", torch.zeros_like(p))
        p.sub_(momentum.mul_(0.9).add_(g).add_(p, alpha=0.5), alpha=group["lr"])


def stepped(model: Any, step: int, replicas: range) -> Any:
    """Return the loss of some replicas' batches, with what is frozen and left out in this step."""
    branches = prepare(getattr(model, "module", model), step)
    return sum(model(batch(step, replica), branches).square().mean() for replica in replicas) / len(replicas)


def in_every_stage(kind: type[Foreign]) -> list[dict[str, Tensor]]:
    grid, found = Grid(timeout=60), []
    for stage in range(4):
        zero, batch_size = {"stage": stage}, 4 * grid.size
        engine = triax.Engine(made(), grid=grid, optimizer=kind, zero=zero, batch=batch_size)
        for step in range(STEPS):
            engine.backward(stepped(engine, step, range(grid.rank, grid.rank + 1)))
            engine.step()
        found.append(engine.gather())
    return found


@pytest.mark.parametrize("kind", [DecayedMomentum, CountsInGroup])
def test_optimizers_of_other_packages_leave_parameters_out(ranks: Any, kind: type[Foreign]) -> None:
    """Decay makes no momentum before the first gradient, and what a group counts counts once a step."""
    model = made()
    optimizer = kind(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        stepped(model, step, range(2)).backward()
        optimizer.step()
    require_equal(ranks(2, in_every_stage, kind), dict(model.state_dict()))


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [1, 2, 4])
def test_step_counts_are_right_on_1_and_4_ranks(ranks: Any, tmp_path: Path, size: int) -> None:
    for name in OPTIMIZERS:
        require_equal(ranks(size, every_place, name, tmp_path / name), plainly(size, name))
