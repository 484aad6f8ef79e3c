"""State of gradient compression: overflows, checkpoints, plain loops, values that are not finite, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import triax
from triax import Grid
from triax.base.errors import ConfigError
from triax.compat.deepspeed.from_config import read_config
from triax.plugins.gradient_compression import PowerSGD, SparseRows, TopK
from triax.zero import ShardedOptimizer

from support.compression_references import (
    FULL,
    LR,
    POWER,
    SAMPLES,
    TOPK,
    WIDTH,
    batches,
    engine,
    total,
)


def overflowing() -> Any:
    """fp16 with a scale that overflows in the first steps, which must not change the residuals."""
    grid = Grid(timeout=60)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1))
    config = {
        "train_batch_size": 2 * grid.size,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "fp16": {"enabled": True, "loss_scale": 128.0},
        "gradient_compression": {"type": "topk", "ratio": 0.1},
    }
    made, *_ = triax.initialize(model=model, config=config)
    generator, seen = torch.Generator().manual_seed(grid.rank), []
    for step in range(4):
        x = torch.randn(2, WIDTH, generator=generator)
        loss = made(x).float().square().mean()
        made.backward(loss * 1e6 if step == 2 and grid.rank == 1 else loss)
        made.step()
        exchange: Any = made.data_axis.exchange
        seen.append((torch.cat([*exchange.state()["residual"]]).clone(), exchange.steps, made.skipped_steps))
    return seen


def test_an_overflow_changes_no_compression_residuals(ranks: Any) -> None:
    for seen in ranks(2, overflowing):
        assert [steps for _, steps, _ in seen] == [1, 2, 2, 3] and [skipped for *_, skipped in seen] == [0, 0, 1, 1]
        residuals = [residual for residual, *_ in seen]
        assert torch.equal(residuals[1], residuals[2]) and not torch.equal(residuals[0], residuals[1])
        assert all(residual.isfinite().all() and residual.any() for residual in residuals)


def resumed(shape: tuple[int, int, int], section: dict[str, Any], folder: str, load: bool, steps: int) -> Any:
    grid = Grid(*shape, timeout=60)
    adam = {"type": "AdamW", "params": {"lr": 0.01}}
    sgd = {"type": "SGD", "params": {"lr": LR}}
    made = engine(grid, {"gradient_compression": section, "optimizer": sgd if section.get("momentum") else adam})
    data = batches(grid.data.rank, grid.data.size)
    if load:
        made.load_checkpoint(folder)
        for _ in range(made.global_steps * SAMPLES // 2 // grid.data.size):
            next(data)
    sums = total(made, grid)
    losses = [float(made.train_batch(data)) for _ in range(steps)]
    if not load:
        made.save_checkpoint(folder)
        sums = total(made, grid)
        losses += [float(made.train_batch(data)) for _ in range(3)]
    return losses, made.gather(), sums, made.data_axis.exchange.steps  # type: ignore[union-attr]


@pytest.mark.parametrize("section", [FULL, POWER], ids=["dgc", "powersgd"])
def test_compressed_training_resumes_bitwise_and_keeps_residuals(
    ranks: Any, tmp_path: Path, section: dict[str, Any]
) -> None:
    folder = str(tmp_path)
    before = ranks(4, resumed, (2, 2, 1), section, folder, False, 4)
    after = ranks(4, resumed, (2, 2, 1), section, folder, True, 3)
    for (losses, weights, sums, steps), (again, others, loaded, count) in zip(before, after, strict=True):
        assert losses[-3:] == again and steps == count == 7
        assert all(torch.equal(weights[name], others[name]) for name in weights)
        assert all(torch.equal(sums[key][name], loaded[key][name]) for key in sums for name in sums[key])
    # On other numbers of replicas, the sum of the residuals is the same.
    held = {key: {k: v for one in before for k, v in one[2][key].items()} for key in before[0][2]}
    assert any(value.any() for value in held["residual"].values())
    for replicas in (1, 4):
        for losses, _, loaded, count in ranks(replicas, resumed, (1, replicas, 1), section, folder, True, 1):
            assert count == 5 and losses[0] == pytest.approx(before[0][0][-3], rel=1e-10)
            assert loaded.keys() == held.keys()
            for key, values in held.items():
                for name, value in values.items():
                    torch.testing.assert_close(loaded[key][name], value, rtol=1e-12, atol=1e-15)


def test_another_compression_method_loads_the_saved_residuals(
    ranks: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = str(tmp_path)
    ((_, _, sums, _),) = ranks(1, resumed, (1, 1, 1), POWER, folder, False, 4)
    grid = Grid()
    made = engine(grid, {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "gradient_compression": TOPK})
    made.load_checkpoint(folder)
    assert "the state of PowerSGDExchange (q) is not loaded" in caplog.text
    for name, value in total(made, grid)["residual"].items():
        assert torch.equal(value, sums["residual"][name])
    caplog.clear()
    engine(grid, {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}).load_checkpoint(folder)
    assert "the state of PowerSGDExchange (q, residual) is not loaded" in caplog.text


def train_in_a_plain_loop(compression: Any, stage: int, steps: int = 6, resume: int = 0) -> Any:
    """A plain loop, in which a layer is used in the first steps only; saved and loaded after ``resume`` steps."""
    grid = Grid(timeout=60)

    def made() -> tuple[nn.Module, ShardedOptimizer]:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Embedding(20, WIDTH)]).double()
        chosen = SparseRows(list(model[2].parameters())) if compression == "rows" else compression
        return model, ShardedOptimizer(
            torch.optim.SGD, model.parameters(), grid, stage=stage, compression=chosen, lr=LR
        )

    model, optimizer = made()
    generator, trace = torch.Generator().manual_seed(grid.rank), []
    for step in range(steps):
        if resume and step == resume:
            weights, state = {k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict()
            model, optimizer = made()
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
        ids = torch.randint(20, (2,), generator=generator)
        x = model[0](model[2](ids))  # type: ignore[index]
        optimizer.zero_grad()
        (model[1](x) if step < 2 else x).square().mean().backward()  # type: ignore[index]
        optimizer.step()
        trace.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    return trace


@pytest.mark.parametrize(
    "compression", [TopK(0.1), PowerSGD(1), "rows", "fp16"], ids=["topk", "powersgd", "rows", "fp16"]
)
def test_compression_in_a_plain_loop_resumes_exactly(ranks: Any, compression: Any) -> None:
    found, whole = ranks(2, train_in_a_plain_loop, compression, 1), ranks(2, train_in_a_plain_loop, None, 1)
    again = ranks(2, train_in_a_plain_loop, compression, 1, resume=3)
    for trace, more, plainly in zip(found, again, whole, strict=True):
        for step, first, other, want in zip(trace, found[0], more, plainly, strict=True):
            for name, value in step.items():
                assert torch.equal(value, first[name]) and torch.equal(value, other[name])
                if compression == "rows":
                    torch.testing.assert_close(value, want[name], rtol=1e-12, atol=1e-15)
    last, before = found[0][-1], found[0][2]
    if compression in (TopK(0.1), PowerSGD(1)):
        # A layer's residual still changes it in steps in which no replica used it.
        assert not torch.equal(last["1.weight"], before["1.weight"])
        assert not torch.allclose(last["0.weight"], whole[0][-1]["0.weight"], rtol=1e-3)
    else:
        assert torch.equal(last["1.weight"], before["1.weight"])


def test_steps_and_residuals_add_up_to_the_sum_of_gradients(ranks: Any) -> None:
    """Error feedback: the steps and the residuals add up to the sum of all gradients."""
    for values in (None, torch.float16, torch.bfloat16):  # what rounding loses is not lost
        for missing, steps in ranks(2, fed_back, values):
            assert missing < 1e-12 and steps == 10


def fed_back(values: torch.dtype | None) -> Any:
    grid = Grid()
    weight = nn.Parameter(torch.zeros(5, 8, dtype=torch.float64))
    optimizer = ShardedOptimizer(torch.optim.SGD, [weight], grid, stage=0, compression=TopK(0.3, values=values), lr=1.0)
    gradient = torch.randn(5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for _ in range(10):
        optimizer.zero_grad()
        (weight * gradient).sum().backward()
        optimizer.step()
    exchange: Any = optimizer.backward_passes.data_axis.exchange
    (residual,) = exchange.state()["residual"]
    held = residual.clone()
    grid.data.all_reduce(held)
    missing = weight.detach() + 10 * gradient - held[:40].view(5, 8)
    return float(missing.abs().max()), exchange.steps


def not_finite(compression: Any) -> Any:
    """Steps of a plain loop that skips a step whose gradient is not finite on one replica."""
    grid = Grid(timeout=60)
    weight = nn.Parameter(torch.randn(6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    optimizer = ShardedOptimizer(torch.optim.SGD, [weight], grid, stage=0, compression=compression, lr=0.1)
    exchange: Any = optimizer.backward_passes.data_axis.exchange
    norms = []
    for step in range(4):
        optimizer.zero_grad()
        factor = torch.inf if step == 2 and grid.rank == 1 else 1.0 + grid.rank
        (weight.square().sum() * factor).backward()
        before = [t.clone() for each in exchange.state().values() for t in each]
        norm = optimizer.clip_grad_norm_(1.0)
        norms.append(bool(norm.isfinite()))
        if norms[-1]:
            optimizer.step()
            continue
        after = [t for each in exchange.state().values() for t in each]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return norms, bool(weight.isfinite().all())


@pytest.mark.parametrize("compression", [TopK(0.2), PowerSGD(1, min_compression=1.0)], ids=["topk", "powersgd"])
def test_a_gradient_that_is_not_finite_changes_no_residuals(ranks: Any, compression: Any) -> None:
    assert ranks(2, not_finite, compression) == [([True, True, False, True], True)] * 2


BASE = {"train_batch_size": 1}


SGD_M = {"type": "SGD", "params": {"lr": 1.0, "momentum": 0.9}}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"gradient_compression": {"type": "topk", "rank": 2}}, "rank is an option of type powersgd"),
        ({"gradient_compression": {"start_step": 2}}, "start_step is an option of type topk and powersgd"),
        ({"gradient_compression": {"type": "topk", "ratio": 0.0}}, "ratio"),
        ({"gradient_compression": {"type": "top"}}, "'topk'"),
        ({"gradient_compression": TOPK, "zero_optimization": {"stage": 2}}, "set stage 1"),
        ({"gradient_compression": POWER, "zero_optimization": {"stage": 3}}, "set stage 1"),
        ({"sparse_gradients": True, "zero_optimization": {"stage": 2}}, "sparse_gradients needs"),
        ({"sparse_gradients": True, "gradient_compression": TOPK}, "give one of them"),
        (
            {"gradient_compression": {"type": "fp16"}, "communication_data_type": "bf16"},
            "both set the dtype",
        ),
        ({"gradient_compression": POWER, "communication_data_type": "bf16"}, "leave it out"),
        ({"gradient_compression": FULL, "optimizer": SGD_M}, "SGD without momentum"),
        (
            {"sparse_gradients": True, "communication_data_type": "fp16"},
            "sparse_rows sums .* communication_data_type to bf16",
        ),
        (
            {"gradient_compression": {"type": "fp16"}, "optimizer": {"type": "OneBitAdam", "params": {"lr": 1.0}}},
            "OneBitAdam sums gradients that are means already.* communication_data_type to bf16",
        ),
        (
            {"gradient_compression": FULL, "optimizer": {"type": "Adam", "params": {"lr": 1.0}}},
            "the optimizer is Adam",
        ),
        (
            {
                "gradient_compression": {"type": "bf16"},
                "torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["torch.nn.Linear"]},
            },
            "give one of them",
        ),
    ],
)
def test_invalid_compression_options_are_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_config({**BASE, **config})


def test_optimizers_refuse_unsupported_compression() -> None:
    model = nn.Linear(4, 4)
    section = {"gradient_compression": {"type": "topk", "momentum": 0.9}}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    with pytest.raises(ConfigError, match="without momentum"):
        triax.initialize(model=model, optimizer=optimizer, config={**BASE, **section})
    grid = Grid()
    refused: list[tuple[dict[str, Any], str]] = [
        ({"compression": "int8"}, "'fp16' or 'bf16'"),
        ({"compression": TopK(), "stage": 2}, "use stage 1"),
        ({"compression": "fp16", "communication_dtype": torch.float32}, "differ"),
        ({"compression": 4}, "compression=4 is unknown: pass 'fp16'"),
        ({"compression": TopK(momentum=0.9), "momentum": 0.9}, "SGD with momentum 0.9: use torch.optim.SGD without"),
        ({"compression": PowerSGD(), "communication_dtype": torch.bfloat16}, "PowerSGD sends something else: leave"),
        ({"compression": SparseRows([model.weight]), "communication_dtype": torch.float16}, "use bf16"),
    ]
    for arguments, words in refused:
        with pytest.raises(ValueError, match=words):
            ShardedOptimizer(torch.optim.SGD, model.parameters(), grid, **{"lr": 1.0, **arguments})
    with pytest.raises(ValueError, match="the optimizer is Adam: use"):
        ShardedOptimizer(torch.optim.Adam, model.parameters(), grid, lr=1.0, compression=TopK(momentum=0.9))
    for make, words in (
        (lambda: TopK(0.0), "ratio is 0.0: give the fraction of elements to send"),
        (lambda: TopK(momentum=1.0), "momentum is 1.0: give a number from 0 to below 1"),
        (lambda: TopK(clip=-1.0), "clip is -1.0: give a positive limit"),
        (lambda: TopK(warmup_steps=-1), "warmup_steps=-1 is too small: give at least 0"),
        (lambda: TopK(values=torch.int8), "values is torch.int8: give torch.float32,"),
        (lambda: PowerSGD(0), "rank=0 is too small: give at least 1"),
        (lambda: PowerSGD(start_step=-1), "start_step=-1 is too small: give at least 0"),
        (lambda: PowerSGD(min_compression=0.5), "min_compression=0.5 is too small: give at least 1"),
        (lambda: SparseRows([torch.zeros(3)]), r"shape \(3,\): give weights of embeddings only"),
    ):
        with pytest.raises(ValueError, match=words):
            make()
