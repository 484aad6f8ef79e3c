"""``triax schedule cuts`` and ``triax plan --layer-costs``: from costs of layers to cuts for a training file."""

from __future__ import annotations

import json
import re
from functools import partial
from itertools import pairwise
from operator import le
from pathlib import Path
from typing import Any

import pytest
import yaml

from triax.options.schedule import ScheduleOptions
from triax.pipe.cuts import compare_cuts
from triax.pipe.program.layer_costs import LayerCost, LayerCosts
from triax.plugins.plan.cost import CostModel
from triax.train.engine_sections import RunSchedule

from support.command_line import output_of, run_triax
from support.paths import DOCS
from support.readme_blocks import commands

HEADED = LayerCosts([LayerCost(1e-3, 1e-3, 1e-3, 1e9, 1e8)] * 7 + [LayerCost(4e-3, 4e-3, 4e-3, 2e9, 5e8)])


run = partial(output_of, columns=200)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "costs.json"
    path.write_text(HEADED.to_json())
    return str(path)


def test_schedule_cuts_prints_a_table_and_a_valid_line(file: str) -> None:
    words = ("schedule", "cuts", file, "--pipe", "2", "--microbatches", "8")
    found = json.loads(run(*words, "--json"))["cuts"]
    wanted = compare_cuts(HEADED, 2, 8)
    assert [each["partition"] for each in found] == ["uniform", "parameters", "time", "memory", "auto"]
    for each, cut in zip(found, wanted, strict=True):
        assert (each["seconds"], each["bytes"], each["boundaries"]) == (
            cut.makespan,
            list(cut.peaks),
            [*cut.boundaries],
        )
    text = run(*words)
    (line,) = [line for line in text.splitlines() if line.startswith("schedule: ")]
    section = RunSchedule.of(yaml.safe_load(line)["schedule"])
    assert section.partition == wanted[-1].boundaries and section.name == wanted[-1].schedule.name
    assert "0 5 8" in text or "0 6 8" in text


def bytes_of_ranks(boundaries: list[int], held: tuple[int, int] = (2, 1)) -> list[float]:
    """Bytes of two ranks by hand: of each layer its weights, and its activations of ``held`` microbatches.

    1F1B holds those of two microbatches on the first of two ranks, and of one on the last.
    """
    layers = [(1e9, 1e8)] * 7 + [(2e9, 5e8)]
    parts = [layers[start:stop] for start, stop in pairwise(boundaries)]
    return [sum(weights + count * kept for weights, kept in part) for part, count in zip(parts, held, strict=True)]


def test_cuts_keep_the_memory_limit_or_are_refused(file: str) -> None:
    words = ("schedule", "cuts", file, "--pipe", "2", "--microbatches", "8", "--limit")
    _, _, time, memory, auto = json.loads(run(*words, "7.5,5", "--json"))["cuts"]
    for each in (time, memory, auto):
        assert all(size <= limit for size, limit in zip(each["bytes"], (7.5e9, 5e9), strict=True))
    for each in (time, memory):
        assert each["schedule"] == "1f1b" and each["bytes"] == pytest.approx(bytes_of_ranks(each["boundaries"]))
    fitting = [[0, n, 8] for n in range(1, 8) if all(map(le, bytes_of_ranks([0, n, 8]), (7.5e9, 5e9)))]
    assert fitting == [[0, 5, 8], [0, 6, 8]]
    assert memory["boundaries"] == min(fitting, key=lambda cut: max(bytes_of_ranks(cut)))
    assert time["boundaries"] in fitting and time["seconds"] <= memory["seconds"]
    assert all(max(bytes_of_ranks([0, n, 8])) > 4e9 for n in range(1, 8))
    assert "was found within 4 GB" in run_triax(*words, "4")[1].replace("\n", " ")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["1f1b", "--limit", "3"], "type triax schedule cuts COSTS.json --limit GB"),
        (["--layers", "FILE", "--compare"], "--layers is a verb now: type triax schedule cuts COSTS.json"),
        (["cuts", "FILE", "--schedule", "auto"], "a row of auto is always printed"),
        (["cuts", "FILE", "--limit", "x"], "--limit = 'x': give a number or a list of numbers"),
        (["cuts", "/no/such.json"], "cannot be read"),
        (["cuts", "FILE", "--schedule", "zb-v", "--pipe", "5"], "8 layers cannot fill 10 stages"),
    ],
)
def test_the_cuts_command_refuses_mistakes(file: str, words: list[str], expected: str) -> None:
    code, text = run_triax("schedule", *(file if word == "FILE" else word for word in words), columns=200)
    assert code == 2 and expected in " ".join(text.split())


