"""Learning-rate schedules: each against its formula, step by step, and through the engine."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import LayerSpec, PipelineModule
from triax.base.errors import ConfigError
from triax.compat.deepspeed import lr_schedules
from triax.compat.deepspeed.from_config import read_config
from triax.engine.optim import schedulers

STEPS = 1000
OWN = (3e-3, 1e-4)  # the optimizer's rates of its two groups


def optimizer(**options: Any) -> torch.optim.AdamW:
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in OWN]
    return torch.optim.AdamW(groups, **options)


def run(name: str, params: dict[str, Any], steps: int = STEPS) -> list[list[float]]:
    """Learning rates of each group at the steps 0, 1, ... of an optimizer."""
    over = optimizer()
    schedule = schedulers.make_scheduler(name, params)(over)
    over.step()  # once, for torch, which warns of schedules that step before their optimizer
    found = []
    for _ in range(steps):
        found.append([group["lr"] for group in over.param_groups])
        schedule.step()
        assert schedule.get_last_lr() == [group["lr"] for group in over.param_groups]
    return found


# ------------------------------------------------------------------------------------ formulas, of the step's number n


def warmup(n: int, steps: int, linear: bool) -> float:
    """Steps 0 and 1 have none of it: the first schedule step comes after the first optimizer step."""
    done = max(0, n - 1)
    return done / steps if linear else math.log1p(done) / math.log(steps)


def constant(n: int, low: float, high: float, steps: int, linear: bool) -> float:
    return high if n > steps else low + (high - low) * warmup(n, steps, linear)


def decay(n: int, low: float, high: float, steps: int, total: int, linear: bool) -> float:
    if n <= steps:
        return low + (high - low) * warmup(n, steps, linear)
    return low + (high - low) * max(0, total + 1 - n) / max(1, total - steps)


def cosine(n: int, base: float, first: float, steps: int, last: float, total: int, linear: bool) -> float:
    if n == 0:
        return 0.0
    if n <= steps:
        return base * (first * (1 - warmup(n, steps, linear)) + warmup(n, steps, linear))
    angle = math.pi * min(1.0, (n - steps) / max(1, total - steps))
    return base * (last + (1 - last) * math.cos(angle / 2) ** 2)


def growing(n: int, low: float, size: int, rate: float, stairs: bool) -> float:
    return low + low * rate * (math.floor(n / size) if stairs else n / size)


def cycle(
    n: int, low: float, high: float, up: int, down: int, stairs: tuple[int, int], rate: float, size: int
) -> float:
    if n > up + down:
        return low / (1 + rate * (n - up - down) / size) if size else low
    rises = n <= up
    height = n / up if rises else 1 - (n - up) / down
    count = stairs[0] if rises else stairs[1]
    if count:
        height = math.floor(height * count + 1e-9) / count
    return low + height * (high - low)


CASES: list[tuple[str, dict[str, Any], Callable[[int, float], float]]] = [
    ("WarmupLR", {}, lambda n, own: constant(n, 0.0, own, 1000, False)),
    ("WarmupLR", {"warmup_max_lr": "auto"}, lambda n, own: constant(n, 0.0, own, 1000, False)),
    (
        "WarmupLR",
        {"warmup_min_lr": 1e-5, "warmup_max_lr": 2e-3, "warmup_num_steps": 37, "warmup_type": "linear"},
        lambda n, own: constant(n, 1e-5, 2e-3, 37, True),
    ),
    (
        "WarmupLR",
        {"warmup_max_lr": [1e-3, 2e-3], "warmup_num_steps": 1},
        lambda n, own: constant(n, 0.0, 1e-3 if own == OWN[0] else 2e-3, 2, False),
    ),
    (
        "WarmupDecayLR",
        {"total_num_steps": 800, "warmup_num_steps": 100},
        lambda n, own: decay(n, 0.0, 1e-3, 100, 800, False),
    ),
    (
        "WarmupDecayLR",
        {"total_num_steps": 800, "warmup_num_steps": 100, "warmup_type": "linear", "warmup_min_lr": 1e-4},
        lambda n, own: decay(n, 1e-4, 1e-3, 100, 800, True),
    ),
    (
        "WarmupDecayLR",
        {"total_num_steps": 1e2, "warmup_num_steps": 0, "warmup_max_lr": 0.1},
        lambda n, own: decay(n, 0.0, 0.1, 2, 100, False),
    ),
    ("WarmupDecayLR", {"total_num_steps": 50}, lambda n, own: decay(n, 0.0, 1e-3, 1000, 50, False)),
    (
        "WarmupCosineLR",
        {"total_num_steps": 900, "warmup_num_steps": 100},
        lambda n, own: cosine(n, own, 0.0, 100, 1e-4, 900, False),
    ),
    (
        "WarmupCosineLR",
        {
            "total_num_steps": 900,
            "warmup_min_ratio": 0.1,
            "warmup_num_steps": 50,
            "cos_min_ratio": 0.01,
            "warmup_type": "linear",
        },
        lambda n, own: cosine(n, own, 0.1, 50, 0.01, 900, True),
    ),
    ("LRRangeTest", {}, lambda n, own: growing(n, 1e-3, 2000, 1.0, False)),
    (
        "LRRangeTest",
        {
            "lr_range_test_min_lr": 1e-4,
            "lr_range_test_step_size": 30,
            "lr_range_test_step_rate": 5,
            "lr_range_test_staircase": True,
        },
        lambda n, own: growing(n, 1e-4, 30, 5.0, True),
    ),
    (
        "OneCycle",
        {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2},
        lambda n, own: cycle(n, 1e-4, 1e-2, 2000, 2000, (0, 0), 0.0, 0),
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 1e-4,
            "cycle_max_lr": 1e-2,
            "cycle_first_step_size": 133,
            "cycle_second_step_size": 277,
            "decay_lr_rate": 0.3,
            "decay_step_size": 17,
        },
        lambda n, own: cycle(n, 1e-4, 1e-2, 133, 277, (0, 0), 0.3, 17),
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 1e-4,
            "cycle_max_lr": 1e-2,
            "cycle_first_step_size": 200,
            "cycle_first_stair_count": 8,
            "cycle_second_stair_count": 3,
        },
        lambda n, own: cycle(n, 1e-4, 1e-2, 200, 200, (8, 3), 0.0, 0),
    ),
]


@pytest.mark.parametrize(("name", "params", "formula"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_each_learning_rate_schedule_equals_its_formula(
    name: str, params: dict[str, Any], formula: Callable[[int, float], float]
) -> None:
    for n, rates in enumerate(run(name, params)):
        assert rates == pytest.approx([formula(n, own) for own in OWN], rel=1e-12, abs=1e-18), n


def test_one_cycle_moves_the_momentum_the_other_way() -> None:
    over = optimizer(betas=(0.9, 0.95))
    params = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_step_size": 10, "cycle_second_step_size": 30}
    schedule = schedulers.make_scheduler("OneCycle", params)(over)
    for n in range(60):
        height = cycle(n, 0.0, 1.0, 10, 30, (0, 0), 0.0, 0)
        for group in over.param_groups:
            assert group["betas"] == (pytest.approx(0.9 - 0.1 * height, rel=1e-12), 0.95), n
        over.step()
        schedule.step()
    plain = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    made = lr_schedules.OneCycle(plain, 0.1, 1.0)
    assert made.get_mom() is None and "changes no momentum, because SGD has no betas" in (made.note or "")


@pytest.mark.parametrize("case", [0, 4, 8, 10, 12])
def test_a_loaded_schedule_continues_as_the_saved_one(case: int) -> None:
    name, params, _ = CASES[case]
    over, again = optimizer(), optimizer()
    make = schedulers.make_scheduler(name, params)
    first, second = make(over), make(again)
    for _ in range(123):
        over.step()
        first.step()
    assert first.state_dict() == {"last_batch_iteration": 122}
    again.load_state_dict(over.state_dict())
    second.load_state_dict(first.state_dict())
    for _ in range(50):
        assert [g["lr"] for g in again.param_groups] == [g["lr"] for g in over.param_groups]
        assert second.get_last_lr() == first.get_last_lr()
        for each, schedule in ((over, first), (again, second)):
            each.step()
            schedule.step()
    late = make_late(name, {**params, "last_batch_iteration": 172})
    assert late == [g["lr"] for g in over.param_groups]


RECURSIVE = [("CosineAnnealingLR", {"T_max": 10}), ("ExponentialLR", {"gamma": 0.9}), ("StepLR", {"step_size": 2})]


@pytest.mark.parametrize("recursive", RECURSIVE, ids=str)
@pytest.mark.parametrize("outer", ["SequentialLR", "ChainedScheduler"])
def test_nested_schedules_resume_in_either_order_of_loading(outer: str, recursive: tuple[str, dict[str, Any]]) -> None:
    """Either state is loaded first: rates go on as in the run that was not interrupted."""
    warmup = {"type": "WarmupLR", "params": {"warmup_max_lr": 1.0, "warmup_num_steps": 3, "warmup_type": "linear"}}
    parts = {"schedulers": [warmup, {"type": recursive[0], "params": recursive[1]}]}
    make = schedulers.make_scheduler(outer, parts | ({"milestones": [3]} if outer == "SequentialLR" else {}))
    over = optimizer()
    first = make(over)
    rates = []
    for number in range(10):
        if number == 6:
            states = copy.deepcopy((over.state_dict(), first.state_dict()))
        rates.append([group["lr"] for group in over.param_groups])
        over.step()
        first.step()
    for order in (1, -1):
        again = optimizer()
        second = make(again)
        loads: list[Any] = [again.load_state_dict, second.load_state_dict]
        for load, state in [*zip(loads, states, strict=True)][::order]:
            load(state)
        for number in range(6, 10):
            assert [group["lr"] for group in again.param_groups] == pytest.approx(rates[number], rel=1e-10)
            again.step()
            second.step()


def make_late(name: str, params: dict[str, Any]) -> list[float]:
    over = optimizer()
    schedulers.make_scheduler(name, params)(over)
    return [group["lr"] for group in over.param_groups]


# ------------------------------------------------------------------------------------------------- by the configuration


@pytest.mark.parametrize(
    ("scheduler", "words"),
    [
        ({"type": "WarmupRL"}, "scheduler.type = 'WarmupRL': there is no such schedule; did you mean 'WarmupLR'?"),
        ({"type": "LambdaLR"}, "it takes a function: pass lr_scheduler="),
        ({"params": {}}, "scheduler.type is missing"),
        ({"type": "WarmupLR", "params": {"warmup_steps": 1}}, "WarmupLR has no warmup_steps; it takes warmup_min_lr"),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": -1}}, "warmup_num_steps = -1: give a whole number"),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": math.inf}}, "warmup_num_steps"),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}, 'scheduler.params.warmup_num_steps is "auto"'),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": 1.5}}, "warmup_num_steps: give a whole number, not 1.5"),
        ({"type": "WarmupLR", "params": {"warmup_type": "cubic"}}, "give 'log' or 'linear'"),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": -1}}, "warmup_max_lr = -1"),
        ({"type": "WarmupDecayLR"}, "WarmupDecayLR needs total_num_steps"),
        ({"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_max_mom": 1.5}}, "cycle_max_mom"),
        ({"type": "StepLR", "params": {"step_size": 0}}, "scheduler.params.step_size = 0"),
        ({"type": "StepLR", "params": {"step_size": "3"}}, "scheduler.params.step_size: give a whole number, not '3'"),
        ({"type": "SequentialLR", "params": {"schedulers": [{"type": "No"}], "milestones": []}}, "schedulers.0.type"),
    ],
)
def test_learning_rate_schedules_with_mistakes_are_refused(scheduler: Any, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_config({"train_batch_size": 1, "scheduler": scheduler})
    assert words in str(error.value)


OF_DEEPSPEED = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]
WITH_FUNCTIONS = {"LambdaLR", "MultiplicativeLR"}  # their arguments are functions, which no file can hold
OF_TORCH = {*torch.optim.lr_scheduler.__all__} - {"LRScheduler"} - WITH_FUNCTIONS


@pytest.mark.parametrize("name", [*OF_DEEPSPEED, *sorted(OF_TORCH)])
def test_every_schedule_of_torch_and_deepspeed_is_accepted(name: str) -> None:
    required: dict[str, Any] = {
        "WarmupDecayLR": {"total_num_steps": 10},
        "WarmupCosineLR": {"total_num_steps": 10},
        "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 1},
        "StepLR": {"step_size": 2},
        "MultiStepLR": {"milestones": [1, 2]},
        "ExponentialLR": {"gamma": 0.5},
        "CosineAnnealingLR": {"T_max": 5},
        "CosineAnnealingWarmRestarts": {"T_0": 5},
        "CyclicLR": {"base_lr": 0.1, "max_lr": 1, "cycle_momentum": False},
        "OneCycleLR": {"max_lr": 0.1, "total_steps": 10},
        "SequentialLR": {"schedulers": [{"type": "LinearLR"}, {"type": "ConstantLR"}], "milestones": [3]},
        "ChainedScheduler": {"schedulers": [{"type": "LinearLR"}, {"type": "ConstantLR"}]},
    }
    config = read_config({"train_batch_size": 1, "scheduler": {"type": name, "params": required.get(name, {})}})
    assert config.scheduler is not None and config.scheduler.type == name
    assert type(schedulers.make_scheduler(name, required.get(name, {}))(optimizer())).__name__ == name


def engine(scheduler: dict[str, Any], **more: Any) -> Any:
    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        return (outputs - labels).square().mean()

    model = PipelineModule([LayerSpec(nn.Linear, 2, 2)], loss_fn=loss, dtype=torch.float64)
    config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "scheduler": scheduler}
    return triax.initialize(model=model, config={**config, **more})[0]


def test_the_engine_steps_the_schedule_after_each_batch() -> None:
    made = engine({"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}})
    x, y = torch.ones(2, 1, 2, dtype=torch.float64)
    seen = []
    for _ in range(7):
        seen += made.get_lr()
        made.train_batch(iter([(x, y)]))
    assert seen == [0, 0, 0.125, 0.25, 0.375, 0.5, 0.5] and isinstance(made.lr_scheduler, lr_schedules.WarmupLR)


@pytest.mark.parametrize("optimizer", [True, False], ids=["", "without its state"])
def test_a_loaded_schedule_uses_the_arguments_of_its_engine(tmp_path: Path, optimizer: bool) -> None:
    """The schedule continues from the saved step. Its arguments are this engine's, from the first step on."""
    x, y = torch.ones(2, 1, 2, dtype=torch.float64)
    adam = {"optimizer": {"type": "Adam", "params": {"lr": 0.5}}}
    warmups = {"warmup_num_steps": 2, "warmup_type": "linear"}
    arguments = {"cycle_max_lr": 1.0, "cycle_first_step_size": 4}
    cases: list[tuple[str, dict[str, Any], dict[str, Any], Callable[[int], float]]] = [
        (
            "WarmupDecayLR",
            {**warmups, "total_num_steps": 5},
            {**warmups, "total_num_steps": 20, "warmup_max_lr": 0.3},
            lambda n: decay(n, 0.0, 0.3, 2, 20, True),
        ),
        (
            "OneCycle",
            {**arguments, "cycle_min_lr": 0.1},
            {**arguments, "cycle_min_lr": 0.2, "cycle_max_mom": 0.95},
            lambda n: cycle(n, 0.2, 1.0, 4, 4, (0, 0), 0.0, 0),
        ),
    ]
    for name, before, after, formula in cases:
        first, second = (engine({"type": name, "params": params}, **adam) for params in (before, after))
        for _ in range(5):
            first.train_batch(iter([(x, y)]))
        first.save_checkpoint(tmp_path / name)
        second.load_checkpoint(tmp_path / name, load_optimizer_states=optimizer)
        for n in range(5, 8):
            assert second.get_lr() == pytest.approx([formula(n)], rel=1e-12), name
            if name == "OneCycle":
                assert second.optimizer is not None
                momentum = 0.95 - 0.15 * cycle(n, 0.0, 1.0, 4, 4, (0, 0), 0.0, 0)
                assert second.optimizer.param_groups[0]["betas"] == pytest.approx((momentum, 0.999), rel=1e-12)
            second.train_batch(iter([(x, y)]))


