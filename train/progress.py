"""Progress of a training run: a line on the terminal, schedule.png early, and report.html and loss.png at its end."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ..base.errors import ConfigError, to_install
from ..base.records import Records
from ..base.verbosity import is_quiet
from ..engine.monitor.format import numbers_in_words
from ..engine.monitor.records import StepMetrics
from ..engine.monitor.report.pictures import draw_losses, draw_schedule
from ..engine.monitor.report.run_folder import read_run, read_trace
from ..engine.monitor.report.write import write_report
from ..pipe.program.schedule import Schedule
from ..pipe.program.timeline import Timeline


class Reporter:
    """Printed and drawn progress of a run. It prints and draws on rank 0 only.

    On a terminal the progress is one line that changes; elsewhere it is a plain line every ``every`` steps. With
    ``triax -q`` there is none.

    Args:
        folder: folder of the run.
        speaks: True on rank 0.
        steps: steps of the run.
        every: steps from one plain line to the next.
        unit: unit of losses, such as nats per token.
        name: beginning of each line.
    """

    def __init__(
        self, folder: Path, speaks: bool, steps: int, every: int, unit: str = "nats per token", name: str = ""
    ) -> None:
        self._name, self._is_quiet = name, is_quiet()
        self.folder, self.speaks, self.steps, self.every, self.unit = folder, speaks, steps, every, unit
        self._pipelines: list[tuple[float, int, Timeline]] = []  # makespan, step
        self._console = Console(highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._records = Records()

    def say(self, text: str = "") -> None:
        """Print a line that stays."""
        if self.speaks and not self._is_quiet:
            with self._records.writing("a line of progress"):
                self._console.print(self._name + text, markup=False)

    def start(self) -> None:
        """Begin to show progress."""
        if self.speaks and not self._is_quiet and self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=8)
            self._live.start()

    def step(
        self, step: int, loss: float, figures: Sequence[str], left: float, metrics: Mapping[str, float | list[float]]
    ) -> None:
        """Show a training step.

        Args:
            step: its number, from 1.
            loss: its loss.
            figures: further numbers with their names, as of ``step_figures``.
            left: seconds that the run will take.
            metrics: terms and metrics of the loss.
        """
        if not self.speaks:
            return
        count = f"{step:>{len(str(self.steps))}}/{self.steps}"
        parts = [f"step {count}", f"loss {loss:.4f}", *numbers_in_words(metrics), *figures, f"{minutes(left)} left"]
        if self._live is not None:
            bar = "━" * int(16 * step / self.steps)
            lines = in_lines([f"{bar:16}", *parts], self._console.width)
            self._live.update(Text("\n".join(lines), no_wrap=True, overflow="crop"))
        elif step % self.every == 0 or step in (1, self.steps):
            self.say("  ".join(parts))

    def pipeline(self, step: int, measured: Timeline | None, schedule: Schedule) -> None:
        """Note the times of a step's ops, and draw the first ones at once.

        In the end the picture is of the step in timeline.json, as the report's; without that file, of the step with
        the median time.
        """
        if self.speaks and measured is not None:
            self._pipelines.append((measured.makespan, step, measured))
            if len(self._pipelines) == 1 and step < self.steps and find_spec("matplotlib") is not None:
                self._picture(step, measured, schedule)

    def _picture(self, step: int, measured: Timeline, schedule: Schedule) -> None:
        """Draw a step into schedule.png, in place of an earlier one, and say which."""
        path = self.folder / "schedule.png"
        with self._records.writing(str(path)):
            draw_schedule(path, schedule, measured, f"step {step}")
            self.say(f"picture {path}: the pipeline of step {step} as measured")

    def stop(self) -> None:
        """End the progress line."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def draw(self, schedule: Schedule) -> None:
        """Write report.html, and loss.png and schedule.png if matplotlib is installed.

        Args:
            schedule: the pipeline schedule.
        """
        if not self.speaks:
            return
        try:
            self.say(f"a page about it is in {write_report(self.folder)}")
        except ConfigError as error:
            self.say(f"there is no page about it. {error}")
        try:
            run = read_run(self.folder)
            with self._records.writing(str(self.folder / "loss.png")):
                draw_losses(self.folder / "loss.png", run, self.unit)
            if self._pipelines:
                _, step, measured = sorted(self._pipelines)[len(self._pipelines) // 2]
                if (traced := read_trace(run.trace or {})) is not None:
                    step, measured = traced.step, traced.timeline()
                self._picture(step, measured, schedule)
        except ImportError as error:
            if error.name is None or not error.name.startswith("matplotlib"):
                raise
            print(f"no pictures: they need matplotlib: {to_install('plot')}", file=sys.stderr)


def step_figures(metrics: StepMetrics | None, speed: float) -> list[str]:
    """Return the figures of a step for people: learning rate, gradient norm, tokens/s, memory, MFU.

    The norm is that before clipping, and the memory the peak of rank 0. What is not known is left out, as MFU on a
    device whose peak is not known.

    Args:
        metrics: the step's numbers.
        speed: tokens per second.
    """
    rate = f"{speed:,.0f} tokens/s"
    if metrics is None:
        return [rate]
    memory, mfu = metrics.timings.get("peak_memory_gb"), metrics.timings.get("mfu")
    figures = [
        f"lr {metrics.lr[0]:.3g}",
        None if metrics.grad_norm is None else f"norm {metrics.grad_norm:.3g}",
        rate,
        None if memory is None else f"{memory:.2f} GB",
        None if mfu is None else f"MFU {mfu:.1%}",
    ]
    return [each for each in figures if each is not None]


def in_lines(parts: Sequence[str], width: int) -> list[str]:
    """Return lines of at most ``width`` columns, if each part has room in one, with no part broken.

    >>> in_lines(["step 1/9", "loss 2.5", "lr 0.1"], 20)
    ['step 1/9  loss 2.5', 'lr 0.1']
    """
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(part)
    return lines


def minutes(seconds: float) -> str:
    """Return seconds as minutes and seconds: 75.2 is 1:15."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
