"""Cut of the optimizer state over replicas, and the meeting in which one of them leaves, as values."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from triax.plugins.fault_tolerance.meeting import Report, decide
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
    choose = random.Random(seed)
    old = ShardCut(tuple(choose.sample("abcdef", choose.randint(1, 6))), choose.randint(0, 2))
    new = ShardCut(tuple(choose.sample("abcdefgh", choose.randint(1, 6))), old.copies)
    present = choose.sample(old.names, choose.randint(1, len(old.names)))
    numel = 16 * choose.randint(1, 30)
    held = {
        name: {each for part in old.parts(name) for each in range(*old.span(part, numel))} for name in present
    }  # fmt: skip
    missing = set(range(numel)) - set().union(*held.values())
    assert {each for part in old.lost(present) for each in range(*old.span(part, numel))} == missing
    if old.lost(present):
        return
    wanted = {name: [new.span(part, numel) for part in new.parts(name)] for name in new.names}
    got: dict[str, list[int]] = {name: [] for name in new.names}
    for move in old.moves(present, wanted, numel):
        elements = range(move.start, move.stop)
        assert set(elements) <= held[move.source]
        assert move.source == move.target or not set(elements) <= held.get(move.target, set())
        got[move.target] += elements
    assert all(got[name] == [e for span in wanted[name] for e in range(*span)] for name in new.names)


def test_a_replica_that_leaves_hands_over_what_it_owns() -> None:
    names = ("a", "b", "c")
    a, b, c = (Report(name, 7, 4, True, names, names, names, names, names, process=f"{name}:1") for name in names)

    def decision(*reports: Report) -> tuple[tuple[str, ...], ...]:
        found = decide(reports, lambda step, members: members, hands_over=True)
        assert found is not None
        return found.next.members, found.next.contributors, found.left, found.next.owners, found.next.keepers

    two = ("a", "b")
    assert decision(a, b, replace(c, leaving=True)) == (names, two, (), names, names)
    rounds = [replace(each, contributors=two, planned=two, owners=names, leaving=each is c) for each in (a, b, c)]
    assert decision(*rounds) == (two, two, ("c",), two, two)
    # All leave at once; a replica that died holds nothing any more, also when the sum is tried again.
    assert decision(*(replace(each, leaving=True) for each in (a, b, c)))[:3] == ((), (), names)
    assert decision(a, b) == (two, two, (), names, two)
    again = decision(replace(a, summed=False), c)
    assert again == (("a", "c"), ("a", "c"), (), names, ("a", "c"))
