"""Descriptions of machines: their sources, and files."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from triax.plugins.plan.machine import MACHINES, Machine, machine


@pytest.mark.parametrize("name", MACHINES)
def test_each_figure_of_a_description_has_a_source(name: str) -> None:
    described = MACHINES[name]
    defaults = {each.name: each.default for each in fields(Machine)}
    own = {each for each, value in defaults.items() if getattr(described, each) != value} - {"name", "sources"}
    if name != "cpu":
        assert own <= set(described.sources), f"{name} has no source for {own - set(described.sources)}"
    assert set(described.sources) <= set(defaults)


@pytest.mark.parametrize("ending", [".json", ".toml"])
def test_a_machine_file_changes_or_replaces_a_description(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"mine{ending}"
    text = {"base": "h100-80g", "memory": 60e9, "name": "mine"}
    path.write_text(json.dumps(text) if ending == ".json" else 'base = "h100-80g"\nmemory = 60e9\nname = "mine"\n')
    found = machine(str(path))
    assert (found.name, found.memory, found.peak) == ("mine", 60e9, MACHINES["h100-80g"].peak)
    if ending == ".json":
        path.write_text(json.dumps(found.to_dict()))
        assert machine(str(path)) == found


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"base": "h100-80g", "memroy": 1}', "memroy"),
        ("[]", "not a mapping"),
        ('{"memory": 1}', "peak is missing"),
        ('{"base": "h100-80g", "memory": "80g"}', "memory = '80g': give a number"),
        ('{"base": "h100-80g", "peak": 5}', "peak = 5"),
        ('{"base": "h100-80g", "peak": {"bf16": -1}}', "peak.bf16 .* is -1"),
        ('{"base": "h100-80g", "tile": [0, 1]}', "tile.0 .* is 0"),
        ('{"base": "h100-80g", "overlap_weights": "no"}', "overlap_weights = 'no': give true or false"),
        ('{"base": "h100-80g", "links": []}', "must connect all ranks"),
        ('{"base": "h100-80g", "links": [{"name": "node"}]}', "links.0.ranks is missing"),
        ('{"base": ["h100-80g"]}', "which is no machine's name"),
        ('{"base": "h100-80g", "memory": 0}', "positive"),
        ('{"base": "h100-80"}', "did you mean 'h100-80g'"),
        ("{", "not a description"),
    ],
)
def test_a_wrong_machine_file_is_refused_with_the_field(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        machine(str(path))


def test_an_unknown_machine_and_dtype_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="Did you mean a100-80g"):
        machine("a100-80gb")
    with pytest.raises(ValueError, match="bf16, fp16, fp32, fp64"):
        machine("a100-80g").peak_of("fp8")
