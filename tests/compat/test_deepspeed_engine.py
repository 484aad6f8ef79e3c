"""compat/deepspeed/engine.py: DeepSpeed's members, and gradients of several backward passes against plain PyTorch."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import triax
import triax.compat.deepspeed as deepspeed
from triax.base.errors import ConfigError

from support.module_training import CLIP, MICRO, config, groups, microbatch, net


def passes(stage: int, accumulation: int, way: str, folder: str = "") -> None:
    """Train with two backward passes before each ``step``, and compare gradients and weights with torch's own loop."""
    model = net()
    settings = config("SGD", accumulation, stage)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups(model), config=settings)
    reference = net()
    optimizer = torch.optim.SGD(groups(reference), lr=0.05, momentum=0.9)
    for step in range(2):
        optimizer.zero_grad()
        for index in range(2 * accumulation):
            x, y = microbatch(step, index, engine.global_rank)
            if way == "engine":
                engine.backward((engine(x, times=0.9) - y).square().mean())
            else:  # the module itself is called, as the GAN of DeepSpeed's examples does
                (engine.module(x, times=0.9) - y).square().mean().backward()
            for replica in range(engine.dp_world_size):
                x, y = microbatch(step, index, replica)
                ((reference(x, times=0.9) - y).square().mean() / accumulation / engine.dp_world_size).backward()
            if index % 2:
                engine.step()
                assert engine.was_step_applied() == (index + 1 == 2 * accumulation)
        wanted = {n: p for n, p in reference.named_parameters() if p.grad is not None}
        nn.utils.clip_grad_norm_(wanted.values(), CLIP)
        gradients = engine.gather("gradients")
        for name, parameter in wanted.items():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-12)
        optimizer.step()
    weights = engine.module_state_dict(prefix="m.")
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(weights["m." + name], parameter, rtol=1e-10, atol=1e-12)
    if folder:
        engine.save_16bit_model(folder)
        if engine.global_rank == 0:
            saved = torch.load(Path(folder) / "pytorch_model.bin", weights_only=True)
            assert all(torch.equal(saved[name], weights["m." + name]) for name in saved) and len(saved) == len(weights)


def all_passes(cases: list[tuple[int, int, str]], folder: str) -> None:
    for case in cases:
        passes(*case, folder=folder)


def saved_by_the_time_of_day(folder: str) -> list[str]:
    engine, *_ = deepspeed.initialize(model=net(), config=config())
    assert engine.save_checkpoint(Path(folder) / f"run.at.{engine.global_rank}", "t")
    return sorted(path.name for path in Path(folder).iterdir())


def test_all_ranks_save_into_the_folder_of_rank_0(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, saved_by_the_time_of_day, str(tmp_path)) == [["run.at.0"], ["run.at.0"]]
    engine, *_ = deepspeed.initialize(model=net(), config=config())
    assert engine.load_checkpoint(tmp_path / "run.at.0")[0] is not None


def saved_as_deepspeed_chat_does(folder: str) -> bool:
    """Rank 0 saves ``state_dict()`` of a model in stage 3, and then the gathered weights over it."""
    engine, *_ = deepspeed.initialize(model=net(), config=config(stage=3))
    whole = engine.module_state_dict()
    if engine.global_rank == 0:
        torch.save(engine.module.state_dict(), Path(folder) / "model.bin")
        saved = torch.load(Path(folder) / "model.bin", weights_only=True)
        assert saved.keys() == whole.keys()
        empty = {name for name, value in saved.items() if value.numel() == 0}
        assert empty == {name for name, p in engine.module.named_parameters() if p.isnan().any()} != set()
        assert all(torch.equal(saved[name], whole[name]) for name in saved.keys() - empty)
    gathered = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter):
            gathered[name] = parameter.detach().clone()
    return all(torch.equal(gathered[name], whole[name]) for name in gathered)


