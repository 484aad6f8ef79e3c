"""StepTimer: records one step of a rank, that is the engine's phases, the program's ops and the collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from ...base.parts import Parts
from ...grid import Grid
from ...grid.comm.clock import Clock, Mark
from ...grid.comm.step_recorder import StepRecorder
from ...pipe.program.timeline import OpMarks
from .records import StepRecord
from .step_record import step_record


class StepTimer:
    """Times phases of a step and its collectives, while it is installed.

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

    def install(self, parts: Parts, phases: Sequence[str]) -> None:
        """Time these parts of a step, unless they are timed already."""
        if not self._removers:
            self._removers = [parts.watch(phase, partial(self._timed, phase)) for phase in phases]

    def remove(self) -> None:
        """Time no part."""
        for remove in self._removers:
            remove()
        self._removers = []

    def begin(self) -> None:
        """Begin a step. It is recorded if its parts are timed."""
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

    @contextmanager
    def _timed(self, kind: str) -> Iterator[None]:
        clock = self.clock
        if self._start is None or clock is None:
            yield
            return
        phases, begin = self._phases, clock.mark()
        try:
            yield
        finally:
            phases.append((kind, begin, clock.mark()))
