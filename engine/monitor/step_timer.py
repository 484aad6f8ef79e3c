"""StepTimer: records one step of a rank, that is the engine's phases, the program's ops and the collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from ...grid import Grid
from ...grid.comm.clock import Clock, Mark
from ...grid.comm.spans import OpenSpan, Spans
from ...pipe.program.ops import KINDS
from .records import StepRecord
from .step_record import COLLECTIVES, TimedSpan, step_record

_PHASES = ("batch", "program", "forward", "backward", "reduce", "optimizer")
_OPS = (*KINDS, "pair")


class StepTimer:
    """Reader of spans that times a step, or the program of a step.

    Args:
        grid: its collectives are timed, but those that its traffic counter does not count.
        spans: the engine's stream.

    Attributes:
        whole: record each step that begins from now on.
        clock: the clock of the step that is being recorded; None if it is not recorded.
        origin: mark of the time at which the program started, after a barrier over the ranks of this pipeline.
        timed: the spans so far, in the order in which they ended.
    """

    def __init__(self, grid: Grid, spans: Spans) -> None:
        self._grid, self._spans = grid, spans
        self.whole = False
        self.clock: Clock | None = None
        self._start: Mark | None = None  # of a whole step that is recorded
        self.origin: Mark = 0.0
        self.timed: list[TimedSpan] = []
        self._stops: list[Callable[[], None]] = []

    def record(self) -> Clock:
        """Record this step from now on, if it is not recorded yet; return its clock."""
        if self.clock is None:
            self.clock, self.timed = Clock(self._grid.device), []
            self._stops = [
                self._spans.read(self._time, *_PHASES, *_OPS),
                self._grid.spans.read(self._collective, *COLLECTIVES),
            ]
        return self.clock

    def begin(self) -> None:
        """Begin a step. It is recorded if ``whole`` is set."""
        self._end()  # of a step that failed
        if self.whole:
            self._start = self.record().mark()

    def end(self, step: int) -> StepRecord | None:
        """End a step. Return its record, or None if it was not recorded from its beginning.

        Args:
            step: number of the step.
        """
        clock, start = self.clock, self._start
        end = None if clock is None else clock.mark()
        self._end()
        return None if clock is None or start is None else step_record(step, clock, (start, end), self.timed)

    def _end(self) -> None:
        """Record no more."""
        for stop in self._stops:
            stop()
        self._stops, self.clock, self._start = [], None, None

    def _collective(self, span: OpenSpan) -> AbstractContextManager[None] | None:
        return None if self._grid.traffic.suspended else self._time(span)

    @contextmanager
    def _time(self, span: OpenSpan) -> Iterator[None]:
        assert self.clock is not None  # of the step that is being recorded
        mark, timed = self.clock.mark, self.timed
        marks = [mark()]
        span.at_turn(lambda: marks.append(mark()))
        if span.kind == "program":
            timed[:] = [before for before in timed if before.kind not in _OPS]  # of a run that is repeated
            self._grid.pipe.barrier()
            self.origin = mark()
        yield
        timed.append(TimedSpan(span.kind, span.about, marks[0], marks[-1], mark()))
