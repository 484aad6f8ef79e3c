"""A full disk under the files that a run writes: training continues, and one warning names each file.

The disk is full for real: ``/dev/full``, and a process that may not write to files (RLIMIT_FSIZE).
"""

from __future__ import annotations

import csv
import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import triax
from triax import Grid, LayerSpec, PipelineModule
from triax.base.errors import ConfigError
from triax.engine.monitor.trace.merge_timelines import merged
from triax.grid.comm.timeline_recorder import TimelineRecorder

from support.rank_checks import triax_warnings
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


class Outcome(NamedTuple):
    losses: list[float]
    warnings: list[str]


def trained(folder: str, full: bool) -> Outcome:
    """Train five steps of 4 samples; with ``full``, the disk of rank 0 is full in steps 2 and 3."""
    place, grid = Path(folder), Grid(data=2, timeout=60)
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
    draws, losses = torch.Generator().manual_seed(grid.rank), []
    with triax_warnings() as warnings:
        engine = triax.initialize(model=model, config=config)[0]
        if grid.rank == 0 and full:
            (place / "csv_monitor" / "Train_Samples_lr.csv").symlink_to(FULL)
        for step in range(1, 6):
            with full_disk(full and grid.rank == 0 and step in (2, 3)):
                x, y = torch.randn(2, 2, 3, generator=draws, dtype=torch.float64)
                losses.append(engine.train_batch(iter([(x, y)])).item())
        stop()
        recorder.close()
    return Outcome(losses, warnings)


class FullDisk(NamedTuple):
    """Folder and outcomes of the ranks of a run whose disk is full in steps 2 and 3, and outcomes of one with room."""

    folder: Path
    outcomes: list[Outcome]
    with_room: list[Outcome]


@pytest.fixture(scope="module")
def run(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> FullDisk:
    folder = tmp_path_factory.mktemp("disk")
    with_room = ranks(2, trained, str(folder / "room"), full=False)
    return FullDisk(folder / "full", ranks(2, trained, str(folder / "full"), full=True), with_room)


def test_a_full_disk_changes_no_loss(run: FullDisk) -> None:
    assert [each.losses for each in run.outcomes] == [each.losses for each in run.with_room]


def test_a_full_disk_is_warned_of_once_for_each_file(run: FullDisk) -> None:
    """Rank 0 alone writes; each monitor fails in two steps."""
    numbers = [
        f"[Errno 28] No space left on device: '{run.folder}/csv_monitor/Train_Samples_lr.csv'",
        f"[Errno 27] File too large: '{run.folder}/json_monitor/metrics.jsonl",
        f"[Errno 27] File too large: '{run.folder}/tensorboard",
    ]
    files = ("json_monitor/run.json", "json_monitor/timeline.json", "profile.txt", "calls/rank-0-0-0.jsonl")
    others = [f"{run.folder}/{file} cannot be written: [Errno 27] File too large" for file in files]
    said, *silent = [outcome.warnings for outcome in (*run.outcomes, *run.with_room)]
    assert silent == [[], [], []] and len(said) == len(numbers) + len(others)
    for words in (*numbers, *others):
        (line,) = (line for line in said if words in line)
        assert line.startswith("the numbers of a step cannot be written") == (words in numbers)


def test_files_are_written_again_once_the_disk_has_room(run: FullDisk) -> None:
    """The files have steps 1, 4 and 5, which end at samples 4, 16 and 20."""
    for file in ("metrics.jsonl", "histograms.jsonl"):
        rows = (run.folder / "json_monitor" / file).read_text().splitlines()
        assert [json.loads(row)["step"] for row in rows] == [1, 4, 5], file
    norms = [*csv.reader((run.folder / "csv_monitor/Train_Samples_grad_norm.csv").open())]
    assert [row[0] for row in norms] == ["step", "4", "16", "20"]
    events = EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    losses = [float(torch.tensor(run.outcomes[0].losses[step - 1])) for step in (1, 4, 5)]  # in float32
    scalars = events.Scalars("Train/Samples/train_loss")
    assert [(each.step, each.value) for each in scalars] == list(zip((4, 16, 20), losses, strict=True))
    assert json.loads((run.folder / "json_monitor/run.json").read_text())["since_step"] == 1
    assert merged([file.read_text() for file in (run.folder / "calls").iterdir()])["otherData"]["ranks"]


def test_a_fifo_in_place_of_a_log_file_does_not_block(tmp_path: Path) -> None:
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
