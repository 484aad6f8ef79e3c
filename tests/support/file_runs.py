"""Runs of training files as ranks of a pool, and what they leave."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from triax.train.file import read_training_file
from triax.train.loop import TrainingRun, train
from triax.train.start import make_job

Tensors = dict[str, Tensor]


class Watch:
    """Watch of a run that calls a function after each step."""

    def __init__(self, then: Callable[[TrainingRun, float], object]) -> None:
        self.after_step = then

    def start(self, run: TrainingRun) -> None:
        """Begin."""


class Recorder:
    """Watch that keeps the run, the initial weights, and loss, gradients and weights of each step."""

    def __init__(self) -> None:
        self.initial: Tensors = {}
        self.steps: list[tuple[float, Tensors, Tensors]] = []

    def start(self, run: TrainingRun) -> None:
        self.run, self.initial = run, run.engine.gather()

    def after_step(self, run: TrainingRun, loss: float) -> None:
        self.steps.append((loss, run.engine.gather("gradients"), run.engine.gather()))


class NoPictures:
    """Watch that leaves out the page and the pictures of a run: two thirds of the CPU of a run of a few steps."""

    def start(self, run: TrainingRun) -> None:
        """Draw nothing."""
        run.report.draw = lambda schedule: None  # type: ignore[method-assign]
        run.report.pipeline = lambda step, measured, schedule: None  # type: ignore[method-assign]

    def after_step(self, run: TrainingRun, loss: float) -> None:
        """Do nothing."""


def run_watched(watch: Any, root: str, file: str, *changes: str, pictures: bool = False) -> None:
    """Be a rank of the run of a training file in a folder."""
    os.chdir(root)
    train(make_job(read_training_file(file, changes)[0]), [watch] if pictures else [watch, NoPictures()])


def losses_of(root: str, file: str, *changes: str) -> list[float]:
    """Be a rank of the run of a training file in a folder; return the losses of its steps."""
    losses: list[float] = []
    run_watched(Watch(lambda _, loss: losses.append(loss)), root, file, *changes)
    return losses


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a run's metrics.jsonl, none before it is there."""
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def numbers_of(run: Path, prefix: str) -> list[dict[str, float]]:
    """Return the numbers of metrics.jsonl under names with a prefix, of each line that has some."""
    found = [{name.removeprefix(prefix): row[name] for name in row if name.startswith(prefix)} for row in rows_of(run)]
    return [each for each in found if each]


def written_losses(run: Path) -> list[float]:
    """Return the loss of each step from a run's metrics.jsonl; of a step that was taken twice, the last."""
    found = {row["step"]: row[name] for row in rows_of(run) if (name := "Train/Samples/train_loss") in row}
    return [found[step] for step in sorted(found)]


def validations(run: Path) -> list[float]:
    """Return the losses on held-out documents from a run's metrics.jsonl."""
    return [row["loss"] for row in numbers_of(run, "Validation/") if "loss" in row]
