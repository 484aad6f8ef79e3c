"""``triax grid``: the places that it prints are the grid's, and its pictures are refused where they cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from triax import Topology

from support.command_line import output_of, run_triax


def test_triax_grid_prints_the_places_and_shards_of_the_topology() -> None:
    sizes = {"pipe": 3, "data": 2, "context": 2, "tensor": 2, "expert": 2}
    words = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    found = json.loads(output_of("grid", *words, "--layers", "8", "--json"))["ranks"]
    topology = Topology(**sizes)
    assert [each["place"] for each in found] == [topology.coordinate(rank)._asdict() for rank in range(24)]
    assert [found[8 * stage]["layers"] for stage in range(3)] == [[0, 3], [3, 6], [6, 8]]
    assert [each["tokens"] for each in found[:4]] == [[0, 3], [0, 3], [1, 2], [1, 2]]
    for group in topology.groups("expert"):
        assert [found[rank]["expert"] for rank in group] == [0, 1]
    for group in topology.groups("expert_data"):
        assert len({found[rank]["expert"] for rank in group}) == 1
    for group in topology.groups("data_context"):
        assert [found[rank]["replica"] for rank in group] == [0, 1, 2, 3]


def test_the_table_of_triax_grid_names_the_shards_of_zero() -> None:
    text = output_of("grid", "--data", "2", "--zero", "2")
    assert "1 of 2" in text and "2 of 2" in text
    assert "A ZeRO shard has gradients and optimizer state." in text
    assert "ZeRO" not in output_of("grid", "--data", "2")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--data", "65", "--plot", "grid.png"], "a picture of 65 ranks, but a picture shows at most 64"),
        (["--plot", "grid.txt"], "must end in .png"),
        (["--pipe", "9"], "8 layers cannot fill 9 stages"),
        (["--data", "3", "--expert", "2"], "does not divide data x context"),
    ],
)
def test_triax_grid_refuses_wrong_sizes_and_pictures(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, output = run_triax("grid", *words)
    assert code == 2 and told in output
    assert not list(tmp_path.iterdir())
