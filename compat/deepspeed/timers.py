"""Timers of ``engine.timers`` and ``engine.tput_timer``, with DeepSpeed's methods."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping


class WallClockTimer:
    """Timer that is started and stopped any number of times.

    Args:
        name: name in the log.
        synchronize: waits until the device has finished its work.
    """

    def __init__(self, name: str, synchronize: Callable[[], None]) -> None:
        self.name_, self._synchronize = name, synchronize
        self.started_ = False
        self._total, self._count, self._began = 0.0, 0, 0.0

    def start(self) -> None:
        """Start to measure."""
        self._synchronize()
        self.started_, self._began = True, time.perf_counter()

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """Stop, and add the time since ``start``; with ``reset`` it replaces the times before."""
        self._synchronize()
        spent = 1000 * (time.perf_counter() - self._began)
        self._total, self._count = (spent, 1) if reset else (self._total + spent, self._count + 1)
        self.started_ = False

    def reset(self) -> None:
        """Set the time to 0."""
        self._total, self._count, self._began = 0.0, 0, time.perf_counter()

    def elapsed(self, reset: bool = True) -> float:
        """Return the milliseconds so far, also while the timer runs."""
        running = self.started_
        if running:
            self.stop()
        total = self._total
        if reset:
            self.reset()
        if running:
            self.start()
        return total

    def mean(self) -> float:
        """Return the mean milliseconds between a start and a stop."""
        return self._total / self._count if self._count else 0.0


class WallClockTimers:
    """Timers by name: ``timers("data").start()``. DeepSpeed's ``SynchronizedWallClockTimer``.

    Args:
        synchronize: waits until the device has finished its work. None: the device is not waited for.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self._synchronize = synchronize or (lambda: None)
        self.timers: dict[str, WallClockTimer] = {}

    def __call__(self, name: str) -> WallClockTimer:
        """Return the timer of a name, made when it is first asked for."""
        if name not in self.timers:
            self.timers[name] = WallClockTimer(name, self._synchronize)
        return self.timers[name]

    def has_timer(self, name: str) -> bool:
        """Return True if there is a timer of that name."""
        return name in self.timers

    def get_timers(self) -> Mapping[str, WallClockTimer]:
        """Return all timers by name."""
        return self.timers

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Return the mean milliseconds of timers, divided by ``normalizer``."""
        means = {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}
        for name in means if reset else ():
            self.timers[name].reset()
        return means

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: object = None,
    ) -> None:
        """Log the milliseconds of timers. ``memory_breakdown`` and ``ranks`` have no effect."""
        known = [name for name in names if name in self.timers]
        parts = [f"{name}: {self.timers[name].elapsed(reset=reset) / normalizer:.2f}" for name in known]
        logging.getLogger("triax").info("time (ms) | %s", " | ".join(parts))


class ThroughputTimer:
    """Samples per second over steps: ``engine.tput_timer``.

    Args:
        batch_size: samples of a step, over all replicas.
        start_step: the first step that counts: the first ones are slow.

    Attributes:
        epoch_count, micro_step_count, global_step_count: numbers of epochs, microbatches and steps so far.
        total_elapsed_time: seconds of the counted steps.
    """

    def __init__(self, batch_size: int, start_step: int = 2) -> None:
        self.batch_size, self.start_step = batch_size, start_step
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = self._samples = self._step = 0.0
        self._began: float | None = None

    def update_epoch_count(self) -> None:
        """Count an epoch, and begin to count its microbatches."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Begin a microbatch, unless it has begun."""
        self._began = self._began or time.perf_counter()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """End a microbatch, and with ``global_step`` a step."""
        if self._began is None:
            return
        self._step += time.perf_counter() - self._began
        self._began = None
        self.micro_step_count += 1
        if global_step:
            self.global_step_count += 1
            if self.global_step_count > self.start_step:
                self.total_elapsed_time += self._step
                self._samples += self.batch_size
            self._step = 0.0

    def avg_samples_per_sec(self) -> float:
        """Return the samples per second of the counted steps; -inf before there is one."""
        return self._samples / self.total_elapsed_time if self.total_elapsed_time else float("-inf")
