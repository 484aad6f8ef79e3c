"""What keys of a configuration do: scaling of sums, lines and files that are written, batches of another size."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import triax
from triax import Grid, LayerSpec, PipelineModule
from triax.base.errors import ConfigError
from triax.compat.deepspeed.from_config import resolve_config

from support.configuration_files import WIDTH, data, engine
from support.toys import mean_loss


def scaled(replicas: int, config: dict[str, Any]) -> tuple[Any, float | None, float, list[float]]:
    """Gradients, norm and loss of a second step, and the largest gradient that the first collective of it summed."""
    grid = Grid(data=replicas, timeout=60)
    made = engine(grid, gradient_accumulation_steps=2, gradient_clipping=0.01, **config)
    batches, summed = data(grid), []
    made.train_batch(batches)
    for bucket in made.data_axis.buckets:
        reduce = bucket.start_reduction

        def spy(axis: Any, bucket: Any = bucket, reduce: Any = reduce) -> Any:
            pending = reduce(axis)
            summed.append(float(bucket._prescale))
            return pending

        bucket.start_reduction = spy
    loss = made.train_batch(batches)
    return made.gather("gradients"), made.get_global_grad_norm(), loss.item(), summed


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_predivided_gradients_change_the_sum_but_not_the_step(ranks: Any, stage: int) -> None:
    zero = {"stage": stage}
    wanted = ranks(2, scaled, 2, {"zero_optimization": zero})
    for config, factor in (
        ({"prescale_gradients": True}, 1 / 2),
        ({"gradient_predivide_factor": 3.0}, 1 / 3),
        ({"gradient_predivide_factor": 4.0, "prescale_gradients": True}, 1 / 8),
    ):
        for found, want in zip(ranks(2, scaled, 2, {**config, "zero_optimization": zero}), wanted, strict=True):
            torch.testing.assert_close(found[0], want[0], rtol=1e-10, atol=1e-13)
            assert found[1] == pytest.approx(want[1], rel=1e-10) and found[2] == pytest.approx(want[2], rel=1e-10)
            assert set(found[3]) == {factor} and set(want[3]) == {1.0}


def overflowing(config: dict[str, Any]) -> float | None:
    """The norm of a step whose gradients are 40,000 on each of two replicas, summed in fp16, which ends at 65,504."""
    grid = Grid(data=2, timeout=60)
    model = PipelineModule(
        [LayerSpec(nn.Linear, 1, 1, bias=False)], grid=grid, loss_fn=lambda out, _: 40000.0 * out.sum()
    )
    base = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}}
    base |= {"communication_data_type": "fp16", "nan_loss": "ignore"}
    made = triax.initialize(model=model, config={**base, **config})[0]
    made.train_batch(iter([(torch.ones(1, 1), torch.ones(1, 1))]))
    return made.get_global_grad_norm()


def test_prescaling_keeps_a_sum_in_fp16_from_overflowing(ranks: Any) -> None:
    assert ranks(2, overflowing, {}) == [float("inf")] * 2
    assert ranks(2, overflowing, {"prescale_gradients": True}) == [pytest.approx(40000, rel=1e-3)] * 2


def test_steps_per_print_prints_a_line_after_each_n_steps(capsys: pytest.CaptureFixture[str]) -> None:
    made, batches = engine(steps_per_print=2), data()
    losses = [made.train_batch(batches).item() for _ in range(4)]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"step 2: loss {losses[1]:.4f}, lr 0.1, ") and lines[0].endswith(" samples/s")
    assert lines[1].startswith(f"step 4: loss {losses[3]:.4f}, lr 0.1, ")
    half = engine(steps_per_print=1, fp16={"enabled": True, "loss_scale": 8})
    half.train_batch((x.float(), y.float()) for x, y in data())
    assert "loss scale 8, 0 steps skipped" in capsys.readouterr().out


def test_the_resolved_configuration_is_dumped(capsys: pytest.CaptureFixture[str]) -> None:
    made = engine(dump_state=True)
    first, _ = json.JSONDecoder().raw_decode(capsys.readouterr().out)  # what every rank holds is behind it
    assert first == json.loads(json.dumps(resolve_config(made.config, made.batch)))


def test_csv_files_have_deepspeeds_names(tmp_path: Path) -> None:
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    losses, norms = [], []
    for _ in range(2):  # a run that goes on adds to the files
        made, batches = engine(csv_monitor=monitor, gradient_accumulation_steps=3), data()
        for _ in range(2):
            losses.append(made.train_batch(batches).item())
            norms.append(made.get_global_grad_norm())
    found = {file.name: list(csv.reader(file.open())) for file in (tmp_path / "job").iterdir()}
    told = ("train_loss", "lr", "grad_norm", "step_time_ms", "samples_per_second", "peak_memory_gb")
    assert set(found) == {f"Train_Samples_{name}.csv" for name in told}
    assert found["Train_Samples_lr.csv"] == [["step", "lr"], *([str(step), "0.1"] for step in (6, 12, 6, 12))]
    assert [float(row[1]) for row in found["Train_Samples_train_loss.csv"][1:]] == losses
    assert [float(row[1]) for row in found["Train_Samples_grad_norm.csv"][1:]] == norms


def unwritable(folder: str) -> str:
    try:
        engine(Grid(data=2, timeout=60), csv_monitor={"enabled": True, "output_path": folder})
    except ConfigError as error:
        return str(error)
    return "nothing"


def test_every_rank_raises_if_a_file_cannot_be_written(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = ranks(2, unwritable, str(tmp_path / "file"))
    assert said[0] == said[1] and "Not a directory" in said[0]


def test_engine_members_report_batch_sizes_and_options() -> None:
    made = engine(gradient_accumulation_steps=3, gradient_clipping=0.5, zero_optimization={"stage": 2})
    assert (
        made.get_batch_info()
        == (6, 2, 3)
        == (
            made.train_batch_size(),
            made.train_micro_batch_size_per_gpu(),
            made.gradient_accumulation_steps(),
        )
    )
    assert made.get_lr() == [0.1] and made.get_mom() == [0] and made.get_global_grad_norm() is None
    assert made.zero_optimization() and made.zero_optimization_stage() == 2 and made.gradient_clipping() == 0.5
    assert not made.fp16_enabled() and not made.bfloat16_enabled() and made.loss_scale() is None
    made.train_batch(data())
    assert made.is_gradient_accumulation_boundary() and made.skipped_steps == 0
    assert made.global_steps == 1 and made.global_samples == 6 and made.micro_steps == 3
    torch.testing.assert_close(made.module_state_dict(), made.gather(), rtol=0, atol=0)
    with FlopCounterMode(display=False) as counter:
        made.train_batch(data())
    assert counter.get_total_flops() == 3 * (2 + 3) * 2 * 2 * WIDTH * WIDTH  # microbatches x products x 2 * B * W^2


def resized(shape: tuple[int, int, int], schedule: str) -> Any:
    grid = Grid(*shape, timeout=60)
    made = engine(grid, gradient_accumulation_steps=2, pipeline={"schedule": schedule})
    batches, losses = data(grid), []
    for size in (None, 8 * grid.data.size, 2 * grid.data.size):
        if size is not None:
            made.set_train_batch_size(size)
        losses.append(made.train_batch(batches).item())
    info = made.get_batch_info(), made.global_samples
    for wrong in (2 * grid.data.size + 1, 0):
        with pytest.raises(ConfigError):
            made.set_train_batch_size(wrong)
    return losses, made.gather(), info


@pytest.mark.parametrize(("shape", "schedule"), [((1, 1, 1), "1f1b"), ((2, 1, 1), "zb-h1"), ((1, 2, 1), "gpipe")])
def test_training_continues_with_another_batch_size(ranks: Any, shape: tuple[int, int, int], schedule: str) -> None:
    layers: list[Any] = [LayerSpec(nn.Linear, WIDTH, WIDTH), torch.tanh, LayerSpec(nn.Linear, WIDTH, WIDTH)]
    model = PipelineModule(layers, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(2, 64, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted, start = [], 0
    for size in (4 * shape[1], 8 * shape[1], 2 * shape[1]):
        optimizer.zero_grad()
        loss = mean_loss(model(x[start : start + size]), y[start : start + size])
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
        start += size
    for losses, weights, info in ranks(shape[0] * shape[1], resized, shape, schedule):
        assert losses == pytest.approx(wanted, rel=1e-10)
        torch.testing.assert_close(
            weights, {n: p.detach() for n, p in model.named_parameters()}, rtol=1e-10, atol=1e-13
        )
        assert info == ((2 * shape[1], 2, 1), 14 * shape[1])
