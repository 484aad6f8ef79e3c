"""Cuts by the costs of layers: as good as every cut simulated one by one, within memory, and fast."""

from __future__ import annotations

import itertools
import random
import time
from functools import partial
from typing import Any

import pytest

from triax.base.errors import ConfigError
from triax.pipe.cuts import SCHEDULES, compare_cuts, find_cut
from triax.pipe.program.layer_costs import LayerCost, LayerCosts
from triax.pipe.program.schedule import Schedule
from triax.pipe.program.simulate import simulate
from triax.pipe.schedules.registry import RECIPES, named_schedule

from support.toys import error_text


def random_costs(seed: int, pipe: int = 4, layers: int | None = None) -> tuple[LayerCosts, random.Random]:
    """Return costs of up to 12 layers: some cost nothing, some much; ranks are slow, and messages long, in some."""
    rng = random.Random(seed)
    rows = []
    for number in range(layers or rng.randint(4, 12)):
        size = rng.choice([0.0, 1.0, 1.0, rng.uniform(0, 3), rng.uniform(0, 12)])
        f, i, w = (size * rng.uniform(0.5, 1.5) for _ in range(3))
        states, kept, output = (float(rng.choice([0, 10, rng.randint(0, 100)])) for _ in range(3))
        rows.append(LayerCost(f, i, w, states, kept, output, f"layer {number}"))
    speeds = tuple(rng.uniform(0.4, 1.0) for _ in range(pipe)) if rng.random() < 0.4 else ()
    return LayerCosts(tuple(rows), rng.choice([0.0, 0.3]), rng.choice([0.0, 0.02]), speeds), rng


def every_cut(layers: int, stages: int) -> Any:
    return ([0, *cut, layers] for cut in itertools.combinations(range(1, layers), stages - 1))


def bytes_of(costs: LayerCosts, schedule: Schedule, cut: list[int]) -> list[float]:
    """Return the bytes of each rank: those of each moment of its order, and of them the most."""
    found = []
    for rank, order in enumerate(schedule.orders):
        own = [s for s, home in enumerate(schedule.placement) if home == rank]
        states = sum(layer.states for s in own for layer in costs.layers[cut[s] : cut[s + 1]])
        held = most = 0.0
        for op in order:
            size = sum(layer.kept for layer in costs.layers[cut[op.stage] : cut[op.stage + 1]])
            held += {"F": size, "I": 0.0, "B": -size, "W": -size}[op.kind]
            most = max(most, held)
        found.append(states + most)
    return found


def require_best(seed: int) -> None:
    costs, rng = random_costs(seed)
    name, chunks, pipe = rng.choice(
        [("1f1b", 1, 4), ("1f1b", 1, 3), ("zb-h1", 1, 4), ("interleaved", 2, 2), ("zb-v", 2, 2), ("v-min", 2, 2)]
    )
    costs = LayerCosts(costs.layers, costs.latency, costs.per_byte, costs.speeds[:pipe])
    schedule = named_schedule(name, pipe, rng.choice([2, 4, 7]), chunks)
    rows = []
    for cut in every_cut(len(costs.layers), schedule.stages):
        seconds = simulate(schedule, costs.of_stages(cut, schedule.placement)).makespan
        rows.append((seconds, bytes_of(costs, schedule, cut), cut))
    found = find_cut("time", costs, pipe, schedule.microbatches, schedule)
    assert found.proved and found.makespan == pytest.approx(min(row[0] for row in rows), rel=1e-12)
    assert list(found.peaks) == bytes_of(costs, schedule, list(found.boundaries))

    least = find_cut("memory", costs, pipe, schedule.microbatches, schedule)
    fullest = min(max(row[1]) for row in rows)
    assert least.proved and max(least.peaks) == fullest
    assert least.makespan == pytest.approx(min(row[0] for row in rows if max(row[1]) == fullest), rel=1e-12)

    limits = [fullest * rng.uniform(1.0, 1.5) + 1 for _ in range(pipe)]
    fitting = [row[0] for row in rows if all(a <= b for a, b in zip(row[1], limits))]
    assert fitting
    within = find_cut("time", costs, pipe, schedule.microbatches, schedule, limit=limits)
    assert within.makespan == pytest.approx(min(fitting), rel=1e-12)
    assert all(a <= b for a, b in zip(within.peaks, limits))


@pytest.mark.parametrize("seed", range(24))
def test_find_cut_equals_the_best_of_all_simulated_cuts(seed: int) -> None:
    require_best(seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(24, 240))
def test_find_cut_equals_the_best_of_all_cuts_on_more_seeds(seed: int) -> None:
    require_best(seed)


