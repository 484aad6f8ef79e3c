"""TensorBoard and Weights & Biases, without a stand-in: a run writes, and each library's own reader reads it back."""

from __future__ import annotations

import atexit
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, PipelineModule
from triax.base.errors import ConfigError, to_install
from triax.engine.monitor.monitor import Monitor

from support.toys import mean_loss

BATCH, STEPS, OWN = 4, 3, "own/accuracy"
TOLD = (
    *("Train/Samples/train_loss", "Train/Samples/lr", "Train/Samples/grad_norm"),
    *("Train/Metrics/square", "Train/Metrics/largest"),
)


def named_loss(outputs: Tensor, labels: Tensor) -> triax.Loss:
    """Return one term, and a metric of another name."""
    return triax.Loss({"square": mean_loss(outputs, labels)}, metrics={"largest": (outputs.detach().max(), 1)})


def made(grid: Grid | None = None, **config: Any) -> Any:
    layers: list[Any] = [LayerSpec(nn.Linear, 3, 3), torch.tanh, LayerSpec(nn.Linear, 3, 3)]
    model = PipelineModule(layers, grid=grid, loss_fn=named_loss, dtype=torch.float64)
    base = {"train_batch_size": BATCH, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    return triax.initialize(model=model, config={**base, **config})[0]


def offline(folder: str) -> None:
    """Weights & Biases without an account, and without copies of what the process prints."""
    os.environ.update(WANDB_MODE="offline", WANDB_DIR=folder, WANDB_CONSOLE="off", WANDB_SILENT="true")


def tracked(folder: str) -> list[dict[str, float]]:
    """Train on two replicas; return each step's numbers. The last rank logs a number of its own, also the last one."""
    offline(folder)
    grid = Grid(data=2, timeout=60)
    engine = made(
        grid,
        tensorboard={"enabled": True, "output_path": folder, "job_name": "events"},
        wandb={"enabled": True, "team": "us", "group": "g", "project": "p"},
        histograms={"every": 2, "bins": 4},
    )
    draws = torch.Generator().manual_seed(grid.rank)
    steps = []
    for step in range(1, STEPS + 1):
        x, y = torch.randn(2, 2, 3, generator=draws, dtype=torch.float64)
        loss = engine.train_batch(iter([(x, y)])).item()
        norm = engine.get_global_grad_norm()
        assert norm is not None
        steps.append({"train_loss": loss, "lr": 0.1, "grad_norm": norm, **engine.metrics})
        if grid.rank == 1:
            engine.monitor.log({OWN: math.nan if step == 2 else 0.5 * step})
    grid.world.barrier()  # the number of rank 1 is there
    del engine
    gc.collect()  # with the engine's end, what arrived last is written
    if grid.rank == 0:
        import wandb

        wandb.finish()
    return steps


def wandb_rows(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return an offline run's description and its rows, which the library's own program reads."""
    words = (sys.executable, "-m", "wandb", "leet", "inspect", "--json", folder / "wandb")
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    (run,) = [each["run"] for each in records if each["type"] == "run"]
    return run, [each["history"]["item"] for each in records if each["type"] == "history"]


def test_both_trackers_record_every_number_of_a_run(ranks: Any, tmp_path: Path) -> None:
    steps, _ = ranks(2, tracked, str(tmp_path))
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    run, rows = wandb_rows(tmp_path)
    assert (run["project"], run["entity"], run["run_group"]) == ("p", "us", "g")
    samples = [BATCH * step for step in range(1, STEPS + 1)]
    assert [row["_step"] for row in rows] == samples
    for path in TOLD:
        wanted = [numbers[path.rpartition("/")[2]] for numbers in steps]
        scalars = events.Scalars(path)
        assert [each.step for each in scalars] == samples
        assert [each.value for each in scalars] == [float(torch.tensor(value)) for value in wanted]  # kept as float32
        assert [row[path] for row in rows] == wanted
    # Of the last rank; the last number came when no step followed.
    assert [each.step for each in events.Scalars(OWN)] == samples
    assert [str(each.value) for each in events.Scalars(OWN)] == ["0.5", "nan", "1.5"]
    assert [row[OWN] for row in rows] == [0.5, "NaN", 1.5]
    names = [
        f"{kind}/layers.{layer}.{part}"
        for kind in ("Weights", "Gradients")
        for layer in "02"
        for part in ("weight", "bias")
    ]
    assert sorted(events.Tags()["histograms"]) == sorted(names)
    for name in names:
        (found,) = events.Histograms(name)
        assert found.step == 2 * BATCH and found.histogram_value.num == (9 if "weight" in name else 3)
        row = rows[1]
        edges, counts = row[f"{name}.bins"], row[f"{name}.values"]
        assert row[f"{name}._type"] == "histogram" and sum(counts) == found.histogram_value.num
        # TensorBoard joins empty bins; each of its bins ends at an edge of ours.
        assert edges[0] == found.histogram_value.min and edges[-1] == found.histogram_value.max
        assert set(found.histogram_value.bucket_limit) <= {*edges, sys.float_info.max}
    assert not any("histogram" in str(value) for value in rows[0].values())


def test_last_records_are_written_before_the_tracker_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B ends its run at exit, and Python calls what was registered for the exit in the opposite order."""
    order: list[Any] = []
    at_exit: list[Any] = []
    earlier = tempfile.TemporaryDirectory()  # with the first finalizer of a process, Python registers them all
    monkeypatch.setattr(atexit, "register", at_exit.append)
    atexit.register(lambda: order.append("the tracker ends"))
    texts = [json.dumps([3, [[OWN, 0.5, 12]]])]
    box = SimpleNamespace(read=lambda: [texts.pop()] if texts else [])
    monitor = Monitor([lambda events, step: order.append((events, step))], mailbox=box)  # type: ignore[arg-type]
    for call in reversed(at_exit):
        call()
    assert order == [([(OWN, 0.5, 12)], 3), "the tracker ends"]
    del monitor
    assert len(order) == 2  # not again
    earlier.cleanup()


def refused(folder: str) -> list[str]:
    """Return what each rank says about trackers that cannot begin."""
    offline(folder)
    said = []
    for section in ({"wandb": {"enabled": True, "project": "a/b"}}, {"tensorboard": {"enabled": True}}):
        if "tensorboard" in section:
            sys.modules["tensorboard"] = None  # type: ignore[assignment]
        try:
            made(Grid(data=2, timeout=60), **section)
        except ConfigError as error:
            said.append(str(error))
        finally:
            if sys.modules.get("tensorboard", "") is None:
                del sys.modules["tensorboard"]
    return said


def test_a_tracker_that_cannot_begin_is_refused_on_every_rank(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2, refused, str(tmp_path))
    assert first == second and len(first) == 2
    assert "cannot be started: Invalid project name 'a/b'" in first[0] and "WANDB_MODE=offline" in first[0]
    assert first[1].endswith(f"tensorboard is not installed. Type {to_install('tensorboard')}, or use csv_monitor.")


def test_the_printed_line_has_terms_and_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    engine = made(Grid(), steps_per_print=1)
    x = torch.ones(BATCH, 3, dtype=torch.float64)
    loss = engine.train_batch(iter([(x, x)])).item()
    line = next(each for each in capsys.readouterr().out.splitlines() if each.startswith("step 1"))
    largest = engine.metrics["largest"]
    assert f"loss {loss:.4f}" in line and f"square {loss:.4f}, largest {largest:.4f}" in line
