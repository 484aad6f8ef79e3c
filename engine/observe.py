"""What is seen of the steps: who wants something recorded gets it here, and where nobody does nothing is installed.

An ``Observer`` stands where an engine has its monitor, and is called at the end of each step, on every rank. For a step
that is to be recorded it taps what the engine calls (``tap.py``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..grid.clock import Clock
from ..grid.recorded import start_recording, stop_recording
from .config import Config, ConfigError
from .monitor import Event, Monitor, folder_of
from .report_read import TIMELINE
from .run_record import write_run
from .slices import StepRecord, parts, step_record
from .tap import Stopwatch, tap
from .trace import gather_trace, write_trace
from .utilisation import FlopCount, known_peak, tokens_in
from .wall_clock import Means, table

_PRINT_EVERY = 10  # steps, as DeepSpeed has it, where wall_clock_breakdown is wanted and steps_per_print is not given
_COUNTED = 2  # the step in which memory is counted for run.json: the optimizer has its state by then


class Observed:
    """What an engine says of its steps. Both engines have it."""

    _clock: Clock | None = None  # of the step that is being recorded
    _monitor: Any = None
    config: Config

    def wall_clock_breakdown(self) -> bool:
        """Whether every step is recorded."""
        return self.config.wall_clock_breakdown

    def time_report(self) -> dict[str, Any]:
        """Where this rank's time went in the last recorded step: axis -> part -> seconds.

        They add up to ``seconds``. Steps are recorded under ``wall_clock_breakdown``, and where a trace is made.
        ``bubble`` is the idle share of the busiest pipe rank, as ``Timeline.bubble``; None for a plain module. {}
        before any.
        """
        return dict(self._monitor.report) if isinstance(self._monitor, Observer) else {}

    def record_trace(self, file: str | Path) -> None:
        """Write a trace of the next step, of all ranks, into ``file``, for ui.perfetto.dev.

        Every rank calls this, between two steps.

        Raises:
            ConfigError: on every rank: its folder cannot be made.
        """
        observer = observer_of(self)
        observer.trace = _made(Path(file), self)
        observer.prepare()

    @property
    def monitor(self) -> Events:
        """What writes to the monitors: ``engine.monitor.write_events([("Validation/loss", loss, samples)])``."""
        return Events(self)


class Events:
    """The monitors, as DeepSpeed's ``engine.monitor``; on ranks other than 0 it takes events and writes nothing."""

    def __init__(self, engine: Observed) -> None:
        self._engine = engine

    @property
    def enabled(self) -> bool:
        """Whether this rank writes."""
        return self._of() is not None

    def write_events(self, events: Sequence[Event]) -> None:
        """Write numbers, each with its name and the samples that were trained on (``engine.global_samples``)."""
        monitor = self._of()
        if monitor is not None:
            monitor.write([(name, float(value), int(samples)) for name, value, samples in events])

    def _of(self) -> Monitor | None:
        found = self._engine._monitor
        found = found.monitor if isinstance(found, Observer) else found
        return found if found is not None and found.writes else None


def observe(engine: Any) -> None:
    """Have recorded and written what the engine's configuration asks for. Collective where it asks for something.

    Raises:
        ConfigError: on every rank: the timeline's folder cannot be made.
    """
    config = engine.config
    if config.wall_clock_breakdown or config.timeline.step is not None or config.monitored:
        observer_of(engine).prepare()
    if config.timeline.step is not None:
        _made(_trace_file(config), engine)
    if config.json_monitor.enabled:
        write_run(engine, folder_of(config.json_monitor))


def observer_of(engine: Any) -> Observer:
    """The engine's observer, made where there is none."""
    if not isinstance(engine._monitor, Observer):
        engine._monitor = Observer(engine, engine._monitor)
    observer: Observer = engine._monitor
    return observer


