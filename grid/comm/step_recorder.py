"""Recorder of a step's collectives: when each began, was waited for and ended."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .clock import Clock, Mark
from .observer import ObservedAxis, Observer
from .traffic import Traffic

_COLLECTIVES = frozenset(("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier"))


class TimedCollective(NamedTuple):
    """A collective and its times, as marks of ``StepRecorder.clock``.

    Between ``start`` and ``waited`` the rank did something else; from there to ``end`` it waited.
    """

    axis: str
    collective: str
    start: Mark
    waited: Mark
    end: Mark
    bytes: float  # that this rank sent in it


class StepRecorder(Observer):
    """Observer that records the collectives of a step, but no messages between stages.

    Args:
        traffic: the traffic counter of the observed axes. Collectives that it does not count are not recorded.
        device: the rank's device.

    Attributes:
        clock: the clock that made the marks in ``collectives``.
        collectives: the recorded collectives, in the order in which they ended.
    """

    def __init__(self, traffic: Traffic, device: torch.device) -> None:
        self.clock = Clock(device)
        self.collectives: list[TimedCollective] = []
        self._traffic = traffic

    def begin(self, axis: ObservedAxis, op: str, size: int) -> tuple[str, str, Mark] | None:
        """Return the axis, the operation and a mark of the time at which the collective starts."""
        if op not in _COLLECTIVES or self._traffic.suspended:
            return None
        return axis.name, op, self.clock.mark()

    def now(self) -> Mark:
        """Return a mark of the present time."""
        return self.clock.mark()

    def end(self, begun: Any, waited: Mark | None, sent: float) -> None:
        """Append the collective and the marks of its start, wait and end to ``collectives``."""
        axis, op, start = begun
        self.collectives.append(
            TimedCollective(axis, op, start, start if waited is None else waited, self.clock.mark(), sent)
        )