def test_released_weights_are_empty_in_a_state_dict(ranks: Any, tmp_path: Path) -> None:
    assert all(ranks(2, saved_as_deepspeed_chat_does, str(tmp_path)))


CASES = [(stage, accumulation, way) for stage in range(4) for accumulation in (1, 2) for way in ("engine", "module")]


def test_several_backward_passes_before_a_step_add_up(ranks: Any, tmp_path: Path) -> None:
    ranks(2, all_passes, [(0, 1, "module"), (1, 1, "engine"), (2, 1, "engine"), (3, 2, "module")], str(tmp_path))


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [1, 2, 4])
def test_several_backward_passes_add_up_in_every_case(ranks: Any, size: int, tmp_path: Path) -> None:
    ranks(size, all_passes, CASES, str(tmp_path))


def unmanaged(stage: int, op: str) -> None:
    """Train with another number of backward passes in each step, and compare gradients and weights with torch's."""
    model, accumulation = net(), 2
    settings = {**config("SGD", accumulation, stage), "managed_gradient_accumulation": False}
    settings["gradient_allreduce_op"] = op
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups(model), config=settings)
    assert not engine.managed_gradient_accumulation()
    reference = net()
    optimizer = torch.optim.SGD(groups(reference), lr=0.05, momentum=0.9)
    divisor, samples = accumulation * (engine.dp_world_size if op == "mean" else 1), 0
    for step, count in enumerate((3, 1, 2)):
        optimizer.zero_grad()
        for index in range(count):
            x, y = microbatch(step, index, engine.global_rank)
            engine.backward((engine(x, times=0.9) - y).square().mean())
            for replica in range(engine.dp_world_size):
                x, y = microbatch(step, index, replica)
                ((reference(x, times=0.9) - y).square().mean() / divisor).backward()
        engine.step()
        samples += count * MICRO * engine.dp_world_size
        assert engine.was_step_applied() and engine.global_samples == samples
        wanted = {n: p for n, p in reference.named_parameters() if p.grad is not None}
        norm = nn.utils.clip_grad_norm_(wanted.values(), CLIP)
        assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-10)
        gradients = engine.gather("gradients")
        for name, parameter in wanted.items():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-12)
        optimizer.step()
    weights = engine.module_state_dict()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(weights[name], parameter, rtol=1e-10, atol=1e-12)
    with pytest.raises(AssertionError, match="set_gradient_accumulation_boundary"):
        engine.set_gradient_accumulation_boundary(True)


def test_steps_of_any_number_of_backward_passes_equal_torch(ranks: Any) -> None:
    ranks(2, unmanaged, 1, "sum")
    ranks(2, unmanaged, 3, "mean")


def in_no_sync(stage: int) -> None:
    """Read this replica's own gradients in ``no_sync``, and the mean over the replicas after it."""
    model, reference = net(), net()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups(model), config=config("SGD", 2, stage))
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with engine.no_sync():
        x, y = microbatch(0, 0, engine.global_rank)
        engine.backward((engine(x, times=0.9) - y).square().mean())
        ((reference(x, times=0.9) - y).square().mean() / 2).backward()
        for name, parameter in parameters.items():
            wanted, found = reference.get_parameter(name).grad, deepspeed.utils.safe_get_full_grad(parameter)
            assert (found is None) == (wanted is None)
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    engine.step()
    x, y = microbatch(0, 1, engine.global_rank)
    engine.backward((engine(x, times=0.9) - y).square().mean())
    reference.zero_grad()
    for index, replica in ((i, r) for i in range(2) for r in range(2)):
        x, y = microbatch(0, index, replica)
        ((reference(x, times=0.9) - y).square().mean() / 4).backward()
    for name, parameter in parameters.items():
        if (wanted := reference.get_parameter(name).grad) is not None:
            found = deepspeed.utils.safe_get_full_grad(parameter)
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_gradients_in_no_sync_are_the_replicas_own(ranks: Any) -> None:
    ranks(2, in_no_sync, 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("op", ["mean", "sum"])
def test_steps_of_any_number_of_backward_passes_in_each_stage(ranks: Any, stage: int, op: str) -> None:
    ranks(2, unmanaged, stage, op)


def test_the_module_may_be_zeroed_copied_and_called() -> None:
    """The generator's pass leaves gradients in the discriminator, which ``netD.zero_grad()`` discards."""
    model = net()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups(model), config=config(stage=1))
    x, y = microbatch(0, 0, 0)
    (model(x) - 3 * y).square().mean().backward()
    model.zero_grad()
    engine.backward((engine(x) - y).square().mean())
    engine.step()
    reference = net()
    (reference(x) - y).square().mean().backward()
    nn.utils.clip_grad_norm_([p for p in reference.parameters() if p.requires_grad], CLIP)
    gradients = engine.gather("gradients")
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-12)
    other = copy.deepcopy(model)
    other.zero_grad()
    assert torch.equal(other(x), model(x)) and other.enter.weight is not model.enter.weight


