"""StepTimer: records one step of a rank, that is the engine's phases, the program's ops and the collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from ...grid import Grid
from ...grid.comm.clock import Clock, Mark
from ...grid.comm.spans import OpenSpan, Spans
from ...pipe.program.ops import KINDS
from ...pipe.program.timeline import OpMarks
from .records import StepRecord
from .step_record import TimedCollective, step_record

_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier")


class StepTimer:
    """Reader of spans that times a step, or the program of a step.

    Args:
        grid: its collectives are timed, but those that its traffic counter does not count.
        spans: the engine's stream.
        phases: the parts of a step to time.

    Attributes:
        whole: record each step that begins from now on.
        clock: the clock of the step that is being recorded; None if it is not recorded.
        origin: mark of the time at which the program started, after a barrier over the ranks of this pipeline.
        ops: the ops of the program, in the order in which they ended.
        collectives: the collectives so far, in the order in which they ended.
    """

    def __init__(self, grid: Grid, spans: Spans, phases: Sequence[str]) -> None:
        self._grid, self._spans, self._phase_names = grid, spans, phases
        self.whole = False
        self.clock: Clock | None = None
        self._mark: Callable[[], Mark] = lambda: 0.0  # of the clock
        self._start: Mark | None = None  # of a whole step that is recorded
        self.origin: Mark = 0.0
        self._phases: list[tuple[str, Mark, Mark]] = []  # kind, begin and end
        self.ops: list[OpMarks] = []
        self.collectives: list[TimedCollective] = []
        self._stop: list[Callable[[], None]] = []

    def record(self) -> Clock:
        """Record this step from now on, if it is not recorded yet; return its clock."""
        if self.clock is None:
            self.clock = Clock(self._grid.device)
            self._mark = self.clock.mark
            self._phases, self.ops, self.collectives = [], [], []
            phases, ops = self._spans.read(self._phase, *self._phase_names), self._spans.read(self._op, *KINDS, "pair")
            self._stop = [phases, ops, self._grid.spans.read(self._collective, *_COLLECTIVES)]
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
        end, (clock, start) = self._mark(), self._end()
        if clock is None or start is None:
            return None
        return step_record(step, clock, (start, end), self._phases, self.ops, self.collectives)

    def _end(self) -> tuple[Clock | None, Mark | None]:
        """Record no more. Return the clock, and the beginning of a whole step."""
        for stop in self._stop:
            stop()
        ended = self.clock, self._start
        self._stop, self.clock, self._start = [], None, None
        return ended

    @contextmanager
    def _phase(self, span: OpenSpan) -> Iterator[None]:
        phases, begin = self._phases, self._mark()
        if span.kind == "program":
            self.ops = []
            self._grid.pipe.barrier()
            self.origin = self._mark()
        try:
            yield
        finally:
            phases.append((span.kind, begin, self._mark()))

    @contextmanager
    def _op(self, span: OpenSpan) -> Iterator[None]:
        marks = [self._mark()]
        span.at_turn(lambda: marks.append(self._mark()))
        yield
        end, ops = self._mark(), (span.about,)
        if span.kind == "pair":
            ops = span.about
            del self.ops[-2:]  # the times of the two are those of the pair
        self.ops += [OpMarks(op, marks[0], marks[-1], end) for op in ops]

    def _collective(self, span: OpenSpan) -> AbstractContextManager[None] | None:
        return None if self._grid.traffic.suspended else self._timed(span)

    @contextmanager
    def _timed(self, span: OpenSpan) -> Iterator[None]:
        operation, marks, collectives = span.about, [self._mark()], self.collectives
        span.at_turn(lambda: marks.append(self._mark()))
        yield
        collectives.append(
            TimedCollective(operation.axis.name, operation.name, marks[0], marks[-1], self._mark(), operation.sent)
        )
