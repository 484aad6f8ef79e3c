"""Optimizations of a step that must not change its result: autograd's own gradients, fast norms, axes of size 1."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import Grid, PipelineModule
from triax.zero import ShardedOptimizer
from triax.zero.flat import LARGE
from triax.zero.gradient_norm import clip_coefficient, clip_factor, square

from support.paths import BENCHMARKS
from support.sweeps import some

FP32 = 4 * 2**-23  # a few units in the last place of one row's norm
SIDE = int(LARGE**0.5)  # a square weight that has a bucket of its own


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("numel", [0, 1, 1023, 1024, 200_001])
def test_the_squared_norm_is_summed_in_float64(dtype: torch.dtype, numel: int) -> None:
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    wanted = flat.double().square().sum()
    assert square(flat).dtype == torch.float64
    torch.testing.assert_close(square(flat), wanted, rtol=1e-12 if dtype != torch.float32 else FP32, atol=0)


@pytest.mark.parametrize("scale", [1e-38, 1e-25, 1e-12, 1e15, 1e19, 1e30])
def test_the_norm_is_right_where_squares_overflow_fp32(scale: float) -> None:
    flat = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * scale
    torch.testing.assert_close(square(flat), flat.double().square().sum(), rtol=FP32, atol=0)
    mixed = torch.cat([flat, torch.ones(3000)])
    torch.testing.assert_close(square(mixed), mixed.double().square().sum(), rtol=FP32, atol=0)


@pytest.mark.parametrize("wrong", [torch.inf, -torch.inf, torch.nan])
def test_the_norm_of_nan_or_infinity_is_not_finite(wrong: float) -> None:
    for at in (0, 1500, 2999):
        flat = torch.zeros(3000)
        flat[at] = wrong
        assert not square(flat).isfinite()


def test_clipping_by_a_number_equals_clipping_by_a_tensor() -> None:
    for norm in (0.0, 1e-9, 0.5, 1.0, 3.0, 1e30, torch.inf):
        wanted = clip_coefficient(torch.tensor(norm, dtype=torch.float64), 0.7).item()
        assert clip_factor(norm, 0.7) == pytest.approx(wanted, rel=1e-15, abs=0)
    assert clip_factor(torch.nan, 0.7) != clip_factor(torch.nan, 0.7)


# -------------------------------------------------------------------------------------------- autograd's own gradients


class Shared(nn.Module):
    """Parameters whose gradients autograd leaves in memory that is something else too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(SIDE * SIDE)) for _ in range(2))
        self.positions = nn.Parameter(torch.randn(SIDE, SIDE))
        self.enter, self.leave = (nn.Linear(SIDE, SIDE, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        views = self.first.view(SIDE, SIDE) + self.second.view(SIDE, SIDE)  # one gradient for both
        # The gradient of the positions is read again, for what was added to them.
        y = self.positions.unsqueeze(0) + self.enter(x)[None, :SIDE]
        return self.leave(torch.tanh(y) * views)


def inputs(step: int, index: int, replica: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * index + replica)
    return torch.randn(SIDE, SIDE, generator=generator, dtype=torch.float64)


def shared() -> Shared:
    torch.manual_seed(0)
    return Shared().double()


def wanted_of(replicas: int, passes: int) -> list[dict[str, Tensor]]:
    """Expected gradients from ``autograd.grad``, because ``.grad`` adds twice to gradients that share memory."""
    model, found = shared(), []
    names, parameters = zip(*model.named_parameters(), strict=True)
    for step in range(2):
        total = [torch.zeros_like(p) for p in parameters]
        for index in range(passes):
            for replica in range(replicas):
                loss = model(inputs(step, index, replica)).square().mean() / replicas
                total = [a + b for a, b in zip(total, torch.autograd.grad(loss, parameters), strict=True)]
        found.append(dict(zip(names, total, strict=True)))
        with torch.no_grad():
            for parameter, gradient in zip(parameters, total, strict=True):
                parameter -= 0.1 * gradient
    return found


def made_of(stage: int, passes: int) -> list[dict[str, Tensor]]:
    model, grid, found = shared(), Grid(timeout=60), []
    zero: dict[str, Any] = {"stage": stage, "module": model, "backward_passes_per_step": passes}
    optimizer = ShardedOptimizer(torch.optim.SGD, model.parameters(), grid, lr=0.1, **zero)
    names = {p: n for n, p in model.named_parameters()}
    for step in range(2):
        optimizer.zero_grad()
        for index in range(passes):
            model(inputs(step, index, grid.data.rank)).square().mean().backward()
        found.append({names[p]: g.clone() for p, g in optimizer.gradients()})
        optimizer.step()
    return found


@pytest.mark.parametrize(("size", "passes"), some([(1, 1), (1, 2), (2, 1), (2, 2)], [1, 2]))
def test_gradients_that_share_memory_are_reduced_right(ranks: Any, size: int, passes: int) -> None:
    wanted = wanted_of(size, passes)
    for stage in range(4):
        for found in ranks(size, made_of, stage, passes):
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-15)


def test_a_gradient_that_fills_its_bucket_is_not_copied() -> None:
    weight = (linear := nn.Linear(SIDE, SIDE)).weight
    engine, *_ = triax.initialize(
        model=nn.Sequential(linear),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        },
        grid=Grid(),
    )
    made, left = list[int](), list[int]()
    weight.register_hook(lambda gradient: made.append(gradient.data_ptr()))
    # Torch calls hooks in the order in which they were added: the engine's has been called by then.
    weight.register_post_accumulate_grad_hook(lambda p: left.append(p.grad.data_ptr()))
    (bucket,) = [b for b in engine.data_axis.buckets if b.members[0].parameter is weight]
    for step in range(2):
        for _ in range(2):
            engine.backward(engine(torch.randn(4, SIDE)).square().mean())
            engine.step()
        assert weight.grad is not None
        assert made[-2] == left[-1] == left[-2] == bucket.owned_gradient.data_ptr() == weight.grad.data_ptr()
        assert bucket.gradients is not None and bucket.gradients.untyped_storage().nbytes() == 4 * SIDE * SIDE
        assert engine.global_steps == step + 1