def test_an_unknown_outermost_key_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """As in DeepSpeed; a key like a known one, or one of another section, is an error."""
    engine, *_ = deepspeed.initialize(model=net(), config={**config(), "my_company": {"run": 3}, "_note": "a comment"})
    assert [record.message for record in caplog.records if "my_company" in record.message] == [
        "the configuration's key 'my_company' has no effect: neither DeepSpeed nor triax knows it, or a key like it"
    ]
    assert "_note" not in caplog.text and not hasattr(engine.config, "my_company")
    assert deepspeed.DeepSpeedConfig({**config(), "my_company": 1}).train_batch_size == engine.batch.train
    for key, text in (
        ("gradient_cliping", "did you mean 'gradient_clipping'"),
        ("reduce_bucket_size", "no 'reduce_bucket_size' here, but in zero_optimization: write it there"),
    ):
        with pytest.raises(deepspeed.DeepSpeedConfigError, match=text):
            deepspeed.initialize(model=net(), config={**config(), key: 1})
    with pytest.raises(ConfigError, match="there is no 'my_company'"):  # triax's own configuration has no such key
        triax.initialize(model=net(), config={**config(), "my_company": 1})


class Counting(torch.optim.Optimizer):
    """SGD that counts its steps in a number and in a tensor of one element; ``rows`` of a third shape if asked for."""

    def __init__(self, params: Any, lr: float = 0.1, rows: bool = False) -> None:
        super().__init__(params, {"lr": lr, "rows": rows})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in (each for each in group["params"] if each.grad is not None):
                state = self.state[parameter]
                state.setdefault("number", 0)
                state.setdefault("tensor", torch.zeros(1))
                if group["rows"]:
                    state["rows"] = torch.zeros(2, 3)
                state["number"] += 1
                state["tensor"] += 1
                parameter.sub_(parameter.grad, alpha=group["lr"])


@pytest.mark.parametrize("stage", [0, 2])
def test_optimizer_state_of_other_shapes_needs_stage_0(stage: int, tmp_path: Path) -> None:
    def trained(rows: bool = False) -> Any:
        model, settings = net(), {"train_batch_size": 4, "zero_optimization": {"stage": stage}}
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=Counting(model.parameters(), rows=rows), config=settings
        )
        for step in range(2):
            x, y = microbatch(step, 0, 0)
            engine.backward((engine(x, times=0.9) - y).square().mean())
            engine.step()
        return engine

    engine, other = trained(), trained()
    engine.save_checkpoint(tmp_path)
    other.optimizer.optimizer.state.clear()
    other.load_checkpoint(tmp_path)
    states = other.optimizer.optimizer.state.values()
    assert len(states) > 0
    for state in states:
        assert state["number"] == 2 and torch.equal(state["tensor"], torch.full((1,), 2.0))
    if stage == 0:  # whole tensors are stepped and saved
        assert trained(rows=True).save_checkpoint(tmp_path / "rows")
        return
    with pytest.raises(ConfigError, match=r"Counting .* keeps 'rows' of shape \[2, 3\] .*: set stage 0"):
        trained(rows=True)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.register_buffer("inv_freq", torch.ones(4))


