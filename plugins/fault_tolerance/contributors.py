"""Replicas that take part in a step: those that take shares of its samples, and those whose gradients are in its sum.

              takes a share                          is in the sum
    live      contributors of the step's first       contributors of the round that takes it: those that are left
              round
    replay    members of the history                 those that the history counts

A spare replica (``fault_tolerance.active``) and a newcomer are in the round, and contribute nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...options.fault_tolerance import FaultTolerance
from .meeting import Decision, Report, Round, decide
from .membership import History
from .phase import Phase


class Contributors:
    """Choice of the replicas that take part in a step, equal on all replicas.

    Args:
        options: the options.
        history: the history of a run that is replayed; None: none is.
    """

    def __init__(self, options: FaultTolerance, history: History | None) -> None:
        self._options, self._history = options, history

    def planned(self, phase: Phase, round_: Round) -> tuple[str, ...]:
        """Return the replicas that take shares of the samples of a round's step, in their order."""
        if self._history is not None:
            return self._history.members(round_.step)
        assert phase.first is not None  # since the first round
        return phase.first.contributors

    def summed(self, round_: Round) -> tuple[str, ...]:
        """Return the replicas whose gradients are in the sum of a round."""
        return round_.contributors if self._history is None else self._history.counted(round_.step)

    def decide(self, reports: Sequence[Report]) -> Decision:
        """Return the decision that follows from the reports of a meeting.

        Raises:
            RuntimeError: no replica with a state is left, or one is missing in a replay.
        """
        decision = decide(reports, self._choose, bool(self._options.zero))
        if decision is None:
            raise RuntimeError("every replica with the state of the run is lost: start the run from a checkpoint")
        return decision

    def _choose(self, step: int, members: tuple[str, ...]) -> tuple[str, ...]:
        """Return the contributors of a step among the members."""
        if self._history is None:
            return members if self._options.active is None else members[: self._options.active]
        missing = [name for name in self._history.names if name not in members]
        if missing:
            raise RuntimeError(
                f"the replay of {self._options.replay} needs the replicas {', '.join(self._history.names)}, and "
                f"{', '.join(missing)} is not there: start all, with a coordinator that waits for "
                f"{len(self._history.names)} of them (--min-replicas)"
            )
        return self._history.counted(step)