def test_gather_returns_zero_gradients_before_a_backward_pass() -> None:
    model = PipelineModule([nn.Linear(SIDE, SIDE)], grid=Grid(), loss_fn=nn.MSELoss())
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = triax.initialize(model=model, config=config)
    assert all(not gradient.any() for gradient in engine.gather("gradients").values())
    plain, *_ = triax.initialize(model=nn.Linear(SIDE, SIDE), config=config, grid=Grid())
    plain.backward(plain(torch.ones(2, SIDE)).sum())
    plain.step()
    plain(torch.ones(2, SIDE))  # the next step begins
    assert all(not gradient.any() for gradient in plain.gather("gradients").values())


def test_an_unused_parameter_gets_a_gradient_of_zero() -> None:
    """A parameter that a step did not use keeps its value, with a gradient of zero and not that of the last step."""
    model = [nn.Linear(SIDE, SIDE) for _ in range(2)]
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    engine, *_ = triax.initialize(model=nn.ModuleList(model), config=config, grid=Grid())
    for used in ((0, 1), (1,)):
        before = model[0].weight.detach().clone()
        engine.backward(torch.stack([model[i](torch.ones(2, SIDE)).sum() for i in used]).sum())
        engine.step()
        assert torch.equal(before, model[0].weight) == (0 not in used)
    gradients = engine.gather("gradients")
    assert list(gradients) == list(engine.gather())
    assert not gradients["0.weight"].any() and gradients["1.weight"].all()
    assert engine.get_global_grad_norm() == pytest.approx(float(gradients["1.weight"].norm().hypot(torch.tensor(32.0))))


# --------------------------------------------------------------------------------------------------- norms, when asked


def trained(stage: int, **config: Any) -> Any:
    torch.manual_seed(1)
    model = PipelineModule([nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2)], grid=Grid(), loss_fn=nn.MSELoss())
    base: dict[str, Any] = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2}
    base |= {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "zero_optimization": {"stage": stage}}
    return triax.initialize(model=model.double(), config={**base, **config})[0]


