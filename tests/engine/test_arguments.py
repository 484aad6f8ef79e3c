"""Arguments of a wrong kind: each public function names the argument and says what to give, before anything is done."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import triax
from triax.base.errors import ConfigError

from support.toys import mean_loss

WRONG: list[Any] = [3, -1, 2.5, math.nan, "x", b"x", ["a"], object(), torch.ones(2)]
CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def layers() -> list[Any]:
    return [triax.LayerSpec(nn.Linear, 2, 2), triax.LayerSpec(nn.Linear, 2, 2)]


def require_named(name: str, call: Callable[[Any], object], values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ConfigError) as caught:
            call(value)
        text = str(caught.value)
        assert f" was given {name}=" in text and ": give " in text, (text, value)


def test_wrong_arguments_of_engine_methods_are_named(tmp_path: Path) -> None:
    """A client state of 3 ended in "'int' object is not iterable"; a tag of any object became a folder's name."""
    engine: Any = triax.initialize(model=nn.Linear(2, 2), config=CONFIG)[0]
    save, load = engine.save_checkpoint, engine.load_checkpoint
    no_dict = [value for value in [*WRONG, 0, "", [], ()] if not isinstance(value, dict)]
    require_named("client_state", lambda value: save(tmp_path, client_state=value), no_dict)
    require_named("client_state", lambda value: setattr(engine, "client_state", value), no_dict)
    for call in (save, load):
        require_named("tag", lambda value: call(tmp_path, value), [2.5, b"x", [], object(), torch.ones(2)])  # noqa: B023
    for name in ("save_latest", "exclude_frozen_parameters"):
        require_named(name, lambda value: save(tmp_path, **{name: value}), [*WRONG, None])  # noqa: B023
    for name in ("load_module_strict", "load_optimizer_states", "load_lr_scheduler_states", "load_module_only"):
        require_named(name, lambda value: load(tmp_path, **{name: value}), [*WRONG, None])  # noqa: B023
    require_named(
        "exclude_frozen_parameters",
        lambda value: engine.save_16bit_model(tmp_path, exclude_frozen_parameters=value),
        [*WRONG, None],
    )
    assert not any(tmp_path.iterdir())
    require_named("train_batch_size", engine.set_train_batch_size, [None, 0, -1, 2.5, "x", True, torch.ones(2)])
    require_named("micro", lambda value: engine.set_train_batch_size(4, value), [0, -1, 2.5, "x", True])
    require_named("compile_kwargs", lambda value: engine.compile(compile_kwargs=value), WRONG)
    require_named("value", lambda value: engine.assign(engine.module.weight, value), [None, 3, "x"])
    require_named("parameters", lambda value: engine.gathered(value).__enter__(), [None, 3, [3], "x"])
    engine.backward(engine(torch.ones(2, 2)).sum())
    require_named("max_norm", engine.clip_grad_norm_, [None, 0, -1.0, math.nan, "x", True])
    before = [each.clone() for each in engine.module.parameters()]
    assert engine.clip_grad_norm_(math.inf) > 0  # the norm alone
    engine.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True))
    require_named("is_boundary", engine.set_gradient_accumulation_boundary, [*WRONG, None])


def test_wrong_num_micro_batches_of_eval_batch_is_named() -> None:
    module = triax.PipelineModule(layers(), loss_fn=mean_loss)
    engine: Any = triax.initialize(model=module, config=CONFIG)[0]
    x, y = torch.randn(2, 2), torch.randn(2, 2)
    data = iter([(x, y)])
    for value in (0, -1, 2.5, "x"):
        require_named("num_micro_batches", lambda value: engine.eval_batch(data, num_micro_batches=value), [value])
    assert engine.eval_batch(data, num_micro_batches=1).item() == pytest.approx(mean_loss(module(x), y).item())


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("loss_fn", [3, "x", []]),
        ("output_fn", [3, "x", []]),
        ("dtype", [3, "float32", []]),
        ("chunks", [0, 2.5, "x", True]),
        ("partition", [3, 2.5, object()]),
        ("placement", [None, 3, object()]),
        ("checkpointable_layers", ["Linear", 3]),
        ("activation_checkpoint_interval", [None, -1, 2.5, math.nan, "x"]),
    ],
)
def test_wrong_arguments_of_a_pipeline_module_are_named(name: str, values: list[Any]) -> None:
    """A loss function of 3 was found in the first step."""
    require_named(name, lambda value: triax.PipelineModule(layers(), **{name: value}), values)


def test_wrong_layers_seeds_and_devices_of_a_module_are_refused() -> None:
    require_named("layers", triax.PipelineModule, [None, 3, object()])
    for seed in (math.nan, -1, "x"):
        with pytest.raises(ValueError, match=r"seed is .*: give a whole number from 0"):
            triax.PipelineModule(layers(), seed=seed)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="device='x' is not possible"):
        triax.PipelineModule(layers(), device="x")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("timeout", [None, 0, -1, math.nan, math.inf, 1e30, "x", True]),
        ("order", [3, object()]),
        ("device", ["", "x", 2.5, [], object()]),
    ],
)
def test_wrong_arguments_of_a_grid_are_named(name: str, values: list[Any]) -> None:
    """A time limit of -1 was accepted on one process."""
    require_named(name, lambda value: triax.Grid(**{name: value}), values)


def test_initialize_names_an_argument_of_a_wrong_type() -> None:
    model = nn.Linear(2, 2)
    for name in ("optimizer", "collate_fn", "grid"):
        require_named(name, lambda value: triax.initialize(model=model, config=CONFIG, **{name: value}), [3, "x", []])  # noqa: B023
    require_named(
        "model_parameters", lambda value: triax.initialize(model=model, config=CONFIG, model_parameters=value), [3, 2.5]
    )
    parameters = model.parameters()
    assert len([*parameters]) == 2
    with pytest.raises(ConfigError, match="model_parameters is empty, so nothing would be trained"):
        triax.initialize(model=model, config=CONFIG, model_parameters=parameters)
