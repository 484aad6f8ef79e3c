"""What rank 0 writes of each step: a line now and then, and CSV files, JSON lines, TensorBoard's files, W&B."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from ..grid import Grid
from .config import Config, ConfigError
from .config_sections import MonitorConfig, WandbConfig
from .report_read import METRICS

if TYPE_CHECKING:
    from .engine import Engine

Event = tuple[str, float, int]  # a name, a number, and the samples that were trained on
Write = Callable[[list[Event]], None]


class Monitor:
    """Called after each step, on rank 0 alone.

    The names are DeepSpeed's, ``Train/Samples/train_loss``, ``lr`` and (under fp16) ``loss_scale``, over the number
    of samples; ``grad_norm`` is the norm before clipping. What an ``Observer`` knows of a step comes with them.

    Args:
        config: which of them are wanted.
        batch: samples a step.
    """

    _step = 0

    def __init__(self, config: Config, batch: int) -> None:
        self._batch, self._print_every = batch, config.steps_per_print
        self._mark: tuple[int, float] | None = None  # the step and the time from which samples a second count
        self._writers: list[Write] = []
        if config.csv_monitor.enabled:
            self._writers.append(csv_writer(folder_of(config.csv_monitor)))
        if config.tensorboard.enabled:
            self._writers.append(tensorboard_writer(folder_of(config.tensorboard)))
        if config.json_monitor.enabled:
            self._writers.append(json_writer(folder_of(config.json_monitor), lambda: self._step))
        if config.wandb.enabled:
            self._writers.append(wandb_writer(config.wandb))

    @property
    def writes(self) -> bool:
        """Whether it does more than print."""
        return bool(self._writers)

    def write(self, events: list[Event]) -> None:
        """Hand numbers to all writers."""
        for write in self._writers:
            write(events)

    def __call__(self, engine: Engine, loss: Tensor, more: Mapping[str, float] | None = None) -> None:
        """The engine has taken a step, with this loss; ``more`` is known of it."""
        step, now = engine.global_steps, time.perf_counter()
        self._step = step
        if self._writers:
            self.write(self._events(engine, float(loss), more or {}))
        if self._print_every and step % self._print_every == 0:
            print(self._line(engine, float(loss), now), flush=True)
            self._mark = step, now
        elif self._mark is None:
            self._mark = step, now

    def _events(self, engine: Engine, loss: float, more: Mapping[str, float]) -> list[Event]:
        figures = {"train_loss": loss, "lr": float(engine.get_lr()[0])}
        scale, norm = engine.loss_scale(), engine.get_global_grad_norm()
        if scale is not None:
            figures["loss_scale"] = scale
        if norm is not None:
            figures["grad_norm"] = norm
        figures |= more
        return [(f"Train/Samples/{name}", value, engine.global_samples) for name, value in figures.items()]

    def _line(self, engine: Engine, loss: float, now: float) -> str:
        rates = ", ".join(f"{lr:.4g}" for lr in engine.get_lr())
        parts = [f"step {engine.global_steps}: loss {loss:.4f}", f"lr {rates}"]
        if self._mark is not None and now > self._mark[1]:
            samples = (engine.global_steps - self._mark[0]) * self._batch
            parts.append(f"{samples / (now - self._mark[1]):.4g} samples/s")
        scale = engine.loss_scale()
        if scale is not None:
            parts.append(f"loss scale {scale:g}, {engine.skipped_steps} steps skipped")
        return ", ".join(parts)


def make_monitor(config: Config, grid: Grid, batch: int) -> Monitor | None:
    """The monitor, on rank 0; None elsewhere, and where nothing is to be written. Collective where something is.

    Raises:
        ConfigError: on every rank: a package is not installed, or a folder cannot be made.
    """
    wanted = config.monitored
    monitor, problem = None, None
    if grid.rank == 0 and (wanted or config.steps_per_print):
        try:
            monitor = Monitor(config, batch)
        except (ConfigError, OSError) as error:
            problem = str(error)
    if wanted:
        problem = grid.world.all_gather_object(problem)[0]
    if problem is not None:
        raise ConfigError(problem)
    return monitor


def csv_writer(folder: Path) -> Write:
    """A file for each number, ``Train_Samples_lr.csv``: a head, then a line a step. What is there is added to."""
    folder.mkdir(parents=True, exist_ok=True)

    def write(events: list[Event]) -> None:
        for name, value, samples in events:
            with (folder / f"{name.replace('/', '_')}.csv").open("a", newline="") as file:
                rows = csv.writer(file)
                if file.tell() == 0:
                    rows.writerow(["step", name.rsplit("/", 1)[-1]])
                rows.writerow([samples, value])

    return write


def json_writer(folder: Path, step: Callable[[], int]) -> Write:
    """``metrics.jsonl``: a line for what is written together, {"step", "samples", "time", and each name: its number}.

    ``time`` is in seconds since 1970. A number that is not finite is null. A run that begins with step 1 begins the
    file anew; one that goes on adds to it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, begun = folder / METRICS, False

    def write(events: list[Event]) -> None:
        nonlocal begun
        row: dict[str, float | None] = {"step": step(), "samples": events[0][2], "time": round(time.time(), 3)}
        row |= {name: value if math.isfinite(value) else None for name, value, _ in events}
        with path.open("a" if begun or step() > 1 else "w") as file:
            file.write(json.dumps(row) + "\n")
        begun = True

    return write


def tensorboard_writer(folder: Path) -> Write:
    """Event files for TensorBoard.

    Raises:
        ConfigError: it is not installed.
    """
    _require("tensorboard", "triax[tensorboard]")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(log_dir=str(folder))

    def write(events: list[Event]) -> None:
        for name, value, samples in events:
            writer.add_scalar(name, value, samples)
        writer.flush()

    return write


def wandb_writer(section: WandbConfig) -> Write:
    """A run of Weights & Biases.

    Raises:
        ConfigError: it is not installed.
    """
    _require("wandb", "wandb")
    import wandb

    run = wandb.init(project=section.project, group=section.group, entity=section.team)

    def write(events: list[Event]) -> None:
        run.log({name: value for name, value, _ in events}, step=events[0][2])

    return write


def _require(package: str, install: str) -> None:
    if not _installed(package):
        raise ConfigError(
            f"{package}.enabled: the package {package} is not installed: pip install '{install}', or use csv_monitor"
        )


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def folder_of(section: MonitorConfig) -> Path:
    """Where a monitor writes."""
    return Path(section.output_path) / section.job_name
