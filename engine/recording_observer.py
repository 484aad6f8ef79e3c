"""Observer of an engine's steps: records, prints and traces them if the options ask for it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base.checks import check_path
from ..base.errors import ConfigError
from ..base.records import Records, append
from ..grid import Grid
from ..grid.agreement.agreement import agreed
from ..grid.comm.clock import Clock, Mark
from ..options.monitoring import Monitoring
from ..pipe.program.ops import COMPUTE, Op
from ..pipe.program.timeline import CollectiveSpan, Span, Timeline
from ..zero.histograms import parameter_histograms
from .accounting.run_description import run_record
from .monitor.files import RUN, TIMELINE
from .monitor.mfu import MfuMeter, slowest_peak, tokens_in
from .monitor.monitor import Monitor
from .monitor.records import StepMetrics, StepRecord
from .monitor.run_json import write_run
from .monitor.step_record import COLLECTIVES, ops_of, time_parts
from .monitor.step_timer import StepTimer
from .monitor.trace.trace import trace_step
from .monitor.wall_clock import PartMeans, phase_times, print_means
from .monitor.writers import make_writers
from .step_observer import StepObserver

_PRINT_EVERY = 10  # steps between two prints of monitor.breakdown without print_every


class RecordingObserver(StepObserver):
    """Base class of ``PipelineObserver`` and ``ModuleObserver``: records the steps of one engine.

    Without anything to record, its methods return at once.

    Args:
        engine: the engine.

    Attributes:
        monitor: writes the numbers of each step on rank 0; does nothing on other ranks.
        report: times of the last recorded step, as ``engine.time_report`` returns them.
        trace: file for a trace of the next step; None: no trace.
        timer: records the times of a step.
        mfu: counts the model's FLOPs; None if nothing is written or the devices' peak is not known.
    """

    def __init__(self, engine: Any) -> None:
        self._engine: Any = weakref.proxy(engine)  # the engine holds the observer
        self._grid = engine.grid
        self.monitor, self._records = Monitor(), Records()
        self.report: dict[str, Any] = {}
        self.trace: Path | None = None
        self.mfu: MfuMeter | None = None
        self._active = self._counts_tokens = False
        self.timer, self._means = StepTimer(engine.grid, engine.spans), PartMeans()
        self._began, self._since = 0.0, 0  # time at which the step began; the first step of this process
        self._taken = 0  # steps of this process
        self._tokens = 0  # of this step, on this replica
        self._rates: list[float] = []  # of this step, before the schedule sets those of the next one

    def install(self) -> None:
        """Install the monitors, timers and traces that the options enable. Collective if they enable any.

        Raises:
            ConfigError: on every rank, if a monitor's package is missing or a folder cannot be made.
        """
        engine, options = self._engine, self._engine.options.monitor
        self.monitor = make_monitor(options, self._grid, engine)
        if options.monitored:
            peak = options.peak_tflops if options.peak_tflops is not None else slowest_peak(self._grid, engine.module)
            self._counts_tokens = self._grid.rank == 0
            if peak is not None:
                self.mfu = MfuMeter(self._grid, peak, engine.module, engine.spans)
        if options.breakdown or options.trace.step is not None or options.monitored:
            self._active = True
            self._prepare()
        if options.trace.step is not None:
            require_writable(_trace_file(options), "the timeline", self._grid)
        if options.profile is not None and options.profile.file is not None:
            name = engine.options.say("<monitor.profile.file>")
            require_writable(Path(options.profile.file), name, self._grid)
        if options.json is not None:
            self._write_run(self._grid)

    def record_trace(self, file: str | Path) -> None:
        """Trace the next step into a file; ``Engine.record_trace``."""
        with agreed(self._grid, ConfigError):
            check_path("record_trace", file=file)
        self.trace = require_writable(Path(file), "the timeline", self._grid)
        self._active = True
        self._prepare()

    def count_tokens(self, inputs: Any) -> None:
        """Count the tokens of the inputs of one microbatch, if numbers are written."""
        if self._counts_tokens:
            self._tokens += tokens_in(inputs)

    def may_step(self, loss: float | None, norm: float | None) -> bool:
        """Note the learning rates with which the weights change; leave out no step."""
        self._rates = self._engine.lr
        return True

    def after_step(self, grid: Grid, loss: Tensor) -> None:
        """Write the step's loss and other numbers, and prepare for the next step."""
        clock = self.timer.clock
        self._since = self._since or self._engine.global_steps
        self._taken += 1
        if clock is None and not self._active:
            self._write_metrics(loss, {}, {})
            return
        engine, options = self._engine, self._engine.options.monitor
        record = self.timer.end(engine.global_steps)
        if not self._active:
            self._write_metrics(loss, {}, {})
            return
        if record is not None and clock is not None:
            self.report = {"step": record.step, "seconds": record.seconds, "bubble": self._bubble(record, clock)}
            self.report |= time_parts(record)
        if self.monitor.enabled:
            float(loss)  # on a GPU this waits for the step
        seconds = time.perf_counter() - self._began
        if self.mfu is not None:
            self.mfu.end_step(engine.batch.train)
        due = options.monitored and options.histograms.due(engine.global_steps)
        histograms = parameter_histograms(engine.data_axis, grid, options.histograms.bins) if due else {}
        self._write_metrics(loss, self._timings(seconds) if self.monitor.enabled else {}, histograms)
        if record is not None:
            self._show(record)
        self._end_memory()
        # The memory of the second step is known after its end.
        if options.json is not None and (engine.global_steps <= self._since + 2 or self.trace is not None):
            self._write_run(grid)
        self.trace = None
        self._prepare()

    # ---------------------------------------------------------------------------- defined by each kind of observer

    def _bubble(self, record: StepRecord, clock: Clock) -> float | None:
        """Return the bubble of a step; None for a plain module. Collective over the pipe axis."""
        return None

    def _about(self) -> dict[str, Any]:
        """Return the description of the program for a trace."""
        return {}

    def _begin_memory(self) -> None:
        """Count the memory of the next step, for ``run.json``."""

    def _end_memory(self) -> None:
        """Stop counting the memory for ``run.json`` after the step that ``_begin_memory`` prepared."""

    # ------------------------------------------------------------------------------------------- before a step

    def _begin(self) -> None:
        """Begin a step; record it if its record is wanted."""
        if self._active:
            self._began, self._tokens = time.perf_counter(), 0
            self.timer.begin()

    def _prepare(self) -> None:
        """Time the parts of the next step if its record is wanted."""
        options, step = self._engine.options.monitor, self._engine.global_steps + 1
        if options.trace.step == self._taken + 1 and self.trace is None:
            self.trace = _trace_file(options)
        # In the process's second step: the optimizer has made its state in the first.
        if options.json is not None and self._since and step == self._since + 1:
            self._begin_memory()
        self.timer.whole = options.breakdown or self.trace is not None

    # -------------------------------------------------------------------------------------------- after a step

    def _write_metrics(self, loss: Tensor, timings: Mapping[str, float], histograms: Mapping[str, Any]) -> None:
        engine = self._engine
        if self.monitor.needs(engine.global_steps):
            metrics = StepMetrics(
                step=engine.global_steps,
                samples=engine.global_samples,
                loss=loss,
                lr=self._rates,
                loss_scale=engine.loss_scale(),
                grad_norm=engine.grad_norm if self.monitor.enabled else None,
                skipped_steps=engine.skipped_steps,
                timings=timings,
                auxiliary=engine.auxiliary_losses(),
                metrics=engine.metrics,
                loads=engine.expert_loads(),
                histograms=histograms,
            )
            self.monitor.write_step(metrics)

    def _timings(self, seconds: float) -> dict[str, float]:
        """Return step time, throughput, memory, bubble and MFU of a step that took ``seconds``."""
        engine, grid = self._engine, self._grid
        recorded = self.report if self.report.get("step") == engine.global_steps else {}
        timings = {"step_time_ms": 1e3 * seconds, "samples_per_second": engine.batch.train / seconds}
        if self._tokens:
            timings["tokens_per_second"] = self._tokens * grid.data.size / seconds
        timings["peak_memory_gb"] = grid.peak_memory() / 1e9
        if recorded.get("bubble") is not None:
            timings["bubble"] = recorded["bubble"]
        mfu = None if self.mfu is None else self.mfu.utilization(seconds)
        if mfu is not None:
            timings["mfu"] = mfu
        if recorded and engine.options.monitor.breakdown:
            timings |= {f"elapsed_time_ms_{phase}": 1e3 * value for phase, value in phase_times(recorded).items()}
        return timings

    def _show(self, record: StepRecord) -> None:
        """Print the means of ``monitor.breakdown`` if it is due; write the trace if one is wanted."""
        options, grid = self._engine.options.monitor, self._engine.replicas.collective_grid
        if options.breakdown:
            self._means.add(time_parts(record), self.report["bubble"])
            if record.step % (options.print_every or _PRINT_EVERY) == 0:
                print_means(grid, self._means, record.step)
        if self.trace is not None:
            about = {"step": record.step, "bubble": self.report["bubble"], **self._about()}
            trace_step(grid, record, about, self.trace)

    def _write_run(self, grid: Grid) -> None:
        """Write ``run.json``. Collective; rank 0 writes."""
        flops, peak = (None, None) if self.mfu is None else (self.mfu.flops, self.mfu.peak)
        record = run_record(self._engine, grid, flops, peak, self._since)
        if record is not None:
            folder = Path(self._engine.options.monitor.json)
            with self._records.writing(str(folder / RUN)):
                write_run(folder, record)


