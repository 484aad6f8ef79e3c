"""Errors while an optimizer is made: an error of an argument names the argument, other errors are unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import triax
from triax.base.errors import ConfigError
from triax.compat.deepspeed.from_config import read_config
from triax.engine.optim.signature import trial

from support.training import small_config

GIVEN = {"lr": 1.0, "eps": 2.0}


@pytest.mark.parametrize(
    "error",
    [
        ImportError("cannot import name 'x' from partially initialized module 'torch'"),
        AttributeError("partially initialized module 'torch._inductor' has no attribute 'config'"),
        FileNotFoundError("/tmp/torchinductor"),
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: device-side assert triggered"),
        KeyboardInterrupt(),
    ],
)
def test_trial_raises_errors_of_no_argument_unchanged(error: BaseException) -> None:
    """A failed import was "optimizer.params.lr = 0.001: cannot import name ..."."""

    def fails(given: Mapping[str, Any]) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        trial("optimizer.params", GIVEN, fails)
    assert caught.value is error and not isinstance(error, ConfigError)


@pytest.mark.parametrize("error", [ImportError("half"), RuntimeError("half"), ValueError("half")])
def test_trial_blames_no_argument_for_an_error_that_does_not_repeat(error: Exception) -> None:
    left = [error]

    def fails_once(given: Mapping[str, Any]) -> None:
        if left:
            raise left.pop()

    with pytest.raises(type(error), match="half"):
        trial("optimizer.params", GIVEN, fails_once)


@pytest.mark.parametrize("error", [ValueError("too large"), RuntimeError("too large"), ZeroDivisionError("too large")])
def test_trial_names_the_argument_that_causes_an_error(error: Exception) -> None:
    def fails(given: Mapping[str, Any]) -> None:
        if "eps" in given:
            raise error

    with pytest.raises(ConfigError, match=r"optimizer\.params\.eps = 2\.0: too large") as caught:
        trial("optimizer.params", GIVEN, fails)
    assert caught.value.__cause__ is error


def test_read_config_raises_an_optimizers_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any, closure: Any = None) -> None:
        raise ImportError("No module named 'torch._something'")

    monkeypatch.setattr(torch.optim.SGD, "step", fails)
    with pytest.raises(ImportError, match=r"torch\._something"):
        read_config({"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})


def _engine(optimizer: dict[str, Any], schedule: dict[str, Any] | None = None) -> Any:
    """Return an engine by DeepSpeed's JSON."""
    config: dict[str, Any] = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": optimizer}}
    if schedule is not None:
        config["scheduler"] = {"type": "StepLR", "params": schedule}
    return triax.initialize(model=nn.Linear(2, 2), config=config)[0]


def test_an_engine_makes_its_optimizer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine also made one over one number, one below a schedule, both for the file too, and one over small
    tensors to learn its class.
    """
    made: list[torch.optim.Optimizer] = []
    init = torch.optim.Optimizer.__init__

    def counted(self: Any, *given: Any) -> None:
        made.append(self)
        init(self, *given)

    monkeypatch.setattr(torch.optim.Optimizer, "__init__", counted)
    grid = triax.Grid()
    model = triax.PipelineModule([triax.LayerSpec(nn.Linear, 2, 2)], grid, loss_fn=nn.functional.mse_loss)
    config = small_config(batch=2, scheduler={"type": "StepLR", "params": {"step_size": 2}})
    triax.initialize(model=model, config=config)
    assert [type(each).__name__ for each in made] == ["SGD"]


@pytest.mark.parametrize(
    ("optimizer", "schedule", "words"),
    [
        ({"lr": -0.1}, None, "optimizer.params.lr = -0.1: Invalid learning rate: -0.1"),
        ({"lr": 0.1, "nesterov": True}, None, "optimizer.params.nesterov = true: Nesterov momentum requires a"),
        ({"lr": 0.1, "differentiable": True}, None, "optimizer.params.differentiable is true, but steps change"),
        ({"lr": 0.1}, {"step_size": 0}, "scheduler.params.step_size = 0: give a whole number of at least 1"),
        ({"lr": 0.1}, {"step_size": 2, "last_epoch": 3}, "scheduler.params.last_epoch = 3: "),
    ],
)
def test_wrong_optimizer_and_scheduler_arguments_are_named(
    optimizer: dict[str, Any], schedule: dict[str, Any] | None, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        _engine(optimizer, schedule)
    assert str(caught.value).startswith(words)
