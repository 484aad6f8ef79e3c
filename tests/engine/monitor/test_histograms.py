"""Histograms of sharded weights and gradients, and numbers that scripts log on any rank."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import triax
from triax import Grid, LayerSpec, PipelineModule
from triax.compat.deepspeed.config.read import Section
from triax.compat.deepspeed.config.to_options import notes_of
from triax.compat.deepspeed.from_config import read_config
from triax.engine.monitor.records import Histogram
from triax.engine.monitor.report.run_folder import read_run
from triax.engine.monitor.report.write import write_report
from triax.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

from support.toys import mean_loss

WIDTH, WORDS, BATCH, BINS = 6, 11, 8, 7


def trained(shape: tuple[int, int, int], stage: int, folder: str) -> dict[str, Any]:
    """Train three steps with histograms of steps 2 and numbers of each rank; return the whole tensors of step 2."""
    grid = Grid(*shape, timeout=60)
    layers: list[Any] = [
        LayerSpec(VocabParallelEmbedding, WORDS, WIDTH, grid=grid),
        LayerSpec(ColumnParallelLinear, WIDTH, 8, grid=grid),
        torch.tanh,
        LayerSpec(RowParallelLinear, 8, WIDTH, grid=grid),
        LayerSpec(nn.LayerNorm, WIDTH),
    ]
    model = PipelineModule(layers, grid=grid, loss_fn=mean_loss, dtype=torch.float64, partition="uniform")
    config = {
        "train_batch_size": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 60},
        "gradient_clipping": 0.1,
        "json_monitor": {"enabled": True, "output_path": folder, "job_name": "run"},
        "histograms": {"every": 2, "bins": BINS},
    }
    engine = triax.initialize(model=model, config=config)[0]
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Any] = {}
    for step in (1, 2, 3):
        x = torch.randint(WORDS, (BATCH,), generator=generator)
        y = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)
        share = BATCH // grid.data.size
        mine = slice(grid.data.rank * share, (grid.data.rank + 1) * share)
        engine.train_batch(iter([(x[mine], y[mine])]))
        engine.monitor.log({f"own/rank_{grid.rank}": 10 * step + grid.rank})
        grid.world.barrier()
        if step == 2:
            found = {f"Weights/{name}": value for name, value in engine.gather().items()}
            found |= {f"Gradients/{name}": value for name, value in engine.gather("gradients").items()}
    grid.world.barrier()
    if grid.rank == 0:
        engine.monitor.log(last=1.0)
        del engine  # writes what has arrived
    return found


@pytest.mark.parametrize(
    ("shape", "stage"),
    [
        ((1, 1, 1), 0),
        ((1, 2, 2), 2),
        *(pytest.param((2, 1, 2), stage, marks=pytest.mark.exhaustive) for stage in (0, 1)),
        *(pytest.param((2, 2, 1), stage, marks=pytest.mark.exhaustive) for stage in (0, 1, 3)),
    ],
)
def test_histograms_equal_those_of_whole_tensors(
    ranks: Any, shape: tuple[int, int, int], stage: int, tmp_path: Path
) -> None:
    size = math.prod(shape)
    whole = ranks(size, trained, shape, stage, str(tmp_path))[0]
    [line] = (tmp_path / "run" / "histograms.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert row["step"] == 2 and row["samples"] == 2 * BATCH and set(row["histograms"]) == set(whole)
    for name, tensor in whole.items():
        found = Histogram(**row["histograms"][name])
        assert found.elements == tensor.numel() and found.not_finite == 0
        assert (found.low, found.high) == pytest.approx((float(tensor.min()), float(tensor.max())), abs=1e-12)
        assert (found.sum, found.squares) == pytest.approx((float(tensor.sum()), float(tensor.square().sum())))
        wanted = torch.histc(tensor.flatten(), BINS, found.low, found.high).int().tolist()
        assert sum(found.counts) == tensor.numel()
        # An element on an edge may be rounded to either side of it.
        assert sum(abs(a - b) for a, b in zip(found.counts, wanted, strict=True)) <= 2 or found.low == found.high
    run = read_run(tmp_path / "run")
    for rank in range(size):
        values = dict(run.series(f"own/rank_{rank}"))
        assert values == {step: 10 * step + rank for step in (1, 2, 3)}, rank
    page = write_report(tmp_path / "run").read_text()
    assert "Weights and gradients" in page and "layers.1.weight" in page and "own/rank_0" in page
    assert page.count('preserveAspectRatio="none"') == len(whole)


def test_equal_elements_get_edges_and_no_monitor_gets_a_note() -> None:
    assert Histogram(1.0, 1.0, [0, 4], 4, 4.0, 4.0, 0).edges() == [0.5, 1.0, 1.5]
    config: Section = read_config({"train_batch_size": 1, "histograms": {"every": 5}})
    assert notes_of(config) == ["histograms does nothing without a monitor: enable tensorboard, json_monitor or wandb"]
