"""The first commands of a new user: ``triax demo``, ``triax new``, ``triax recipe``."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from triax.engine.monitor.report.run_folder import read_run
from triax.train.file import read_training_file

from support.command_line import output_of, run_triax
from support.readme_blocks import commands


@pytest.mark.parametrize("name", ["pretrain", "chat", "llama3-70b-64gpus"])
def test_triax_recipe_writes_its_files_and_commands(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert name in output_of("recipe")
    said = output_of("recipe", name)
    others = {"chat": {"chat_template.jinja", "conversations.py"}, "llama3-70b-64gpus": {"llama3-70b-64gpus.sbatch"}}
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.yaml", *others.get(name, ())}
    assert "examples/" not in said + "".join(path.read_text() for path in tmp_path.iterdir())
    assert read_training_file(f"{name}.yaml")[0].name == name.removesuffix("-64gpus")
    assert f"{name}.yaml" in said.partition("```sh")[2]
    assert "exists. Remove it" in run_triax("recipe", name)[1]
    assert "pretrain" in run_triax("recipe", "pretrian")[1]


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_a_new_project_passes_its_tests_and_trains(tmp_path: Path) -> None:
    """Every command of its README, as it is typed."""
    where = tmp_path / "my-model"
    output_of("new", where)
    assert "gpt_plain.py" in {path.name for path in where.iterdir()}
    assert not [path for path in where.iterdir() if re.search("new.project|gpt_3d", path.read_text() + path.name)]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    printed = {}
    install, *others = (command for _, command in commands((where / "README.md").read_text()))
    assert install == "pip install 'triax[testing,plot]'"  # it is installed here
    for command in others:
        done = subprocess.run(
            shlex.split(command), cwd=where, env=environment, capture_output=True, text=True, timeout=900, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        printed[command] = done.stdout
    assert "4 passed" in printed["python -m pytest"]
    one, four = (re.findall(r"step .* loss \S+", printed[name]) for name in printed if name.startswith("python my"))
    assert one == four and len(one) == 1
    assert "is not an empty folder" in run_triax("new", where)[1]


def test_triax_new_refuses_names_that_are_no_module(tmp_path: Path) -> None:
    assert "cannot be the name of a Python module" in run_triax("new", tmp_path / "2 models")[1]
    assert not [*tmp_path.iterdir()]


@pytest.mark.exhaustive
def test_the_demo_trains_and_draws_its_timeline(tmp_path: Path) -> None:
    words = [str(Path(sys.executable).parent / "triax"), "demo"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [loss for _, loss in read_run(tmp_path / "runs" / "demo").series("Train/Samples/train_loss")]
    assert losses[-1] < losses[0] - 1.0
    shown = re.findall(r"Rank . computed for (\d+) ms and waited for (\d+) ms", done.stdout)
    trace = json.loads((tmp_path / "runs" / "demo" / "timeline.json").read_text())["traceEvents"]
    passes = [event for event in trace if event.get("cat") in ("F", "B")]
    length = max(event["ts"] + event["dur"] for event in passes) - min(event["ts"] for event in passes)
    for rank, numbers in enumerate(shown):
        busy = sum(event["dur"] for event in passes if event["pid"] == rank)
        assert [*map(int, numbers)] == pytest.approx([busy / 1e3, (length - busy) / 1e3], abs=1)
    assert len(shown) == 2
    for words_shown in ("rank 0 F", "rank 1 ", "a column is ", "triax new my_model", "runs/demo/schedule.png"):
        assert words_shown in done.stdout, done.stdout
    assert (tmp_path / "runs" / "demo" / "schedule.png").is_file()
