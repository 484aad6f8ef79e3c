"""Membership and the decision of a meeting, as values: no process and no torch."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from triax.base.errors import ConfigError
from triax.plugins.fault_tolerance.meeting import Decision, Report, decide
from triax.plugins.fault_tolerance.membership import History, Ledger, read_changes


def all_of(step: int, members: tuple[str, ...]) -> tuple[str, ...]:
    """All members contribute."""
    return members


def decision(*reports: Report) -> Decision:
    """Decision of reports, equal in any order."""
    found = decide(reports, all_of)
    assert found is not None and decide(reports[::-1], all_of) == found
    return found


@pytest.mark.parametrize("seed", range(20))
def test_random_rounds_take_every_sample_once(seed: int, tmp_path: Path) -> None:
    choose, ledger = random.Random(seed), Ledger()
    taken: Counter[int] = Counter()
    plans = []
    for step in range(60):
        members = choose.sample("abcdef", choose.randint(1, 6))
        counted = choose.sample(members, choose.randint(1, len(members)))
        shares = ledger.plan(members)
        taken.update(shares[name] for name in counted)
        plans.append((shares, counted))
        ledger.record(step, members, counted, time=1.0)
        assert set(taken) | set(ledger.owed) == set(range(ledger.next_share))
        assert ledger == Ledger.of(ledger.state())
    assert set(taken.values()) == {1} and sum(taken.values()) == ledger.counted
    (tmp_path / "history").write_text(ledger.history())
    past, again = History.from_file(tmp_path / "history"), Ledger()
    for step, (shares, counted) in enumerate(plans):
        assert again.plan(past.members(step)) == shares and set(past.counted(step)) == set(counted)
        again.record(step, past.members(step), past.counted(step))
    assert again == ledger


def test_a_damaged_history_of_members_is_refused(tmp_path: Path) -> None:
    """Each bit is flipped in turn, and the file is cut at each byte."""
    ledger, file = Ledger(), tmp_path / "history"
    for step, members in enumerate(["ab", "abc", "ac", "ac"]):
        ledger.record(step, members, members[:2], time=0.5, left=["b"] if step == 2 else [])
    whole = ledger.history().encode()
    file.write_bytes(whole)
    assert read_changes(file) == ledger.changes
    bits = [(at, 1 << bit) for at in range(len(whole)) for bit in range(8)]
    flipped = [whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :] for at, bit in bits]
    for damaged in [*flipped, *(whole[:at] for at in range(len(whole)))]:
        file.write_bytes(damaged)
        with pytest.raises(ConfigError, match="history"):
            History.from_file(file)
    file.write_bytes(whole.partition(b"\n")[2])  # of a version without the checksum
    assert read_changes(file) == ledger.changes


@pytest.mark.parametrize("text", ["", "{}", '{"step": 1, "members": ["a"]}', '{"step": 0, "members": "a"}', "x"])
def test_a_file_that_is_no_history_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "history").write_text(text)
    with pytest.raises(ConfigError, match="history"):
        History.from_file(tmp_path / "history")


def test_a_meeting_decides_members_newcomers_and_losses() -> None:
    names = ("a", "b", "c")
    a, b, c = (
        Report(name, 7, 4, True, names, names, process=f"{name}:1", seconds=seconds)
        for name, seconds in zip(names, (1.0, 1.1, 2.5), strict=True)
    )
    new = Report("d", 0, process="d:1")
    # All have the sum: the step is taken, and the newcomer gets the state of the longest-standing member.
    found = decision(a, b, c, new)
    assert found.committed == names and found.next.contributors == names and found.next.newcomers == ("d",)
    assert (found.next.step, found.next.number, found.next.donor, found.next.process) == (8, 5, "a", "a:1")
    assert found.slowest == ("c", 2.5) and not found.keeps and decision(a, b, c).keeps
    # c died after its sum: its gradient counts. b died before: a and c sum again, and d waits.
    assert decision(a, b).committed == names and decision(a, b).lost == ("c",)
    again = decision(replace(a, summed=False), c, new)
    assert again.committed is None and again.next.contributors == ("a", "c") and again.next.step == 7
    assert "d" not in again.next.group
    # b was stopped for a round, and is a newcomer; a replica that leaves contributes to its last step.
    late = decision(replace(a, round=5, step=8, members=("a", "c"), contributors=("a", "c")), b)
    assert late.committed == ("a", "c") and late.next.members == ("a",) and late.next.newcomers == ("b",)
    gone = decision(a, b, replace(c, leaving=True))
    assert gone.committed == names and gone.next.members == ("a", "b") and gone.left == ("c",)
    # A newcomer that has the sum enters; one that has not waits for the next state.
    entered = decision(a, b, c, replace(new, round=4, summed=True, members=names, contributors=names))
    assert entered.next.members == (*names, "d") and not entered.next.newcomers
    # A run begins with the state of the furthest replica; without any state it cannot.
    begins = decision(new, replace(new, name="e", step=3, process="e:1"))
    assert begins.next.donor == "e" and begins.next.step == 3 and begins.next.fresh
    assert decide([replace(new, step=-1)], all_of) is None
