"""Cuts of a list of layers into stages."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triax.pipe.partition import balanced, boundaries, uniform

from support.toys import error_text


def loads(weights: list[float], cuts: list[int]) -> list[float]:
    return [sum(weights[a:b]) for a, b in itertools.pairwise(cuts)]


def best_maximum(weights: list[float], parts: int) -> float:
    """Smallest possible maximum over all partitions, by brute force."""
    n = len(weights)
    return min(max(loads(weights, [0, *cut, n])) for cut in itertools.combinations(range(1, n), parts - 1))


@pytest.mark.parametrize(
    ("layers", "parts", "cuts"), [(30, 4, [0, 8, 16, 23, 30]), (4, 4, [0, 1, 2, 3, 4]), (5, 1, [0, 5])]
)
def test_uniform_partitions_give_equal_counts_of_layers(layers: int, parts: int, cuts: list[int]) -> None:
    assert uniform(layers, parts) == cuts


@settings(max_examples=300)
@given(st.data())
def test_balanced_is_optimal_and_leaves_no_stage_empty(data: st.DataObject) -> None:
    weight = st.one_of(st.integers(0, 20), st.floats(0, 1e6, allow_nan=False))
    weights = data.draw(st.lists(weight, min_size=1, max_size=9))
    parts = data.draw(st.integers(1, len(weights)))
    cuts = balanced(weights, parts)
    assert cuts[0] == 0 and cuts[-1] == len(weights) and len(cuts) == parts + 1
    assert all(a < b for a, b in itertools.pairwise(cuts))
    assert max(loads(weights, cuts)) == pytest.approx(best_maximum(weights, parts), rel=1e-12)


def test_balanced_spreads_layers_evenly_below_the_maximum() -> None:
    """30 equal layers on 4 stages: the maximum is 8 at best. Stages filled up to 8 one by one would have 8, 8, 8, 6."""
    assert sorted(loads([1.0] * 30, balanced([1.0] * 30, 4))) == [7, 7, 8, 8]


def test_500_layers_are_balanced_over_64_stages() -> None:
    costs = [float(i % 7 + 1) for i in range(500)]
    cuts = balanced(costs, 64)
    assert len(cuts) == 65 and cuts[0] == 0 and cuts[-1] == 500
    largest = max(sum(costs[a:b]) for a, b in itertools.pairwise(cuts))

    def stages_of(most: float) -> int:
        """Fewest stages of at most ``most``: each takes as many layers as it can."""
        stages, held = 1, 0.0
        for cost in costs:
            stages, held = (stages, held + cost) if held + cost <= most else (stages + 1, cost)
        return stages

    assert stages_of(largest) <= 64 < stages_of(largest - 1), "no cut has a smaller largest stage"


def test_each_partition_method_cuts_by_its_rule() -> None:
    names = ["Embedding", "Block", "Block", "Block", "Block", "Head"]
    weights = [100.0, 1.0, 1.0, 1.0, 1.0, 100.0]
    assert boundaries("uniform", 2, names, lambda: weights) == [0, 3, 6]
    assert boundaries("parameters", 3, names, lambda: weights) == [0, 1, 5, 6]
    cuts = boundaries("type:block", 2, names, lambda: weights)
    assert [n for a, b in itertools.pairwise(cuts) for n in [names[a:b].count("Block")]] == [2, 2]
    assert boundaries([0, 2, 6], 2, names, lambda: weights) == [0, 2, 6]


@pytest.mark.parametrize(
    ("method", "stages", "words"),
    [
        ("uniform", 7, "6 layers cannot fill 7 stages"),
        ("parameters", 7, "6 layers cannot fill 7 stages"),
        ("evenly", 2, "'memory', 'auto', 'type:REGEX', or boundaries such as [0, 3, 6]"),
        ("type:Conv", 2, "matches no layer: give a pattern that matches one of Block"),
        ([0, 3], 2, "give 3 boundaries from 0 to 6, for instance [0, 3, 6]"),
        ([0, 3, 5], 2, "give 3 boundaries from 0 to 6"),
        ([0, 6, 6], 2, "leaves stage 1 without layers"),
    ],
)
def test_boundaries_refuses_wrong_methods_with_a_way_out(method: str | list[int], stages: int, words: str) -> None:
    assert words in error_text(lambda: boundaries(method, stages, ["Block"] * 6, lambda: [1.0] * 6))