@pytest.mark.parametrize(("wanted", "found"), [(None, torch.float32), ("bf16", torch.bfloat16)])
def test_buffer_dtype_and_leaf_modules_follow_the_configuration(
    wanted: str | None, found: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("triax"), "level", logging.WARNING)
    model = Parts()
    zero = {"stage": 3, "leaf_module": {"classes": "Sequential", "names": ["part"]}}
    data_types = {} if wanted is None else {"buffer_dtype": wanted}
    settings: dict[str, Any] = {"train_batch_size": 4, "bf16": {"enabled": True}, "log_level": "ERROR"}
    settings |= {"data_types": data_types, "zero_optimization": zero}
    deepspeed.initialize(model=model, config={**settings, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
    assert model.inv_freq.dtype == found
    assert deepspeed.utils.logging.logger.level == logging.ERROR
    assert deepspeed.utils.get_z3_leaf_modules(model) == [model.part]
    zero["leaf_module"] = {"name_suffixes": "absent"}
    with pytest.raises(ValueError, match="no module named absent"):
        deepspeed.initialize(model=Parts(), config=settings)


def twice() -> None:
    model = net()
    settings = config("SGD", 1, 3)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups(model), config=settings)
    with pytest.raises(ValueError, match=r"is released by stage 3 of another engine .* engine.module_state_dict\(\)"):
        deepspeed.initialize(model=model, model_parameters=groups(model), config=settings)
    again = net()
    again.load_state_dict(engine.module_state_dict())
    deepspeed.initialize(model=again, model_parameters=groups(again), config=settings)


def test_a_module_of_another_engine_in_stage_3_is_refused(ranks: Any) -> None:
    ranks(2, twice)


def small() -> tuple[list[bool], list[bool]]:
    """Which parameters are marked as whole in stage 3 by default, and which can be read."""
    sizes = [nn.Linear(300, 300, bias=False), nn.Linear(300, 400, bias=False)]  # 90,000 and 120,000 elements
    model = nn.Sequential(*sizes)
    settings = {"train_batch_size": 2, "zero_optimization": {"stage": 3}, "optimizer": {"type": "SGD"}}
    deepspeed.initialize(model=model, config=settings)
    marks: list[Any] = [*model.parameters()]
    return [each.ds_persist for each in marks], [not each.isnan().any() for each in marks]


def decays() -> list[float]:
    """Weight decay of AdamW where the configuration has none, one, and asks for torch's class."""
    found = []
    for params in ({}, {"weight_decay": 0.1}, {"torch_adam": True}):
        settings = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": params}}
        engine, *_ = deepspeed.initialize(model=nn.Linear(2, 2), config=settings)
        found.append(engine.optimizer.param_groups[0]["weight_decay"])
    return found


def test_the_default_weight_decay_of_adamw_is_deepspeeds(ranks: Any) -> None:
    """DeepSpeed's fused AdamW has a default of 0, torch's one of 0.01."""
    assert ranks(1, decays) == [[0.0, 0.1, 0.01]]


def test_small_parameters_stay_whole_in_stage_3(ranks: Any) -> None:
    assert ranks(2, small) == [([True, False], [True, False])] * 2


def test_saving_weights_checks_its_arguments_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    engine = deepspeed.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 1})[0]
    with pytest.raises(ConfigError, match="is a URI, but this is written to a local folder"):
        engine.save_16bit_model("memory://run")
    with pytest.raises(ConfigError, match="exclude_frozen_parameters"):
        engine.save_16bit_model(tmp_path, exclude_frozen_parameters=3)
    assert not list(tmp_path.iterdir())
