"""Writers of numbers: CSV files, JSON lines, TensorBoard event files, Weights & Biases, and those of other packages."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...base.entry_points import offered
from ...base.errors import ConfigError, no_such, to_install
from ...base.option_error import refusal
from ...base.records import append
from ...base.steady_time import steady_time
from ...options.monitoring import Monitoring
from ..optim.signature import check_arguments
from .files import HISTOGRAMS, METRICS
from .records import Histogram

# A name, a number (or the loads of a layer's experts, or a histogram), and the samples trained on so far.
Event = tuple[str, float | list[int] | list[float] | Histogram, int]
Write = Callable[[Sequence[Event], int], None]  # write(events, step)
_WRITERS = "triax.writers"  # the entry points of functions that make a Write, by the names in monitor.writers


def make_writers(options: Monitoring) -> list[Write]:
    """Return the writers that the options enable.

    Raises:
        ConfigError: a package is not installed, or another writer does not exist or cannot be made.
        OSError: a folder cannot be made.
    """
    makers: tuple[tuple[Any, Callable[[Path], Write]], ...]
    makers = ("csv", csv_writer), ("tensorboard", tensorboard_writer), ("json", json_writer)
    writers = [make(Path(folder)) for name, make in makers if (folder := options.folder_of(name)) is not None]
    if options.wandb is not None:
        writers.append(wandb_writer(options.wandb.project, options.wandb.group, options.wandb.team))
    return writers + [_offered_writer(name, arguments) for name, arguments in options.writers.items()]


def _offered_writer(name: str, arguments: Mapping[str, Any]) -> Write:
    """Make the writer of an entry point: a function of the arguments that returns a ``Write``."""
    where = f"monitor.writers.{name}"
    for entry in offered(_WRITERS).select(name=name):
        make = entry.load()
        check_arguments(where, name, make, arguments)
        try:
            made: Write = make(**arguments)
        except ImportError as error:
            raise ConfigError(f"{where} needs a package: {error}. Type pip install {name}") from error
        except Exception as error:  # each tracker raises errors of its own types
            raise ConfigError(f"the writer {where} cannot be made: {type(error).__name__}: {error}") from error
        return _failing_with_os_error(where, made)
    raise refusal(no_such("<monitor.writers>", name, offered(_WRITERS).names))


def _failing_with_os_error(name: str, write: Write) -> Write:
    """Return a writer that raises its errors as OSErrors: ``Monitor`` warns once of these, and the run goes on."""

    def checked(events: Sequence[Event], step: int) -> None:
        try:
            write(events, step)
        except Exception as error:  # each tracker raises errors of its own types
            raise OSError(f"{name}: {type(error).__name__}: {error}") from error

    return checked


def csv_writer(folder: Path) -> Write:
    """Return a writer that appends each number to a file of its own, such as ``Train_Samples_lr.csv``.

    A file has a header, then a line (samples so far, number) for each step.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def write(events: Sequence[Event], step: int) -> None:
        failed: OSError | None = None
        for name, value, samples in numbers_of(events):
            file, lines = folder / f"{name.replace('/', '_')}.csv", io.StringIO()
            rows = csv.writer(lines)
            if not file.exists() or not file.stat().st_size:
                rows.writerow(["step", name.rsplit("/", 1)[-1]])
            rows.writerow([samples, value])
            try:
                append(file, lines.getvalue())
            except OSError as error:  # the other files may have room
                failed = failed or error
        if failed is not None:
            raise failed

    return write


def json_writer(folder: Path) -> Write:
    """Return a writer that appends one line to ``metrics.jsonl`` for each step: {"step", "samples", "time", names...}.

    ``time`` is in seconds since 1970. A number that is not finite is null. The loads of a layer's experts are a list.
    A run whose first line is of step 1 replaces the file; a resumed run appends to it. Histograms are written to
    ``histograms.jsonl``, which is never replaced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / METRICS
    replaces: bool | None = None  # not known before the first line

    def write(events: Sequence[Event], step: int) -> None:
        nonlocal replaces
        row: dict[str, Any] = {
            "step": step,
            "samples": events[0][2],
            "time": round(steady_time(), 3),
        }
        row |= {name: value for name, value, _ in events if not isinstance(value, Histogram)}
        row |= {name: None for name, value, _ in numbers_of(events) if not math.isfinite(value)}
        row |= {
            name: [number if math.isfinite(number) else None for number in value]
            for name, value, _ in events
            if isinstance(value, list)
        }
        replaces = step <= 1 if replaces is None else replaces
        anew, replaces = replaces, False
        append(path, json.dumps(row) + "\n", anew)
        if histograms := {name: value._asdict() for name, value, _ in events if isinstance(value, Histogram)}:
            line = {"step": step, "samples": events[0][2], "histograms": histograms}
            append(folder / HISTOGRAMS, json.dumps(line) + "\n")

    return write


def tensorboard_writer(folder: Path) -> Write:
    """Return a writer of event files for TensorBoard.

    Raises:
        ConfigError: the package is not installed.
    """
    _require("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    def begin() -> SummaryWriter:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:  # without room its thread would end with a traceback
            probe.write(bytes(2**16))
        return SummaryWriter(log_dir=str(folder))

    writer: SummaryWriter | None = begin()

    def write(events: Sequence[Event], step: int) -> None:
        nonlocal writer
        current, writer = writer, None
        try:
            current = current or begin()  # after an error the thread of a writer has ended
            for name, value, samples in numbers_of(events):
                current.add_scalar(name, value, samples)
            for name, bars, samples in _histograms(events):
                figures: dict[str, Any] = {"min": bars.low, "max": bars.high, "num": bars.elements, "sum": bars.sum}
                figures |= {"sum_squares": bars.squares, "bucket_limits": bars.edges()[1:]}
                current.add_histogram_raw(name, **figures, bucket_counts=list(bars.counts), global_step=samples)
            current.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(folder)) from None
        writer = current

    return write


def wandb_writer(project: str, group: str | None, team: str | None) -> Write:
    """Start a run of Weights & Biases, and return a writer that logs to it.

    Raises:
        ConfigError: the package is not installed, or the run cannot be started.
    """
    _require("wandb")
    import numpy as np
    import wandb

    try:
        run = wandb.init(project=project, group=group, entity=team)
    except Exception as error:  # wandb raises errors of many types
        raise ConfigError(
            f"wandb.enabled is true, but the run of Weights & Biases cannot be started: {error} Without an account or "
            "a network, set the environment variable WANDB_MODE=offline: it writes a folder for wandb sync."
        ) from error

    def write(events: Sequence[Event], step: int) -> None:
        shown: dict[str, Any] = {name: value for name, value, _ in numbers_of(events)}
        for name, value, _ in _histograms(events):
            shown[name] = wandb.Histogram(np_histogram=(np.array(value.counts), np.array(value.edges())))
        try:
            run.log(shown, step=events[0][2])
        except Exception as error:  # as after wandb.finish()
            raise OSError(f"Weights & Biases: {type(error).__name__}: {error}") from error

    return write


def numbers_of(events: Sequence[Event]) -> list[tuple[str, float, int]]:
    """Return the events that are single numbers."""
    return [(name, value, samples) for name, value, samples in events if isinstance(value, (int, float))]


def _histograms(events: Sequence[Event]) -> list[tuple[str, Histogram, int]]:
    """Return the events that are histograms."""
    return [(name, value, samples) for name, value, samples in events if isinstance(value, Histogram)]


def _require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"{package}.enabled is true, but the package {package} is not installed. Type {to_install(package)}, or "
            "use csv_monitor."
        )
