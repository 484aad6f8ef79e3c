"""The table of outcomes: a replica follows a decision into the next round, as a newcomer, or not at all."""

from __future__ import annotations

import pytest

from triax import FaultTolerance, Grid
from triax.plugins.fault_tolerance.contributors import Contributors
from triax.plugins.fault_tolerance.meeting import Decision, Report, Round
from triax.plugins.fault_tolerance.phase import Phase, Standing
from triax.plugins.fault_tolerance.round_link import RoundLink
from triax.plugins.fault_tolerance.rounds import RoundOutcome, Rounds

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
        (ALONE, FIRST, RoundOutcome.STARTED, Standing.JOINING),
        (ALONE, GIVEN, RoundOutcome.NEWCOMER, Standing.JOINING),
        (ALONE, OTHERS, RoundOutcome.CUT_OFF, Standing.APART),
        (MEMBER, NEXT, RoundOutcome.ENTERED, Standing.MEMBER),
        (MEMBER, GIVEN, RoundOutcome.NEWCOMER, Standing.JOINING),
        (MEMBER, OTHERS, RoundOutcome.CUT_OFF, Standing.MEMBER),
        (LAGGARD, NEXT, RoundOutcome.CUT_OFF, Standing.MEMBER),
        (LAGGARD, GIVEN, RoundOutcome.NEWCOMER, Standing.JOINING),
    ],
)
def test_each_decision_of_a_round_has_its_outcome(
    phase: Phase, round_: Round, outcome: RoundOutcome, standing: Standing
) -> None:
    link = RoundLink("me", 0, "127.0.0.1:1", b"secret", "127.0.0.1", 0.1)  # nobody is there: it stays closed
    own = Report("me", -1)
    rounds = Rounds(own, "step", Grid(), None, link, Contributors(FaultTolerance(), None), None, None)
    rounds.phase = phase
    assert rounds.follow(Decision(None, round_)) is outcome
    assert rounds.phase.standing is standing
    assert rounds.phase.round == (phase.round if outcome is RoundOutcome.CUT_OFF else round_)
