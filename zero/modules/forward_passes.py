"""Forward passes of a module that is cut into units, as the backward passes of a step read them: from the end.

Unit 0 is the module, and unit 2 runs within unit 1:

    begun       0  1  2  3     units in the order in which they began
    ended       2  1  3  0     units in the order in which they ended
    backward    0  3  1  2     ``left`` is the number of runs in ``ended`` that the backward pass has not reached
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple
from weakref import WeakSet


class PassState(Enum):
    """State of one forward pass.

    state        the forward pass
    RUNNING      runs, or has ended with nothing that a backward pass can reach
    WAITING      has ended, and a backward pass of it is expected
    REACHED      is one of those through which the running backward pass goes
    UNEXPECTED   may be reached by a backward pass, but none is expected
    PAST         its backward pass has ended

    method of ``ForwardPasses``    the state before                        after
    end                            RUNNING                                 WAITING, RUNNING; with unknown outputs
                                                                           alone UNEXPECTED
    reach                          all                                     REACHED
    finish                         WAITING, REACHED                        PAST
    forget                         WAITING, REACHED                        UNEXPECTED

    A PAST pass is reached again if the user retains the graph. A RUNNING one is reached by ``torch.autograd.grad``
    within the model: then ``end`` begins with REACHED, PAST or UNEXPECTED, and leads to the same states.
    """

    RUNNING = auto()
    WAITING = auto()
    REACHED = auto()
    UNEXPECTED = auto()
    PAST = auto()


RUNNING, WAITING, REACHED, UNEXPECTED, PAST = PassState


class EndedRun(NamedTuple):
    """One run of a unit, whose outputs a backward pass can reach.

    Attributes:
        unit: number of the unit.
        begun: index of the run in ``ForwardPass.begun``.
    """

    unit: int
    begun: int


class ForwardPass:
    """Runs of units in one forward pass.

    Attributes:
        state: the state of the pass.
        begun: units in the order in which they began.
        ended: runs that a backward pass can reach, in the order in which they ended.
        left: number of ``ended`` that the backward pass has not reached; 0 while the forward pass runs.
    """

    def __init__(self) -> None:
        self.state = RUNNING
        self.begun: list[int] = []
        self.ended: list[EndedRun] = []
        self.left = 0


class ForwardPasses:
    """Forward passes of a step that backward passes may reach.

    Args:
        expected: number of backward passes of a step: at most so many passes are WAITING, the last ones.

    Attributes:
        since_backward: number of forward passes that a backward pass can reach, since the last backward pass.
    """

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self._kept: list[ForwardPass] = []  # WAITING passes as they ended, and REACHED ones as they were reached
        self._known: WeakSet[ForwardPass] = WeakSet()  # all that have ended, as long as their graphs live
        self.since_backward = 0

    def having(self, state: PassState) -> list[ForwardPass]:
        """Return the WAITING passes in the order in which they ended, or the REACHED ones as they were reached."""
        return [forward for forward in self._kept if forward.state is state]

    def end(self, forward: ForwardPass, trains: bool) -> None:
        """End a forward pass.

        Args:
            forward: the pass.
            trains: a backward pass may reach it, also if its outputs are objects of unknown types.
        """
        forward.left = len(forward.ended)
        if forward.left:
            self.since_backward += 1
            self._set(forward, WAITING)
            self.forget(self.having(WAITING)[: -self._expected])
        elif trains:
            self._set(forward, UNEXPECTED)

    def reach(self, forward: ForwardPass) -> None:
        """Note that the running backward pass has reached an output of a pass."""
        if forward.state is not REACHED:
            self._set(forward, REACHED)

    def finish(self, passes: list[ForwardPass]) -> None:
        """Note that the backward pass of some passes has ended."""
        self.since_backward = 0
        for forward in passes:
            self._set(forward, PAST)

    def forget(self, passes: list[ForwardPass]) -> None:
        """Expect no backward pass of some passes any more."""
        for forward in passes:
            self._set(forward, UNEXPECTED)

    def runs(self, unit: int) -> int:
        """Return the number of a unit's runs in all passes that a backward pass may reach."""
        return sum(forward.begun.count(unit) for forward in self._known if forward.state is not PAST)

    def _set(self, forward: ForwardPass, state: PassState) -> None:
        if forward in self._kept:
            self._kept.remove(forward)
        if state in (WAITING, REACHED):
            self._kept.append(forward)
        self._known.add(forward)
        forward.state = state
