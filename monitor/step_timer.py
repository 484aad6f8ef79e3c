"""StepTimer: records one step of a rank, that is the engine's phases, the program's ops and the collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..grid import Grid
from ..grid.comm.clock import Clock, Mark
from ..grid.comm.step_recorder import StepRecorder
from ..pipe.program.timeline import OpMarks
from .method_hooks import hook_method
from .protocol import StepRecord
from .step_record import step_record


class StepTimer:
    """Times the phases of a step and its collectives, while hooks are installed.

    Args:
        grid: its axes are observed during a step that is recorded.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._removers: list[Callable[[], None]] = []
        self._phases: list[tuple[str, Mark, Mark]] = []  # kind, begin and end, of this step
        self._start: Mark | None = None  # of a step that is recorded; None: no phase is timed
        self._recorder: StepRecorder | None = None

    @property
    def clock(self) -> Clock | None:
        """Clock of the step that is being recorded; None if it is not recorded."""
        return None if self._recorder is None else self._recorder.clock

    @property
    def recorder(self) -> StepRecorder:
        """Recorder of this step's collectives. It starts with its first use in a step."""
        if self._recorder is None:
            self._recorder = StepRecorder(self._grid.traffic, self._grid.device)
            self._grid.observe(self._recorder)
        return self._recorder

    def install(self, methods: Sequence[tuple[Any, str, str]]) -> None:
        """Hook the methods to time, given as (owner, name, kind of the phase), unless hooks are installed already."""
        if not self._removers:
            self._removers = [hook_method(owner, name, partial(self._time, kind)) for owner, name, kind in methods]

    def remove(self) -> None:
        """Remove the hooks."""
        for remove in self._removers:
            remove()
        self._removers = []

    def begin(self) -> None:
        """Begin a step. It is recorded if hooks are installed."""
        self._start = None
        if self._removers:
            if self._recorder is not None:  # the last step failed
                self._grid.unobserve(self._recorder)
                self._recorder = None
            self._phases, self._start = [], self.recorder.clock.mark()

    def end(self, step: int, ops: Sequence[OpMarks]) -> StepRecord | None:
        """End a step. Return its record, or None if it was not recorded from its beginning.

        Args:
            step: number of the step.
            ops: marks of the program's ops.
        """
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return None
        end = recorder.clock.mark()
        self._grid.unobserve(recorder)
        start, self._start = self._start, None
        if start is None:
            return None
        return step_record(step, recorder.clock, (start, end), self._phases, ops, recorder.collectives)

    def _time(self, kind: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        clock = self.clock
        if self._start is None or clock is None:
            return call(*args, **kwargs)
        phases, begin = self._phases, clock.mark()
        try:
            return call(*args, **kwargs)
        finally:
            phases.append((kind, begin, clock.mark()))