class Observer:
    """Sees an engine's steps.

    Args:
        engine: an ``Engine`` or a ``ModuleEngine``.
        monitor: what writes, on rank 0.

    Attributes:
        monitor: the same.
        trace: where to write a trace of the step to come.
        report: of the last recorded step: see ``Observed.time_report``.
        flops: the model's, of a step; None where they were not counted.
        peak: TFLOP/s of one device, where that is known.
    """

    def __init__(self, engine: Any, monitor: Monitor | None) -> None:
        config: Config = engine.config
        self._engine, self._grid, self.monitor = engine, engine.grid, monitor
        self._pipelined = "_executor" in vars(engine)
        self._watch, self._means = Stopwatch(), Means()
        self.report: dict[str, Any] = {}
        self.trace: Path | None = None
        self.flops: float | None = None
        self._writes = config.monitored
        self._every = (config.steps_per_print or _PRINT_EVERY) if config.wall_clock_breakdown else 0
        self._began, self._start = time.perf_counter(), None
        self._tokens = 0
        self._remembered: bool | None = None  # what record_memory was, while a step is counted
        self.peak = self._agreed_peak() if self._writes else None
        self._count = FlopCount() if self.peak is not None else None
        if self._pipelined:
            tap(engine, "_train_batch", self._step)
        if self._writes and self._grid.rank == 0:
            tap(*((engine._feed, "fetch") if self._pipelined else (engine, "forward")), self._see_batch)
        if self._count is not None:
            owner = (engine.module, "run_stage") if self._pipelined else (engine, "forward")
            self._uncount = tap(*owner, self._counted)

    def prepare(self) -> None:
        """Install what the next step needs, and take away what it does not."""
        engine, config = self._engine, self._engine.config
        step = engine.global_steps + 1
        if config.timeline.step == step and self.trace is None:
            self.trace = _trace_file(config)
        if config.json_monitor.enabled and step == _COUNTED and self._pipelined:
            self._remembered, engine.record_memory = engine.record_memory, True
        if config.wall_clock_breakdown or self.trace is not None:
            self._watch.install(self._phases())
        else:
            self._watch.remove()
        if not self._pipelined:
            self._begin()

    def __call__(self, engine: Any, loss: Tensor) -> None:
        """The engine has taken a step, with this loss."""
        record = self._close() if self._start is not None else None
        if self._writes and self._grid.rank == 0:
            float(loss)  # on a GPU this waits for the step
        seconds = time.perf_counter() - self._began
        if self._count is not None:
            self._sum_flops(self._count)
        if self.monitor is not None:
            self.monitor(engine, loss, self._figures(seconds) if self._writes else None)
        if record is not None:
            self._use(record)
        if self._remembered is not None and engine.global_steps >= _COUNTED:
            engine.record_memory, self._remembered = self._remembered, None
        if engine.config.json_monitor.enabled and (engine.global_steps <= _COUNTED or self.trace is not None):
            write_run(engine, folder_of(engine.config.json_monitor), self.flops, self.peak)
        self.trace, self._tokens = None, 0
        self.prepare()

    # ------------------------------------------------------------------------------------------------- recording

    def _step(self, call: Callable[..., Any], *args: Any) -> Any:
        self._begin()
        return call(*args)

    def _begin(self) -> None:
        """A step begins."""
        self._began, self._start = time.perf_counter(), None
        if self._watch.installed:
            clock = start_recording(self._grid)
            self._engine._clock = clock
            self._watch.start(clock)
            self._start = clock.mark()

    def _close(self) -> StepRecord:
        """The step is over: what was marked."""
        engine, clock = self._engine, self._watch.clock
        assert clock is not None
        end = clock.mark()
        stop_recording(self._grid)
        self._watch.stop()
        engine._clock = None
        ops = engine._executor.marks if self._pipelined else []
        flights = self._grid.traffic.flights or []
        record = step_record(engine.global_steps, clock, (self._start, end), self._watch.phases, ops, flights)
        self._start = None
        self.report = {"step": record.step, "seconds": record.seconds, "bubble": self._bubble(record, clock)}
        self.report |= parts(record)
        return record

    def _bubble(self, record: StepRecord, clock: Clock) -> float | None:
        """As ``Timeline.bubble``, of this replica's pipe ranks, without collecting their timelines. Collective."""
        if not self._pipelined:
            return None
        spans = [s for s in record.slices if s.kind in ("F", "B", "I", "W")]
        origin = clock.at(self._engine._executor.origin)
        most = [sum(s.end - s.start for s in spans), spans[-1].end - origin, origin - spans[0].start]
        found = torch.tensor(most, dtype=torch.float64, device=self._grid.device)
        self._grid.pipe.all_reduce(found, op="max")
        busy, last, first = found.tolist()
        return float(1 - busy / (last + first))

    def _use(self, record: StepRecord) -> None:
        """Print the table, write the trace."""
        local, step = self._engine.local, record.step
        grid = self._grid if local is None else local.asked
        if self._every:
            self._means.add(parts(record), self.report["bubble"])
            if step % self._every == 0:
                means = grid.world.all_gather_object(self._means.take())
                if grid.rank == 0:
                    from rich.console import Console

                    stages = [grid.topology.coordinate(rank)._asdict()["pipe"] for rank in range(grid.size)]
                    Console(width=70 + 9 * grid.pipe.size).print(table(means, stages, step))
        if self.trace is not None:
            about: dict[str, Any] = {"step": step, "bubble": self.report["bubble"]}
            if self._pipelined:
                program = self._engine._training
                about |= {"program": [list(map(str, ops)) for ops in program.ops]}
                about |= {"schedule": program.schedule.to_dict()}
            trace = gather_trace(grid, record, about)
            if trace is not None:
                try:
                    write_trace(trace, self.trace)
                except OSError as error:
                    logging.getLogger("triax").warning("the trace was not written: %s", error)

    def _phases(self) -> list[tuple[Any, str, str]]:
        """What is timed of a step: owner, method, kind."""
        engine = self._engine
        common = (engine._replicas, "step", "optimizer")
        if self._pipelined:
            first = [(engine._feed, "fetch", "batch"), (engine._executor, "run", "program")]
            return [*first, (engine._replicas, "finish", "reduce"), common]
        passes = [(engine, "forward", "forward"), (engine, "backward", "backward")]
        return [*passes, (engine._passes, "close", "reduce"), common]

    # --------------------------------------------------------------------------------------------------- figures

    def _figures(self, seconds: float) -> dict[str, float]:
        """What monitors are told beside loss, learning rate, scale and norm."""
        engine, grid = self._engine, self._grid
        recorded = self.report if self.report.get("step") == engine.global_steps else {}
        figures = {"step_time_ms": 1e3 * seconds, "samples_per_second": engine.batch.train / seconds}
        if self._tokens:
            figures["tokens_per_second"] = self._tokens * grid.data.size / seconds
        figures["peak_memory_gb"] = grid.peak_memory() / 1e9
        bubble = recorded.get("bubble")
        if bubble is None and self._pipelined and engine.record_timeline and engine.timeline is not None:
            bubble = engine.timeline.bubble
        if bubble is not None:
            figures["bubble"] = bubble
        if self.flops and self.peak:
            figures["mfu"] = self.flops / seconds / (self.peak * 1e12 * grid.size)
        if recorded and engine.config.wall_clock_breakdown:
            figures |= {f"elapsed_time_ms_{part}": 1e3 * value for part, value in _deepspeeds(recorded).items()}
        return figures

    def _see_batch(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        if self._pipelined:
            self._tokens = sum(tokens_in(microbatch.inputs) for microbatch in result[0])
        elif self._engine.module.training:
            self._tokens += tokens_in((*args, *kwargs.values()))
        return result

    def _counted(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._count is None or not self._engine.module.training:
            return call(*args, **kwargs)
        with self._count:
            return call(*args, **kwargs)

    def _sum_flops(self, count: FlopCount) -> None:
        """After the first step: the model's FLOPs of a step, over all ranks; from here on nothing is counted."""
        total = torch.tensor([float(count.flops)], dtype=torch.float64, device=self._grid.device)
        self._grid.world.all_reduce(total)
        self.flops, self._count = 3.0 * float(total), None
        self._uncount()

    def _agreed_peak(self) -> float | None:
        """As the configuration has it; or that of the slowest rank, where every rank's is known. Collective."""
        engine = self._engine
        if engine.config.peak_tflops is not None:
            return float(engine.config.peak_tflops)
        parameter = next((p for p in engine.module.parameters() if p.is_floating_point()), None)
        mine = known_peak(self._grid.device_name(), torch.float32 if parameter is None else parameter.dtype)
        least = torch.tensor([mine or 0.0], dtype=torch.float64, device=self._grid.device)
        self._grid.world.all_reduce(least, op="min")
        return float(least) or None


def _deepspeeds(report: dict[str, Any]) -> dict[str, float]:
    """The times of a step under DeepSpeed's names."""
    compute, data = report.get("compute", {}), report.get("data", {})
    inner = sum(compute.get(part, 0.0) for part in ("backward", "input gradient", "weight gradient"))
    reduce = data.get("reduce", 0.0)
    return {
        "forward": compute.get("forward", 0.0),
        "backward": inner + reduce,
        "backward_inner": inner,
        "backward_allreduce": reduce,
        "step": compute.get("optimizer", 0.0) + data.get("gather", 0.0),
    }


def _trace_file(config: Config) -> Path:
    if config.timeline.file is not None:
        return Path(config.timeline.file)
    return folder_of(config.json_monitor) / TIMELINE if config.json_monitor.enabled else Path(TIMELINE)


def _made(file: Path, engine: Any) -> Path:
    """The same path, whose folder is there. Collective."""
    problem = None
    if engine.grid.rank == 0:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"the timeline {file} cannot be written: {error}"
    problem = engine.grid.world.all_gather_object(problem)[0]
    if problem is not None:
        raise ConfigError(problem)
    return file
