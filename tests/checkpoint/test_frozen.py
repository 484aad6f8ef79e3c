"""Parameters that are frozen before ``initialize`` keep their optimizer state through the checkpoints of that run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import Grid, PipelineModule
from triax.zero import ShardedOptimizer

from support.toys import mean_loss, same

WIDTH, MICRO = 6, 4
OPTIMIZERS: list[dict[str, Any]] = [
    {"type": "AdamW", "params": {"lr": 0.05}},
    {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
]
FROZEN = 0  # the layer that is frozen in the second of three runs


def layers() -> list[nn.Module]:
    torch.manual_seed(4)
    return [nn.Linear(WIDTH, WIDTH).double() for _ in range(4)]


def batch(step: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [tuple(pair) for pair in torch.randn(MICRO, 2, 3, WIDTH, generator=generator, dtype=torch.float64)]


def made(grid: Grid, stage: int, optimizer: dict[str, Any], frozen: bool, plain: bool) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": MICRO // grid.data.size,
        "optimizer": optimizer,
        "zero_optimization": {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})},
    }
    listed = layers()
    listed[FROZEN].requires_grad_(not frozen)
    if plain:
        return triax.initialize(model=nn.Sequential(*listed), config=config, grid=grid)[0]
    return triax.initialize(model=PipelineModule(listed, grid=grid, loss_fn=mean_loss), config=config)[0]


def step_of(engine: Any, step: int) -> None:
    mine = batch(step)[engine.grid.data.rank :: engine.grid.data.size]
    if isinstance(engine, triax.PipelineEngine):
        engine.train_batch(iter(mine))
        return
    for x, y in mine:
        engine.backward(mean_loss(engine(x), y))
        engine.step()


def three_runs(sizes: tuple[int, int, int], plain: bool, folder: Path) -> dict[tuple[int, str], dict[str, Tensor]]:
    """Train all layers, then all but one (with momentum alone, whose state counts no steps), then all again.

    Returns:
        The weights after the third run, by ZeRO stage and type of optimizer.
    """
    grid, found = Grid(*sizes, timeout=60), {}
    for stage in (0, 2, 3):
        for optimizer in OPTIMIZERS if stage in (0, 3) else OPTIMIZERS[:1]:
            path = folder / f"{stage}-{optimizer['type']}"
            for run, steps in enumerate(runs(optimizer["type"])):
                engine = made(grid, stage, optimizer, run == 1, plain)
                if run:
                    engine.load_checkpoint(path, f"run{run - 1}")
                for step in steps:
                    step_of(engine, step)
                if run < 2:
                    engine.save_checkpoint(path, f"run{run}")
            found[stage, optimizer["type"]] = engine.gather()
    return found


def runs(optimizer: str) -> list[list[int]]:
    return [[0, 1], [2, 3] if optimizer == "SGD" else [], [4, 5]]


def expected(optimizer: dict[str, Any]) -> list[Tensor]:
    """Plain PyTorch: weights after the three runs."""
    model = nn.Sequential(*layers())
    cls = getattr(torch.optim, optimizer["type"])
    stepper = cls(model.parameters(), **optimizer["params"])
    for run, steps in enumerate(runs(optimizer["type"])):
        model[FROZEN].requires_grad_(run != 1)
        for step in steps:
            stepper.zero_grad()
            for x, y in batch(step):
                (mean_loss(model(x), y) / MICRO).backward()
            stepper.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("sizes", "plain"),
    [
        ((1, 1, 1), False),
        ((1, 2, 1), True),
        ((2, 1, 1), False),
        *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in [((1, 1, 1), True), ((2, 2, 1), False)]),
    ],
    ids=str,
)
def test_checkpoints_keep_optimizer_state_of_frozen_parameters(
    ranks: Any, tmp_path: Path, sizes: Any, plain: bool
) -> None:
    """Three runs, in float64: all layers are trained, then one is frozen, then all are trained again."""
    wanted = {optimizer["type"]: sort_by_name(expected(optimizer)) for optimizer in OPTIMIZERS}
    for found in ranks(math.prod(sizes), three_runs, sizes, plain, tmp_path):
        assert [*found] == [(0, "AdamW"), (0, "SGD"), (2, "AdamW"), (3, "AdamW"), (3, "SGD")]
        for (_, kind), weights in found.items():
            same([weights[name] for name in sorted(weights)], wanted[kind])


def sort_by_name(weights: list[Tensor]) -> list[Tensor]:
    """Order weights and biases of the layers as their names are sorted."""
    return [each for weight, bias in zip(weights[::2], weights[1::2], strict=True) for each in (bias, weight)]


@pytest.mark.parametrize("flags", [{"load_module_only": True}, {"load_optimizer_states": False}], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["adam", "momentum"])
def test_loading_weights_alone_keeps_state_of_frozen_parameters(
    tmp_path: Path, optimizer: dict[str, Any], flags: Any
) -> None:
    for run, steps in enumerate(runs(optimizer["type"])):
        engine = made(Grid(), 1, optimizer, run == 1, True)
        if run:
            engine.load_checkpoint(tmp_path, f"run{run - 1}")
        if run == 1:
            engine.load_checkpoint(tmp_path, "run0", **flags)
        for step in steps:
            step_of(engine, step)
        engine.save_checkpoint(tmp_path, f"run{run}")
    same([engine.gather()[name] for name in sorted(engine.gather())], sort_by_name(expected(optimizer)))


def test_a_save_can_leave_out_state_of_frozen_parameters(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = made(Grid(), 1, OPTIMIZERS[0], False, True)
    step_of(engine, 0)
    engine.save_checkpoint(tmp_path, "all")
    frozen = made(Grid(), 1, OPTIMIZERS[0], True, True)
    frozen.load_checkpoint(tmp_path, "all")
    assert "the optimizer's state of 2 parameters that are frozen here (0.bias, 0.weight) is kept, and" in caplog.text
    assert sorted(frozen.kept_state.numbers) == ["0.bias", "0.weight"]
    frozen.save_checkpoint(tmp_path, "small", exclude_frozen_parameters=True)
    index = (tmp_path / "small" / "index.json").read_text()
    assert "optimizer/exp_avg/1.weight" in index and "/0.weight" not in index
    other = made(Grid(), 1, OPTIMIZERS[0], True, True)
    other.load_checkpoint(tmp_path, "all", load_optimizer_states=False)
    assert not other.kept_state.tensors


def test_a_plain_optimizer_refuses_the_state_of_other_parameters() -> None:
    """The state is of the first layer, and the second has the same shape."""
    states, optimizers = [], []
    for frozen in range(2):
        model = nn.Sequential(*layers()[:2])
        model[frozen].requires_grad_(False)
        optimizers.append(
            ShardedOptimizer(torch.optim.AdamW, model.parameters(), Grid(), lr=0.1, stage=1, module=model)
        )
        states.append(optimizers[-1].state_dict())
    optimizers[0].load_state_dict(states[0])
    with pytest.raises(ValueError, match=r"differ from the saved ones in 4: 0\.bias, .*freeze them afterwards"):
        optimizers[1].load_state_dict(states[0])
