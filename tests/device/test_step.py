"""A step on the device: waits of the host, memory by the allocator, offload, checkpoints, the timeline."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import triax

from device.jobs import furthest, gpt_engine, microbatches, train_gpt

pytestmark = pytest.mark.device


def waits(step: Callable[[], object]) -> int:
    """Return how often the host waits for the device in a step, as torch reports it."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(each.message) for each in warned)


@pytest.mark.cuda_only
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}])
def test_a_step_waits_once_for_the_device(device: torch.device, precision: dict[str, Any], stage: int) -> None:
    """Microbatches are on the device. The host reads loss, norm and overflow together: see docs/device.md."""
    engine = gpt_engine(triax.Grid(device=device), zero_optimization={"stage": stage}, **precision)
    source = microbatches(engine.grid)
    data = iter([(x.to(device), y.to(device)) for x, y in (next(source) for _ in range(16))])
    for _ in range(2):
        engine.train_batch(data)
    assert [waits(lambda: engine.train_batch(data)) for _ in range(2)] == [1, 1]


@pytest.mark.cuda_only
def test_a_step_of_a_plain_module_waits_once_for_the_device(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2},
    }
    engine = triax.initialize(model=model, config=config, grid=triax.Grid(device=device))[0]
    x = torch.randn(4, 32, device=device)

    def step() -> None:
        engine.backward(engine(x).square().mean())
        engine.step()

    step()
    step()
    assert [waits(step) for _ in range(2)] == [1, 1]


@pytest.mark.cuda_only
@pytest.mark.parametrize("stage", [0, 3])
def test_device_peak_memory_is_near_the_count(device: torch.device, stage: int) -> None:
    """Within 10 % of the report, by the allocator's own peak."""
    grid = triax.Grid(device=device)
    layers: list[Any] = [nn.Linear(2048, 2048, device=device) for _ in range(8)]
    torch.cuda.empty_cache()
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
    }
    model = triax.PipelineModule(layers, grid=grid, loss_fn=nn.functional.mse_loss)
    engine = triax.initialize(model=model, config=config)[0]
    batch = (torch.randn(16, 2048), torch.randn(16, 2048))
    data = iter(lambda: batch, None)
    engine.train_batch(data)
    engine.record_memory = True
    torch.cuda.reset_peak_memory_stats()
    engine.train_batch(data)
    counted = sum(engine.memory_report()["held"].values())
    assert counted > 8 * 2048 * 2048 * 16  # weights, gradients and two moments in fp32
    assert torch.cuda.max_memory_allocated() == pytest.approx(counted, rel=0.1)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("parameters", [False, True])
def test_offload_to_pinned_memory_changes_no_number(device: torch.device, stage: int, parameters: bool) -> None:
    if parameters and stage < 3:
        pytest.skip("only stage 3 has shards of parameters to offload")
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
    if parameters:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    plain = train_gpt(triax.Grid(device=device), "float64", zero_optimization={"stage": stage})
    found = train_gpt(triax.Grid(device=device), "float64", zero_optimization=zero)
    assert furthest(found.weights, plain.weights) < 1e-10
    assert found.losses == pytest.approx(plain.losses, rel=1e-10)


def test_async_checkpoints_have_the_weights_of_their_step(device: torch.device, tmp_path: Path) -> None:
    """The copies to pinned memory are complete before the next step changes the weights."""
    engine = gpt_engine(triax.Grid(device=device), checkpoint={"async": True})
    data = microbatches(engine.grid)
    engine.train_batch(data)
    wanted = {name: tensor.cpu().clone() for name, tensor in engine.gather().items()}
    engine.save_checkpoint(tmp_path)
    for _ in range(3):
        engine.train_batch(data)
    resumed = gpt_engine(triax.Grid(device=device))
    assert engine.wait_for_checkpoint() is None
    resumed.load_checkpoint(tmp_path, tag="global_step1")
    assert all(torch.equal(tensor.cpu(), wanted[name]) for name, tensor in resumed.gather().items())


def test_device_timelines_have_ordered_ops_of_the_device(device: torch.device) -> None:
    """Times are those at which the device reaches an op, and not those at which the host queues it."""
    engine = gpt_engine(triax.Grid(device=device), pipeline={"schedule": "zb-h1"})
    data = microbatches(engine.grid)
    engine.train_batch(data)
    engine.record_timeline = True
    engine.train_batch(data)
    assert engine.timeline is not None
    (row,) = engine.timeline.rows
    assert len(row) == 12  # F, B and W of each of four microbatches
    assert all(span.end > span.start for span in row)
    # One stream: an op begins when the one before it has ended.
    assert all(later.start >= earlier.end - 1e-6 for earlier, later in itertools.pairwise(row))


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}])
def test_recomputation_repeats_torchs_dropout_masks(device: torch.device, precision: dict[str, Any]) -> None:
    """torch's own dropout draws from the device's generator, which recomputation puts back."""

    def gradients(recompute: dict[str, Any]) -> dict[str, torch.Tensor]:
        grid = triax.Grid(device=device)
        torch.manual_seed(3)
        layers: list[Any] = [nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16)]
        model = triax.PipelineModule(layers, grid=grid, loss_fn=nn.functional.mse_loss)
        config = {
            "train_micro_batch_size_per_gpu": 8,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "seed": 4,
            **precision,
            **recompute,
        }
        engine = triax.initialize(model=model, config=config)[0]
        generator = torch.Generator().manual_seed(0)
        batch = tuple(torch.randn(2, 8, 16, generator=generator))
        engine.train_batch(iter([batch]))
        return {name: tensor.cpu() for name, tensor in engine.gather("gradients").items()}

    plain, found = gradients({}), gradients({"activation_checkpointing": {"interval": 2}})
    assert all(torch.equal(found[name], tensor) for name, tensor in plain.items())