def test_a_schedule_of_torchs_keeps_its_saved_rate(tmp_path: Path) -> None:
    """As torch's load_state_dict: the first step has the saved rate, the next one is computed from it."""
    x, y = torch.ones(2, 1, 2, dtype=torch.float64)
    first, second = (engine({"type": "ExponentialLR", "params": {"gamma": gamma}}) for gamma in (0.5, 0.1))
    first.train_batch(iter([(x, y)]))
    first.save_checkpoint(tmp_path)
    second.load_checkpoint(tmp_path)
    assert second.get_lr() == first.get_lr() == [0.25]
    for each in (first, second):
        each.train_batch(iter([(x, y)]))
    assert second.get_lr() == first.get_lr() == [0.125]


def test_reduce_lr_on_plateau_uses_the_loss_of_the_batch() -> None:
    made = engine({"type": "ReduceLROnPlateau", "params": {"patience": 1, "factor": 0.5}})
    x = torch.zeros(1, 2, dtype=torch.float64)
    rates = []
    for label in (4.0, 3.0, 5.0, 5.0, 5.0, 5.0):  # nothing better after the second
        made.train_batch(iter([(x, x + label + made.gather()["layers.0.bias"])]))
        rates += made.get_lr()
    assert rates == [0.5, 0.5, 0.5, 0.25, 0.25, 0.125]


def test_a_list_of_rates_for_another_number_of_groups_is_refused() -> None:
    with pytest.raises(ConfigError, match="warmup_min_lr has 3 values, but the optimizer has parameter groups: 2"):
        run("WarmupLR", {"warmup_min_lr": [0.1, 0.2, 0.3]})


def test_a_schedule_without_an_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="scheduler has no optimizer to set the learning rate of"):
        engine({"type": "WarmupLR"}, optimizer=None)
