"""The keys of training files: each is read by a run, and `triax train --table` lists them all."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from triax.models.config import MixtralConfig
from triax.models.huggingface.config import to_hf
from triax.options import base
from triax.options.base import Options, declared
from triax.options.table import markdown, rows
from triax.train import engine_sections, sections
from triax.train.loop import train
from triax.train.sections import WHOLE, TrainingFile
from triax.train.start import make_job

from support.command_line import output_of
from support.paths import ROOT
from support.processes import program
from support.readme_blocks import commands, make_text, programs
from support.tokenized import folder


def names_of(section: type[Options]) -> list[str]:
    return [each.name for each in declared(section)]


def own_names_of(section: type[Options]) -> list[str]:
    """Return the options of a section that no section of the engine has."""
    inherited = {name for each in section.__mro__[1:] for name in getattr(each, "__dataclass_fields__", ())}
    return [name for name in names_of(section) if name not in inherited]


def read_while_training(monkeypatch: pytest.MonkeyPatch, values: dict[str, Any]) -> set[tuple[str, str]]:
    """Train as the values say, and return each (section, key) that is read, after the values were checked."""
    read: set[tuple[str, str]] = set()
    plain = Options.__getattribute__
    copying = (dataclasses.__file__, base.__file__)  # they read every option

    def noting(self: Any, name: str) -> Any:
        if not name.startswith("_") and sys._getframe(1).f_code.co_filename not in copying:
            read.add((type(self).__name__, name))
        return plain(self, name)

    file = TrainingFile.of(values)
    with monkeypatch.context() as patch:
        patch.setattr(Options, "__getattribute__", noting)
        train(make_job(file))
    return read


def test_training_runs_read_every_key_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key of the schema that no run reads has no effect. The runs: on tokens, and one of each method on rows."""
    monkeypatch.chdir(tmp_path)
    tokens = str(folder(tmp_path, 60))
    (tmp_path / "config.json").write_text(json.dumps(to_hf(MixtralConfig.preset("mixtral-tiny"))))
    read = read_while_training(
        monkeypatch,
        {
            "model": {"folder": ".", "weights": False, "overrides": {"num_hidden_layers": 1}},
            "data": {"training": tokens, "held_out": 0.3},
            "training": {"epochs": 0.03, "sequence": 8, "learning_rate": {"schedule": "wsd", "warmup_tokens": 8}},
            "batch": {"size": 2},
            "evaluate": {"sequences": 2},
            "sample": {"prompt": "a", "tokens": 1},
        },
    )
    rows = [{"prompt": "a", "completion": "b", "label": True, "chosen": "b", "rejected": "c"}] * 2
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "scores.py").write_text("def same(completions, **columns):\n    return [0.0] * len(completions)\n")
    grpo = {"name": "grpo", "rewards": "scores.py:same", "group": 2, "max_new_tokens": 2, "beta": 0.1}
    distill = {"name": "distill", "teacher": "runs/sft/model"}
    for method in ("sft", "simpo", "kto", "reward", grpo, distill):
        name = method if isinstance(method, str) else method["name"]
        values = {"name": name, "method": method, "model": {"preset": "bytes-tiny"}, "tokenizer": "bytes"}
        values |= {"data": "rows.jsonl", "training": {"steps": 1}, "batch": {"size": 2}}
        values |= {} if name == "sft" else {"export": None}  # distill needs the model of sft as its teacher
        read |= read_while_training(monkeypatch, values)
    found = [*vars(sections).values(), *vars(engine_sections).values()]
    classes = [cls for cls in found if isinstance(cls, type) and cls.__module__.startswith("triax.train")]
    unread = {(cls.__name__, key) for cls in classes for key in own_names_of(cls)} - read
    unread -= {("ExpertsSection", key) for key in names_of(sections.ExpertsSection)}  # handed on whole
    assert not unread


def test_triax_train_prints_a_table_of_every_key() -> None:
    table = markdown(TrainingFile, WHOLE)
    assert output_of("train", "--table").strip() == table
    assert len(table.splitlines()) == 2 + len([*rows(TrainingFile, whole=WHOLE)])


def test_the_docs_program_and_commands_run(ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "training-files.md").read_text()
    (tmp_path / "program.py").write_text(programs(text)["program.py"])
    (printed,) = ranks(1, program, ["program.py"], str(tmp_path))
    assert "step 3/3" in printed and "nats per byte on held-out documents" in printed

    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(text.partition("```yaml\n")[2].partition("```")[0])
    make_text((ROOT / "docs" / "train.md").read_text(), tmp_path)
    first, second, *_ = [
        command.partition("#")[0].split()[1:] for _, command in commands(text) if command[:5] == "triax"
    ]
    shutil.rmtree("tokens")
    small = ["training.steps=1", "batch.size=4", "model.preset=bytes-tiny"]
    for words in (first, [*second, *small]):
        output_of(*words)
    assert (tmp_path / "runs" / "first" / "model" / "config.json").exists()