@pytest.mark.parametrize("extra", ["recompute=none", "recompute=full", "tensor=2"])
def test_costs_by_formulas_sum_to_the_planners_step(tmp_path: Path, extra: str) -> None:
    from triax.models.config import LlamaConfig
    from triax.plugins.plan.machine import MACHINES
    from triax.plugins.plan.parallel_layout import ParallelLayout
    from triax.plugins.plan.work import Work

    path, given = tmp_path / "costs.json", dict(part.split("=") for part in extra.split(","))
    layout = f"pipe=1,data=1,microbatch=1,zero=0,{'' if 'recompute' in given else 'recompute=none,'}{extra}"
    run("plan", "--model", "llama3-8b", "--batch", "16", "--layout", layout, "--layer-costs", str(path))
    costs = LayerCosts.from_json(path)
    model = CostModel(Work(LlamaConfig.preset("llama3-8b"), MACHINES["h100-80g"], 16, 8192))
    keys: dict[str, Any] = {key: int(value) if value.isdecimal() else value for key, value in given.items()}
    own = ParallelLayout(microbatch=1, zero=0, sequence_parallel="tensor" in keys, **{"recompute": "none", **keys})
    step = model.step(own).kinds
    passes = ("products", "attention", "elementwise", "overhead", "recompute", "tensor")
    assert 16 * sum(layer.seconds for layer in costs.layers) == pytest.approx(sum(step[kind] for kind in passes))
    assert [layer.name for layer in costs.layers][:2] == ["TokenEmbedding", "LlamaBlock"]
    assert costs.latency > 0 and costs.per_byte > 0


def test_the_docs_show_the_table_of_schedule_cuts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "schedules.md").read_text()
    plan, show = (command.split() for _, command in commands(text) if "costs.json" in command)
    run(*plan[1:])
    for cut in json.loads(run(*show[1:], "--json"))["cuts"]:
        (line,) = [line for line in text.splitlines() if line.startswith(f"{cut['partition']}  ")]
        _, schedule, chunks, ms, bubble, peaks, boundaries = re.split("  +", line)
        assert (schedule, int(chunks), bubble) == (cut["schedule"], cut["chunks"], f"{cut['bubble']:.1%}")
        assert float(ms) == pytest.approx(1e3 * cut["seconds"], rel=1e-3)
        assert boundaries == " ".join(map(str, cut["boundaries"]))
        assert peaks == " ".join(f"{peak / 1e9:.3g}" for peak in cut["bytes"])


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"partition": "evenly"}, "give parameters, uniform, time, memory, auto"),
        ({"partition": "auto", "name": "zb-v"}, "auto chooses the schedule"),
        ({"partition": "time", "name": "auto"}, "write only partition auto"),
        ({"limit": 3}, "limit is for partition time, memory and auto"),
        ({"partition": [0, 3.5]}, "boundaries such as"),
    ],
)
def test_wrong_schedule_sections_are_refused(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as error:
        RunSchedule.of(section)
    assert words in str(error.value)


def test_limit_takes_one_number_or_one_per_rank() -> None:
    assert ScheduleOptions(limit=2.5).limits == 2.5e9 and RunSchedule.of({"partition": "time", "limit": 2}).limit
    assert ScheduleOptions(limit=(1, 2)).limits == (1e9, 2e9) and ScheduleOptions().limits is None