class PipelineObserver(RecordingObserver):
    """Observer of a ``PipelineEngine``."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._record_memory: bool | None = None  # what engine.record_memory was before _begin_memory

    def before_step(self) -> None:
        """Begin a step; record it if its record is wanted."""
        self._begin()

    def measure_timeline(self, grid: Grid) -> Timeline:
        """Return the timeline of the program that just ran on the pipe ranks of a grid. Collective over them."""
        timer, clock = self.timer, self.timer.record()
        clock.settle()
        origin = clock.at(timer.origin)

        def at(mark: Mark) -> float:
            return clock.at(mark) - origin

        ops = tuple(Span(op, at(begin), at(end)) for op, _, begin, end in ops_of(timer.timed) if op.kind in COMPUTE)
        collectives = tuple(
            CollectiveSpan(kind, at(start), at(turn), at(end))
            for kind, about, start, turn, end in timer.timed
            if kind in COLLECTIVES and about.axis.name.split()[0] == "data"  # "data within" of ZeRO++ too
        )
        ranks = grid.pipe.all_gather_json((ops, collectives))
        return Timeline(
            tuple(tuple(Span(Op(*op), begin, end) for op, begin, end in spans) for spans, _ in ranks),
            tuple(tuple(CollectiveSpan(*span) for span in spans) for _, spans in ranks),
        )

    def _bubble(self, record: StepRecord, clock: Clock) -> float | None:
        """Return ``Timeline.bubble`` of this replica's pipe ranks: idle share of the busiest. Collective over pipe.

        Each rank contributes the time of its passes, the end of its last pass and the start of its first pass. The
        maximum busy time over the ranks is divided by the time from the first start to the last end.
        """
        spans = [s for s in record.slices if s.kind in COMPUTE]
        origin = clock.at(self.timer.origin)
        times = dict.fromkeys((s.start, s.end) for s in spans)  # the passes of a pair have the same, which counts once
        own_times = [sum(end - start for start, end in times), spans[-1].end - origin, origin - spans[0].start]
        most = torch.tensor(own_times, dtype=torch.float64, device=self._grid.device)
        self._grid.pipe.all_reduce(most, op="max")
        busy, last, first = most.tolist()
        return float(1 - busy / (last + first))

    def _timings(self, seconds: float) -> dict[str, float]:
        timings, engine = super()._timings(seconds), self._engine
        if "bubble" not in timings and engine.record_timeline and engine.timeline is not None:
            timings["bubble"] = engine.timeline.bubble
        return timings

    def _about(self) -> dict[str, Any]:
        program = self._engine.program
        return {"program": [list(map(str, ops)) for ops in program.ops], "schedule": program.schedule.to_dict()}

    def _begin_memory(self) -> None:
        self._record_memory, self._engine.record_memory = self._engine.record_memory, True

    def _end_memory(self) -> None:
        if self._record_memory is not None and self._engine.global_steps > self._since:
            self._engine.record_memory, self._record_memory = self._record_memory, None


class ModuleObserver(RecordingObserver):
    """Observer of a ``ModuleEngine``. A step begins where the one before ends."""

    def _prepare(self) -> None:
        super()._prepare()
        self._begin()


def make_monitor(options: Monitoring, grid: Grid, engine: Any) -> Monitor:
    """Return the monitor of a run: with writers on rank 0, an empty one elsewhere. Collective if numbers are written.

    Args:
        options: the options, which name the monitors.
        grid: the ranks.
        engine: a weak reference to the engine.

    Raises:
        ConfigError: on every rank, if a package is not installed or a folder cannot be made.
    """
    first = grid.rank == 0
    with agreed(grid, ConfigError) if options.monitored else nullcontext():
        writers = make_writers(options) if first else []
    mailbox = grid.mailbox() if options.monitored else None
    every, position = options.print_every if first else None, lambda: (engine.global_steps, engine.global_samples)
    return Monitor(writers, every, mailbox, position)


def _trace_file(options: Monitoring) -> Path:
    if options.trace.file is not None:
        return Path(options.trace.file)
    return Path(options.json or "") / TIMELINE


def require_writable(file: Path, what: str, grid: Grid) -> Path:
    """Make the folder of a file that rank 0 writes later, check that it can write, and return the path. Collective.

    Args:
        file: path of the file.
        what: name of the file or of its option, for the message.
        grid: the ranks.

    Raises:
        ConfigError: on every rank, if the file cannot be written.
    """
    with agreed(grid, ConfigError):
        if grid.rank == 0:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                there = file.exists()
                append(file, "")
                if not there:
                    file.unlink()
            except (OSError, ValueError) as error:  # ValueError: a character \0
                raise ConfigError(
                    f"{what} {str(file)!r} cannot be written, because of {error}: write another path"
                ) from error
    return file
