"""Rounds of a replica: it meets the others at the end of each attempt, and follows their decision into the next round.

    meet      all replicas report; the decision (meeting.py) is equal on all
    follow    enters the next round of the decision, unless the others go on without this replica
    join      without a round: meets and follows, until a round has this replica

The phase is this replica's own; its moves are those of the table in phase.py. What is sent within a round is not here:
the caller sums, and gets the state that an ``RoundOutcome`` announces.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from enum import Enum, auto
from typing import Any

from ...grid import Grid
from .contributors import Contributors
from .coordinator_client import CoordinatorClient
from .meeting import Decision, Report, Round
from .phase import Phase
from .round_link import RoundLink
from .sharded_state import ReplicaShards

_LOG = logging.getLogger("triax")


class RoundOutcome(Enum):
    """Result of following a decision.

    STARTED    first round of a run: all get the state of the donor before its step
    ENTERED    this replica is a member of the next round, with the state of the run
    NEWCOMER   it is in the next round, and gets the state of the donor while the others train
    CUT_OFF    it is in no round, since the others go on without it: it joins
    """

    STARTED = auto()
    ENTERED = auto()
    NEWCOMER = auto()
    CUT_OFF = auto()


class Rounds:
    """Rounds of this replica, one after another.

    Args:
        own: report of this replica before the first round: its name, process and settings.
        unit: name of what the history counts.
        grid: the grid of this replica's processes.
        client: connection to the coordinator; None on all ranks but the first.
        link: connection of this rank to the other replicas.
        contributors: choice of the replicas that take part in a step.
        sharded: the optimizer state that this replica holds, with ZeRO over the replicas; None: it holds all.
        folder: folder of the run's checkpoints, for errors.

    Attributes:
        phase: where this replica stands with the run, and how far it is with the present step.
        leaving: True if it is to leave after the present step: set by SIGTERM, or by another rank of this replica.
    """

    def __init__(
        self,
        own: Report,
        unit: str,
        grid: Grid,
        client: CoordinatorClient | None,
        link: RoundLink,
        contributors: Contributors,
        sharded: ReplicaShards | None,
        folder: str | None,
    ) -> None:
        self._own, self._unit, self._grid, self._client, self._link = own, unit, grid, client, link
        self._contributors, self._sharded, self._folder = contributors, sharded, folder
        self.phase, self.leaving = Phase(), False

    @property
    def now(self) -> Round:
        """The present round, of a replica that is in a step."""
        assert self.phase.round is not None
        return self.phase.round

    def planned(self, round_: Round) -> tuple[str, ...]:
        """Return the replicas that take shares in a round's step, in their order."""
        return self._contributors.planned(self.phase, round_)

    # ------------------------------------------------------------------------------------------ meetings

    def meet(self, steps: int, summed: bool = False, seconds: float = 0.0) -> Decision:
        """Meet the other replicas; return the decision that follows, on every rank. Collective.

        Args:
            steps: number of steps that the replicas have taken together.
            summed: True if all ranks of this replica have the sum of the present round.
            seconds: time from the begin of the step to the gradients.

        Raises:
            RuntimeError: no replica with a state is left, or there is no coordinator.
        """
        reports: list[Any] = []
        failure = None
        if self._client is not None:
            try:
                reports = [other.plain() for other in self._client.meet(self._report(steps, summed, seconds))]
            except RuntimeError as error:
                failure = str(error)
        reports, failure = self._grid.world.all_gather_json([reports, failure])[0]
        if failure is not None:
            raise RuntimeError(failure)
        return self._contributors.decide([Report.of(report) for report in reports])

    def _report(self, steps: int, summed: bool, seconds: float) -> Report:
        """Return the report of this replica; one without a state reports no round that the others could rely on."""
        round_, stateless = self.phase.round, self.phase.stateless
        step = -1 if stateless else steps
        report = replace(self._own, step=step, summed=summed, leaving=self.leaving, seconds=seconds)
        if round_ is None:
            return report
        report = replace(report, members=round_.members, contributors=self._contributors.summed(round_))
        report = replace(report, owners=round_.owners, keepers=round_.keepers)
        if stateless:
            return report
        # A round of the next step is entered before the engine has counted the last one.
        return replace(report, step=round_.step, round=round_.number, planned=self.planned(round_))

    # ------------------------------------------------------------------------------------------ the next round

    def follow(self, decision: Decision) -> RoundOutcome:
        """Enter the next round of a decision, and make its group, if this replica is in it. Collective over the round.

        Raises:
            RuntimeError: all holders of a part of the optimizer state are lost.
        """
        before, following, name = self.phase.round, decision.next, self._own.name
        laggard = before is not None and before.number != following.number - 1
        if laggard and self._grid.rank == 0:
            text = "the others have gone on without replica %s since %s %d: it gets their state, and joins again"
            _LOG.warning(text, name, self._unit, self.now.step)
        if name not in following.group or (laggard and name not in following.newcomers):
            return RoundOutcome.CUT_OFF
        self.phase = self.phase.entered(following, name)
        if self._sharded is not None:
            self._require_state(self._sharded, following)
        same = before is not None and before.group == following.group
        if not (decision.keeps and same and self._link.group is not None):
            self._link.open(following)
        if following.fresh:
            return RoundOutcome.STARTED
        return RoundOutcome.NEWCOMER if name in following.newcomers else RoundOutcome.ENTERED

    def join(self, steps: int) -> RoundOutcome:
        """Meet the others without a state, until this replica is in a round. Collective.

        Args:
            steps: as for ``meet``.
        """
        self._link.close()
        holds_parts = self._sharded is not None and self._sharded.cut is not None  # of a step that is gone
        if self._sharded is not None and holds_parts:
            self._sharded.forget()
        self.phase = self.phase.cut_off(holds_parts)
        while (outcome := self.follow(self.meet(steps))) is RoundOutcome.CUT_OFF:
            pass
        return outcome

    def _require_state(self, sharded: ReplicaShards, round_: Round) -> None:
        """Check that each part of the optimizer state has a holder: of the last step's cut, and of the present one's.

        Raises:
            RuntimeError: all holders of a part are lost.
        """
        if round_.fresh:
            return
        for owners, present in ((round_.owners, round_.keepers), (self.planned(round_), round_.members)):
            cut = sharded.of(owners)
            if not (lost := cut.lost(present)):
                continue
            holders = sorted({name for part in lost for name in cut.holders(part)})
            saved = "that you saved (set <checkpoint.folder>, <checkpoint.every>)"
            what = f"in {self._folder}" if self._folder else saved
            raise RuntimeError(
                f"step {round_.step}: {len(lost)} of {len(cut.names)} parts of the optimizer state are lost with "
                f"replicas {', '.join(holders)}, which held them and their copies (fault_tolerance.copies="
                f"{cut.copies}): start the run again from its last checkpoint, {what}, or give more copies"
            )
