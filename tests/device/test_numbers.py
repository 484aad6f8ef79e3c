"""Loss, gradients and steps on the device beside the CPU's in float64, within the rounding of each dtype."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import triax

from device.jobs import CONFIG, DTYPES, SAMPLES, STEPS, Trained, furthest, gpt_engine, microbatches, train_gpt

pytestmark = pytest.mark.device


@cache
def on_the_cpu(**config: Any) -> Trained:
    """The reference: one process on the CPU in float64."""
    return train_gpt(triax.Grid(device="cpu"), "float64", **config)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_training_on_the_device_equals_the_cpu(device: torch.device, dtype: str, stage: int) -> None:
    """A first step's errors are roundings: some tens of operations lie between a weight and its gradient."""
    wanted = on_the_cpu()
    found = train_gpt(triax.Grid(device=device), dtype, zero_optimization={"stage": stage})
    rounding = DTYPES[dtype][2]
    exact = 1e-10 if dtype == "float64" else None
    assert furthest(found.initial, wanted.initial) <= (0 if dtype == "float64" else rounding)
    assert found.losses[0] == pytest.approx(wanted.losses[0], rel=exact or 8 * rounding)
    assert found.norms[0] == pytest.approx(wanted.norms[0], rel=exact or 30 * rounding)
    assert furthest(found.gradients, wanted.gradients) < (exact or 60 * rounding)
    assert found.losses == pytest.approx(wanted.losses, rel=exact or max(60 * rounding, 1e-5))
    if dtype == "float64":
        assert furthest(found.weights, wanted.weights) < 1e-10


def test_device_weights_and_dropout_masks_equal_the_cpus(device: torch.device) -> None:
    """Initial weights and dropout masks come from seeds and positions, and not from a device's generator."""
    wanted = train_gpt(triax.Grid(device="cpu"), "float64", dropout=0.2)
    found = train_gpt(triax.Grid(device=device), "float64", dropout=0.2)
    assert all(torch.equal(found.initial[name], tensor) for name, tensor in wanted.initial.items())
    assert found.losses == pytest.approx(wanted.losses, rel=1e-10)


def test_a_plain_module_trains_as_on_the_cpu(device: torch.device) -> None:
    def trained(where: torch.device, dtype: torch.dtype) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)).to(dtype)
        config = {**CONFIG, "train_micro_batch_size_per_gpu": SAMPLES, "zero_optimization": {"stage": 2}}
        engine = triax.initialize(model=model, config=config, grid=triax.Grid(device=where))[0]
        generator, losses = torch.Generator().manual_seed(2), []
        for _ in range(STEPS):
            x, y = torch.randn(2, SAMPLES, 8, generator=generator).to(where, dtype)
            loss = nn.functional.mse_loss(engine(x), y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    assert trained(device, torch.float64) == pytest.approx(trained(torch.device("cpu"), torch.float64), rel=1e-10)


@pytest.mark.parametrize("recompute", [{"interval": 1}, {"interval": 2}, {"granularity": "selective"}])
def test_recomputed_layers_on_the_device_have_equal_gradients(device: torch.device, recompute: dict[str, Any]) -> None:
    plain = train_gpt(triax.Grid(device=device), "float64", dropout=0.2)
    found = train_gpt(triax.Grid(device=device), "float64", dropout=0.2, activation_checkpointing=recompute)
    assert furthest(found.gradients, plain.gradients) < 1e-12
    assert found.losses == pytest.approx(plain.losses, rel=1e-12)


@pytest.mark.parametrize("dtype", ["float64", "bf16"])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"zero_optimization": {"stage": 3}, "activation_checkpointing": {"interval": 1}},
        {"pipeline": {"schedule": "zb-h1"}, "dropout": 0.2},
    ],
    ids=["plain", "stage 3, recomputed", "zero-bubble"],
)
def test_compiled_layers_train_as_on_the_cpu(device: torch.device, config: dict[str, Any], dtype: str) -> None:
    """The kernels are inductor's. In bf16 it rounds once where separate kernels round several times."""
    wanted = train_gpt(triax.Grid(device="cpu"), "float64", **config)
    found = train_gpt(triax.Grid(device=device), dtype, compile=True, **config)
    rounding = DTYPES[dtype][2]
    assert found.losses[0] == pytest.approx(wanted.losses[0], rel=1e-10 if dtype == "float64" else 8 * rounding)
    assert furthest(found.gradients, wanted.gradients) < (1e-10 if dtype == "float64" else 60 * rounding)


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_fused_optimizers_step_as_on_the_cpu(device: torch.device, kind: str) -> None:
    optimizer = {"type": kind, "params": {"lr": 1e-2}}
    wanted = train_gpt(triax.Grid(device="cpu"), "float64", optimizer=optimizer)
    found = train_gpt(triax.Grid(device=device), "float64", optimizer=optimizer, zero_optimization={"stage": 1})
    assert furthest(found.weights, wanted.weights) < 1e-10


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("target", ["cpu", "device"])
def test_a_device_run_resumes_from_its_checkpoint(device: torch.device, tmp_path: Any, stage: int, target: str) -> None:
    """The optimizer's step counts go to the device with the state: fused kernels read them there."""
    there = torch.device("cpu") if target == "cpu" else device
    config: dict[str, Any] = {"zero_optimization": {"stage": stage}}
    whole = train_gpt(triax.Grid(device=device), "float64", steps=4, **config)
    engine = gpt_engine(triax.Grid(device=device), torch.float64, **config)
    data = microbatches(engine.grid)
    for _ in range(2):
        engine.train_batch(data)
    engine.save_checkpoint(tmp_path)
    resumed = gpt_engine(triax.Grid(device=there), torch.float64, **config)
    resumed.load_checkpoint(tmp_path)
    losses = [resumed.train_batch(data).item() for _ in range(2)]
    assert losses == pytest.approx(whole.losses[2:], rel=1e-10)
    assert furthest({k: v.cpu() for k, v in resumed.gather().items()}, whole.weights) < 1e-10