@pytest.mark.parametrize("seed", range(6))
def test_find_cut_with_few_trials_is_within_one_percent(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    costs, _ = random_costs(seed, layers=20)
    wanted = find_cut("time", costs, 4, 8)
    monkeypatch.setattr("triax.pipe.cuts.MOST_CUTS", 100)
    found = find_cut("time", costs, 4, 8)
    assert wanted.proved
    assert found.makespan <= 1.01 * wanted.makespan


@pytest.mark.parametrize("seed", range(4))
def test_find_cut_auto_takes_the_best_of_all_schedules(seed: int) -> None:
    costs, _ = random_costs(seed, pipe=2, layers=9)
    best = min(
        simulate(schedule, costs.of_stages(cut, schedule.placement)).makespan
        for name in SCHEDULES
        for chunks in range(1, 5)
        if RECIPES[name].accepts(chunks)
        for schedule in [named_schedule(name, 2, 4, chunks)]
        for cut in every_cut(9, schedule.stages)
    )
    found = find_cut("auto", costs, 2, 4)
    assert found.proved and found.makespan == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("uneven", [pytest.param(True, marks=pytest.mark.exhaustive), False])
def test_cutting_80_layers_over_8_ranks_takes_seconds(uneven: bool) -> None:
    block = [LayerCost(1.0, 1.1, 0.9, 12.0, 2.0, 0.1)] * 78
    ends = [LayerCost(0.01, 0.0, 0.3, 40.0, 0.1, 0.1), LayerCost(6.0, 6.0, 6.0, 40.0, 5.0)]
    costs = LayerCosts((ends[0], *block, ends[1]) if uneven else (*block, *block[:2]), 0.01)
    start = time.process_time()
    rows = {row.method: row for row in compare_cuts(costs, 8, 32)}
    assert time.process_time() - start < 20  # on a machine that others use
    assert rows["auto"].makespan <= rows["time"].makespan <= rows["uniform"].makespan
    assert max(rows["memory"].peaks) <= min(max(row.peaks) for row in rows.values())
    if uneven:
        assert rows["time"].makespan < 0.78 * rows["uniform"].makespan
        # 11 blocks are the slowest stage, which no cut avoids; 1F1B takes the other stages' passes once.
        assert rows["time"].makespan <= 31 * 33 + costs.layers[0].seconds + 78 * 3 + 18 + 14 * 0.01


def test_an_impossible_memory_limit_is_refused_with_the_numbers() -> None:
    costs = LayerCosts([LayerCost(1.0, 1.0, 1.0, states=2e9, kept=0.5e9)] * 4)
    assert find_cut("time", costs, 2, 4, limit=6e9).peaks == (4e9 + 2 * 1e9, 4e9 + 1e9)
    for method in ("time", "memory", "auto"):
        with pytest.raises(ConfigError) as error:
            find_cut(method, costs, 2, 4, limit=4.2e9)
        for words in ("4 layers over 2 ranks", "within 4.2 GB", "takes", "4 GB of weights", "GB of activations"):
            assert words in str(error.value)


def test_layer_costs_survive_json_unchanged(tmp_path: Any) -> None:
    costs, _ = random_costs(3)
    path = tmp_path / "costs.json"
    path.write_text(costs.to_json())
    assert LayerCosts.from_json(path) == costs


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, 'must have "layers"'),
        ({"layers": []}, "no layers"),
        ({"layers": [{"backward": 1}]}, 'must have "layers", a list of {"forward": seconds'),
        ({"layers": [{"forward": 1, "input": 1}]}, "did you mean 'inputs'?"),
        ({"layers": [{"forward": -1}]}, "give a number from 0"),
        ({"layers": [{"forward": 1}], "speeds": [0]}, "a number above 0"),
        ({"layers": [{"forward": 1}], "speeds": "12"}, "a number above 0"),
        ({"layers": [{"forward": 1}], "speeds": [True, 1]}, "a number above 0"),
        ({"layers": [{"forward": 1}], "latency": "1 s"}, "latency"),
        ({"layers": [{"forward": 1}], "per_byte": True}, "per_byte"),
        ({"layers": [{"forward": 1, "name": 3}]}, "the name of a layer"),
    ],
)
def test_invalid_layer_costs_are_refused(data: dict[str, Any], words: str) -> None:
    assert words in error_text(lambda: LayerCosts.from_json(data))


def test_a_layer_cost_given_twice_is_refused(tmp_path: Any) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"layers": [{"forward": 1, "forward": 2}]}')
    with pytest.raises(ValueError, match="'forward' occurs twice"):
        LayerCosts.from_json(path)


def test_find_cut_refuses_wrong_arguments() -> None:
    costs, _ = random_costs(0, layers=4)
    for arguments, words in (
        (("fast", costs, 2, 4), "give one of time, memory, auto"),
        (("time", costs, 5, 4), "4 layers cannot fill 5 stages"),
        (("time", costs, 2, 4, "1f1b", None, [1.0]), "for 2 ranks"),
        (("time", LayerCosts(costs.layers, speeds=(1, 1, 1)), 2, 4), "3 speeds for 2 ranks"),
    ):
        assert words in error_text(partial(find_cut, *arguments))


def test_compared_cuts_have_the_times_and_bytes_of_the_simulator() -> None:
    costs, _ = random_costs(7, layers=10)
    for row in compare_cuts(costs, 4, 8):
        alone = simulate(row.schedule, costs.of_stages(row.boundaries, row.schedule.placement))
        assert (row.makespan, row.bubble) == (alone.makespan, alone.bubble)
        assert list(row.peaks) == bytes_of(costs, row.schedule, list(row.boundaries))