def test_the_gradient_norm_is_computed_when_it_is_read() -> None:
    torch.manual_seed(0)
    data = repeat((torch.randn(2, 5, dtype=torch.float64), torch.randn(2, 2, dtype=torch.float64)))
    lazy, eager = trained(0), trained(0, gradient_clipping=1e9)
    assert lazy.get_global_grad_norm() is None
    for _ in range(3):
        for engine in (lazy, eager):
            engine.train_batch(data)
        assert eager.optimizer_step.norm is not None and lazy.optimizer_step.norm is None
        assert lazy.get_global_grad_norm() == pytest.approx(eager.get_global_grad_norm(), rel=1e-12)
        assert lazy.get_global_grad_norm() == lazy.optimizer_step.norm  # once

    plain, *_ = triax.initialize(
        model=nn.Linear(5, 3), config={"train_batch_size": 2, "optimizer": {"type": "SGD"}}, grid=Grid()
    )
    norms: list[float | None] = []
    for _ in range(3):
        loss = plain(torch.ones(2, 5)).square().sum()
        norms.append(plain.get_global_grad_norm())  # of the step before, whose gradients are gone
        plain.backward(loss)
        plain.step()
    assert norms[:2] == [None, None] and norms[2] is not None
    # Too late the first time that a step was behind it; from then on it is there.
    last = plain.get_global_grad_norm()
    assert last is not None and norms[2] > last > 0


def test_a_loss_changed_after_backward_is_logged_unchanged(tmp_path: Path) -> None:
    """A script may call ``dist.all_reduce(loss)`` to print the mean, and the step still uses the original loss."""
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}, "csv_monitor": monitor}
    engine, *_ = triax.initialize(model=nn.Linear(5, 3), config=config, grid=Grid())
    loss = engine(torch.ones(2, 5)).square().sum()
    wanted = loss.item()
    returned = engine.backward(loss)
    loss.data.mul_(7)
    engine.step()
    rows = (tmp_path / "run" / "Train_Samples_train_loss.csv").read_text().split()
    assert float(rows[-1].split(",")[1]) == pytest.approx(wanted) == pytest.approx(returned.item())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage_on_one_replica_equals_stage_0(stage: int) -> None:
    """One replica holds the bytes and takes the steps of stage 0 in every stage, unless something is offloaded."""
    data = repeat((torch.ones(2, 5, dtype=torch.float64), torch.ones(2, 2, dtype=torch.float64)))
    engines = [trained(0), trained(stage)]
    for engine in engines:
        for _ in range(3):
            engine.train_batch(data)
    first, second = (engine.gather() for engine in engines)
    assert all(torch.equal(first[name], second[name]) for name in first)
    held = [engine.memory_report()["held"] for engine in engines]
    assert held[0] == held[1]
    assert not any(bucket.released or bucket.transient for bucket in engines[1].data_axis.buckets)
    offloaded = trained(stage, zero_optimization={"stage": stage, "offload_optimizer": {"device": "cpu"}})
    offloaded.train_batch(data)
    if stage > 1:
        assert offloaded.memory_report()["offloaded"]["cpu"]["gradients"] > 0


# -------------------------------------------------------------------------------------------------------- the benchmark


def test_the_engine_cost_benchmark_times_each_loop() -> None:
    script = BENCHMARKS / "engine_cost.py"
    small = {"inputs": 16, "outputs": 16, "batch": 2, "microbatches": 2, "rounds": 2, "steps": 1}
    args = [
        "--json",
        "--stages",
        "0",
        "3",
        *(part for name, value in small.items() for part in (f"--{name}", str(value))),
    ]
    done = subprocess.run(
        [sys.executable, str(script), *args], capture_output=True, text=True, timeout=120, check=False
    )
    # All had trained the same weights, or it would have failed.
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    assert results.keys() == {"off", "on"}
    for rows in results.values():
        assert [row["name"] for row in rows] == ["bare loop"] + [
            f"{loop}, stage {stage}" for stage in (0, 3) for loop in ("train_batch", "plain module")
        ]
        assert all(len(row["times"]) == 2 and min(row["times"]) > 0 for row in rows)
