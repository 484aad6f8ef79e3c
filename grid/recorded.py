"""Recording when collectives start, are waited for and end: while it is on, a grid's axes are of another class.

So an axis that is not recorded has nothing to ask itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .axis import Axis, Pending, done
from .clock import Clock
from .traffic import Flight

if TYPE_CHECKING:
    from .grid import Grid


class RecordedAxis(Axis):
    """An axis that leaves a ``Flight`` of each collective in ``traffic.flights``, with marks of ``traffic.clock``.

    Attributes:
        was: the class that the axis has when it is not recorded.
    """

    was: type[Axis] = Axis

    def all_reduce(self, tensor: Tensor, op: str = "sum", async_op: bool = False) -> Pending:
        """As ``Axis.all_reduce``."""
        started = super().all_reduce
        return self._watched("all_reduce", async_op, lambda: started(tensor, op, async_op))

    def all_gather(self, output: Tensor, tensor: Tensor, async_op: bool = False) -> Pending:
        """As ``Axis.all_gather``."""
        started = super().all_gather
        return self._watched("all_gather", async_op, lambda: started(output, tensor, async_op))

    def reduce_scatter(self, output: Tensor, tensor: Tensor, async_op: bool = False) -> Pending:
        """As ``Axis.reduce_scatter``."""
        started = super().reduce_scatter
        return self._watched("reduce_scatter", async_op, lambda: started(output, tensor, async_op))

    def all_to_all(self, output: Tensor, tensor: Tensor, async_op: bool = False) -> Pending:
        """As ``Axis.all_to_all``."""
        started = super().all_to_all
        return self._watched("all_to_all", async_op, lambda: started(output, tensor, async_op))

    def broadcast(self, tensor: Tensor, source: int = 0, async_op: bool = False) -> Pending:
        """As ``Axis.broadcast``."""
        started = super().broadcast
        return self._watched("broadcast", async_op, lambda: started(tensor, source, async_op))

    def barrier(self) -> None:
        """As ``Axis.barrier``."""
        self._watched("barrier", False, super().barrier)

    def _watched(self, collective: str, async_op: bool, start: Callable[[], Any]) -> Any:
        if self.size == 1 or self.traffic.flights is None:
            return start()
        flights, mark = self.traffic.flights, self.traffic.clock.mark
        sent, began = self.traffic.bytes(self.name, collective), mark()
        pending = start()
        size = self.traffic.bytes(self.name, collective) - sent
        if async_op and not done(pending):
            return _Watched(pending, self.name, collective, began, size, flights, mark)
        flights.append(Flight(self.name, collective, began, began, mark(), size))
        return pending


class _Watched:
    """A collective that is under way, and its times."""

    def __init__(
        self,
        work: Pending,
        axis: str,
        collective: str,
        start: Any,
        size: float,
        flights: list[Flight],
        mark: Callable[[], Any],
    ) -> None:
        self._work, self._name, self._start, self._size = work, (axis, collective), start, size
        self._flights, self._mark = flights, mark

    def wait(self) -> None:
        waited = self._mark()
        self._work.wait()
        self._flights.append(Flight(*self._name, self._start, waited, self._mark(), self._size))


def start_recording(grid: Grid) -> Clock:
    """From here on, and until ``stop_recording``, the grid's axes record; what was recorded before is forgotten."""
    for axis in grid.axes():
        if not isinstance(axis, RecordedAxis):
            axis.__class__ = _recorded(type(axis))  # type: ignore[arg-type]
    grid.traffic.clock, grid.traffic.flights = Clock(grid.device), []
    return grid.traffic.clock


def stop_recording(grid: Grid) -> None:
    """No more; ``grid.traffic.flights`` keeps what was recorded."""
    for axis in grid.axes():
        if isinstance(axis, RecordedAxis):
            axis.__class__ = axis.was  # type: ignore[assignment]


@cache
def _recorded(kind: Any) -> Any:
    """The class of axes that are recorded, and do besides what they did: an axis may be logged too (``logged.py``)."""
    return RecordedAxis if kind is Axis else type(f"Recorded{kind.__name__}", (RecordedAxis, kind), {"was": kind})
