"""Cut of the optimizer state over replicas, and the meeting in which one of them leaves, as values."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from triax.plugins.fault_tolerance.meeting import Decision, Report, decide
from triax.plugins.fault_tolerance.shard_cut import ShardCut


@pytest.mark.parametrize("seed", range(20))
def test_a_cut_gives_each_element_to_an_owner_and_its_copies(seed: int) -> None:
    choose = random.Random(seed)
    names = tuple(choose.sample("abcdefg", choose.randint(1, 7)))
    cut, numel = ShardCut(names, choose.randint(0, 3)), 16 * choose.randint(0, 40)
    owned = [each for part in range(len(names)) for each in range(*cut.span(part, numel))]
    assert owned == list(range(numel))
    for part, holders in enumerate(map(cut.holders, range(len(names)))):
        assert holders[0] == names[part] and len(set(holders)) == len(holders) == min(len(names), 1 + cut.copies)
        assert all(part in cut.parts(name) for name in holders)
    own, copies = zip(*(cut.held(name, numel) for name in names), strict=True)
    assert sum(own) == numel and sum(copies) == numel * min(len(names) - 1, cut.copies)
    assert max(own) - min(own) <= 16


@pytest.mark.parametrize("seed", range(50))
def test_state_that_has_a_holder_moves_to_any_other_cut(seed: int) -> None:
    """Replicas leave, and others join: each member of the new cut gets its elements, from replicas that have them."""
    choose = random.Random(seed)
    old = ShardCut(tuple(choose.sample("abcdef", choose.randint(1, 6))), choose.randint(0, 2))
    new = ShardCut(tuple(choose.sample("abcdefgh", choose.randint(1, 6))), old.copies)
    present = choose.sample(old.names, choose.randint(1, len(old.names)))
    numel = 16 * choose.randint(1, 30)

    def elements(cut: ShardCut, parts: list[int]) -> list[int]:
        return [element for part in parts for element in range(*cut.span(part, numel))]

    held = {name: set(elements(old, old.parts(name))) for name in present}
    missing = set(range(numel)).difference(*held.values())
    assert set(elements(old, old.lost(present))) == missing
    if old.lost(present):
        return
    wanted = {name: [new.span(part, numel) for part in new.parts(name)] for name in new.names}
    received: dict[str, list[int]] = {name: [] for name in new.names}
    for move in old.moves(present, wanted, numel):
        moved = range(move.start, move.stop)
        assert held[move.source].issuperset(moved)
        assert move.source == move.target or not held.get(move.target, set()).issuperset(moved)
        received[move.target] += moved
    assert received == {name: elements(new, new.parts(name)) for name in new.names}


def report(name: str, **fields: Any) -> Report:
    """The report of a replica of a run of a, b and c that has the whole sum of round 4."""
    everyone: dict[str, Any] = dict.fromkeys(("members", "contributors", "planned", "owners", "keepers"), tuple("abc"))
    return replace(Report(name, step=7, round=4, summed=True, process=f"{name}:1", **everyone), **fields)


def decision(*reports: Report) -> Decision:
    found = decide(reports, choose=lambda step, members: members, hands_over=True)
    assert found is not None
    return found


def test_a_replica_that_leaves_is_a_spare_member_for_one_step() -> None:
    found = decision(report("a"), report("b"), report("c", leaving=True))
    assert found.left == () and found.next.members == ("a", "b", "c")
    assert found.next.contributors == ("a", "b")
    assert found.next.owners == found.next.keepers == ("a", "b", "c")  # the others take over what c owns


def test_a_spare_member_leaves_after_a_step_to_which_it_gave_nothing() -> None:
    without_c: dict[str, Any] = {"contributors": ("a", "b"), "planned": ("a", "b")}
    found = decision(report("a", **without_c), report("b", **without_c), report("c", **without_c, leaving=True))
    assert found.left == ("c",) and found.next.members == found.next.contributors == ("a", "b")
    assert found.next.owners == found.next.keepers == ("a", "b")


def test_no_member_is_left_when_all_replicas_leave_at_once() -> None:
    found = decision(*(report(name, leaving=True) for name in "abc"))
    assert found.left == ("a", "b", "c") and found.next.members == found.next.contributors == ()


@pytest.mark.parametrize(("rest", "summed"), [("ab", True), ("ac", False)])
def test_a_dead_replica_keeps_no_optimizer_state(rest: str, summed: bool) -> None:
    """Also if the sum is repeated, because one of the other replicas does not have it."""
    found = decision(report(rest[0], summed=summed), report(rest[1]))
    assert found.left == () and found.next.members == found.next.contributors == tuple(rest)
    assert found.next.owners == ("a", "b", "c") and found.next.keepers == tuple(rest)
