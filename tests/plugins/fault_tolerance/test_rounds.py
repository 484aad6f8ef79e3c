"""The table of outcomes: a replica follows a decision into the next round, as a newcomer, or not at all."""

from __future__ import annotations

import pytest

from triax import FaultTolerance, Grid
from triax.plugins.fault_tolerance.contributors import Contributors
from triax.plugins.fault_tolerance.meeting import Decision, Report, Round
from triax.plugins.fault_tolerance.phase import Phase, Standing
from triax.plugins.fault_tolerance.round_link import RoundLink
from triax.plugins.fault_tolerance.rounds import Outcome, Rounds

PRESENT = Round(3, 5, ("a", "me"), ("a", "me"))
ALONE = Phase()
MEMBER = ALONE.entered(PRESENT, "me")
LAGGARD = ALONE.entered(Round(1, 4, ("a", "me"), ("a", "me")), "me")
NEXT = Round(4, 6, ("a", "me"), ("a", "me"))
GIVEN = Round(4, 6, ("a",), ("a",), ("me",), "a")
FIRST = Round(0, 5, ("a", "me"), ("a", "me"), ("me",), "a", fresh=True)
OTHERS = Round(4, 6, ("a",), ("a",))


@pytest.mark.parametrize(
    ("phase", "round_", "outcome", "standing"),
    [
        (ALONE, FIRST, Outcome.STARTED, Standing.JOINING),
        (ALONE, GIVEN, Outcome.NEWCOMER, Standing.JOINING),
        (ALONE, OTHERS, Outcome.CUT_OFF, Standing.APART),
        (MEMBER, NEXT, Outcome.ENTERED, Standing.MEMBER),
        (MEMBER, GIVEN, Outcome.NEWCOMER, Standing.JOINING),
        (MEMBER, OTHERS, Outcome.CUT_OFF, Standing.MEMBER),
        (LAGGARD, NEXT, Outcome.CUT_OFF, Standing.MEMBER),
        (LAGGARD, GIVEN, Outcome.NEWCOMER, Standing.JOINING),
    ],
)
def test_each_decision_has_its_outcome(phase: Phase, round_: Round, outcome: Outcome, standing: Standing) -> None:
    link = RoundLink("me", 0, "127.0.0.1:1", b"secret", "127.0.0.1", 0.1)  # nobody is there: it stays closed
    own = Report("me", -1)
    rounds = Rounds(own, "step", Grid(), None, link, Contributors(FaultTolerance(), None), None, None)
    rounds.phase = phase
    assert rounds.follow(Decision(None, round_)) is outcome
    assert rounds.phase.standing is standing
    assert rounds.phase.round == (phase.round if outcome is Outcome.CUT_OFF else round_)
