"""A full disk under what a run writes about itself: the training goes on, and one warning names the file.

The disk is full for real: ``/dev/full``, and a process that may not write to files (RLIMIT_FSIZE).
"""

from __future__ import annotations

import csv
import json
import logging
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import triax
from triax import Grid, LayerSpec, PipelineModule
from triax.base.errors import ConfigError
from triax.engine.monitor.trace.merge_timelines import merged
from triax.grid.comm.timeline_recorder import TimelineRecorder

from support.toys import mean_loss

FULL = "/dev/full"


@contextmanager
def full_disk(here: bool) -> Iterator[None]:
    """No file of this process can grow."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if here:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def trained(folder: str, full: bool) -> tuple[list[float], list[str]]:
    """Train five steps, of which the disk is full in steps 2 and 3; return the losses and the warnings."""
    place, grid, lines = Path(folder), Grid(data=2, timeout=60), []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("triax").addHandler(handler)
    stop = grid.spans.read(recorder := TimelineRecorder(place / "calls", grid.rank, grid.describe()))
    layers: list[Any] = [LayerSpec(nn.Linear, 3, 3), torch.tanh, LayerSpec(nn.Linear, 3, 3)]
    model = PipelineModule(layers, grid=grid, loss_fn=mean_loss, dtype=torch.float64)
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **{
            name: {"enabled": True, "output_path": folder, "job_name": name}
            for name in ("csv_monitor", "json_monitor", "tensorboard")
        },
        "histograms": {"every": 1, "bins": 4},
        "timeline": {"step": 2},
        "flops_profiler": {"enabled": True, "profile_step": 1, "output_file": str(place / "profile.txt")},
        "wall_clock_breakdown": True,
        "steps_per_print": 1,
    }
    engine = triax.initialize(model=model, config=config)[0]
    if grid.rank == 0 and full:
        (place / "csv_monitor" / "Train_Samples_lr.csv").symlink_to(FULL)
    draws, losses = torch.Generator().manual_seed(grid.rank), []
    for step in range(1, 6):
        with full_disk(full and grid.rank == 0 and step in (2, 3)):
            x, y = torch.randn(2, 2, 3, generator=draws, dtype=torch.float64)
            losses.append(engine.train_batch(iter([(x, y)])).item())
    stop()
    recorder.close()
    logging.getLogger("triax").removeHandler(handler)
    return losses, lines


def test_a_full_disk_ends_no_training(ranks: Any, tmp_path: Path) -> None:
    (expected, quiet), _ = ranks(2, trained, str(tmp_path / "room"), False)
    (losses, said), (_, other) = ranks(2, trained, str(tmp_path / "full"), True)
    assert losses == expected and not quiet and not other  # rank 0 alone writes
    place = tmp_path / "full"
    text = "\n".join(said)
    numbers = [line for line in said if line.startswith("the numbers of a step cannot be written")]
    assert len(numbers) == 3  # one for each monitor, though it failed twice
    assert f"No space left on device: '{place / 'csv_monitor' / 'Train_Samples_lr.csv'}'" in text
    for name in ("json_monitor/metrics.jsonl", "tensorboard"):
        assert f"[Errno 27] File too large: '{place / name}'" in text, name
    for name in ("json_monitor/run.json", "json_monitor/timeline.json", "profile.txt", "calls/rank-0-0-0.jsonl"):
        assert f"{place / name} cannot be written: [Errno 27] File too large" in text, name
    assert len(said) == 7, said
    rows = [json.loads(line) for line in (place / "json_monitor/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 4, 5]
    histograms = (place / "json_monitor/histograms.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in histograms] == [1, 4, 5]
    norms = [*csv.reader((place / "csv_monitor/Train_Samples_grad_norm.csv").open())]
    assert [row[0] for row in norms] == ["step", "4", "16", "20"]
    events = EventAccumulator(str(place / "tensorboard"))
    events.Reload()
    scalars = events.Scalars("Train/Samples/train_loss")
    assert [each.step for each in scalars] == [4, 16, 20]
    assert [each.value for each in scalars] == [float(torch.tensor(losses[at])) for at in (0, 3, 4)]
    assert json.loads((place / "json_monitor/run.json").read_text())["since_step"] == 1
    assert merged([file.read_text() for file in (place / "calls").iterdir()])["otherData"]["ranks"]


def test_a_fifo_under_the_name_of_a_record_is_not_waited_for(tmp_path: Path) -> None:
    """A FIFO without a reader stopped the first step, and record_trace, for ever."""
    os.mkfifo(tmp_path / "metrics.jsonl")
    section = {"enabled": True, "output_path": str(tmp_path.parent), "job_name": tmp_path.name}
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = triax.initialize(model=nn.Linear(2, 2), config=config | {"json_monitor": section})[0]
    with pytest.raises(ConfigError, match=r"metrics.jsonl' cannot be written"):
        engine.record_trace(tmp_path / "metrics.jsonl")
    engine.backward(engine(torch.ones(2, 2)).sum())
    engine.step()
    assert engine.global_steps == 1
