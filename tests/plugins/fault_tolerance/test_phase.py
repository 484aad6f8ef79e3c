"""The table of a replica's standings: each row is walked, and no move leads to another standing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from triax.plugins.fault_tolerance.meeting import Round
from triax.plugins.fault_tolerance.phase import Phase, Standing

MEMBER = Round(3, 5, ("a", "me"), ("a", "me"))
NEWCOMER = Round(3, 5, ("a",), ("a",), ("me",), "a")
DONOR = Round(0, 5, ("a", "me"), ("a", "me"), ("a",), "me", fresh=True)


def enter(round_: Round) -> Callable[[Phase], Phase]:
    return lambda phase: phase.entered(round_, "me")


WALK: dict[tuple[str, str], Callable[[Phase], Phase]] = {
    ("APART", "JOINING"): enter(NEWCOMER),
    ("APART", "MEMBER"): enter(DONOR),
    ("JOINING", "MEMBER"): Phase.loaded,
    ("JOINING", "JOINING"): lambda phase: phase.cut_off(holds_parts=False),
    ("MEMBER", "MEMBER"): enter(MEMBER),
    ("MEMBER", "APART"): lambda phase: phase.cut_off(holds_parts=False),
    ("MEMBER", "JOINING"): lambda phase: phase.cut_off(holds_parts=True),
    ("MEMBER", "LEFT"): Phase.ended,
    ("MEMBER", "HANDED_OVER"): lambda phase: phase.ended(hands_over=True),
}


def test_the_documented_transitions_are_the_tested_ones() -> None:
    names = {standing.name for standing in Standing}
    rows = [tuple(line.split()[:2]) for line in (Standing.__doc__ or "").splitlines()]
    assert sorted(row for row in rows if len(row) == 2 and {*row} <= names) == sorted(WALK)


@pytest.mark.parametrize(("before", "after"), WALK)
def test_each_transition_leads_to_its_standing(before: str, after: str) -> None:
    phase = WALK[before, after](Phase(Standing[before], MEMBER))
    assert phase.standing is Standing[after]
    assert phase.stateless == (after == "JOINING") and phase.left == (after in ("LEFT", "HANDED_OVER"))


def test_a_repeated_round_keeps_the_shares_of_the_first_one() -> None:
    first = Round(3, 5, ("a", "b", "me"), ("a", "b", "me"))
    phase = Phase().entered(first, "me").entered(Round(4, 5, ("a", "me"), ("a", "me")), "me")
    assert phase.first == first and phase.entered(Round(5, 6, ("a", "me"), ("a", "me")), "me").first != first
