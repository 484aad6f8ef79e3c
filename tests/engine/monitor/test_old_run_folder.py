"""Run folders that triax 0.1.0 wrote are still read, and the keys of the files have not changed.

``fixtures/run`` is the folder of a run on two pipe ranks: ``run.json``, ``timeline.json`` of step 3, and some lines of
``metrics.jsonl``.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import triax
from triax.engine.monitor.records import RunRecord
from triax.engine.monitor.report.run_folder import read_run, read_trace
from triax.engine.monitor.run_json import write_run

from support.command_line import output_of

OLD = Path(__file__).parent / "fixtures" / "run"


def test_triax_report_reads_a_run_of_version_0_1_0(tmp_path: Path) -> None:
    output_of("report", OLD, "--output", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    for words in (
        *("2 pipe × 1 data × 1 tensor", "7664 parameters", "1f1b, 4 microbatches", "validation loss, last"),
        *("Simulated with its costs", "Time of step 3 by part", "<h2>Memory</h2>", "<h2>Traffic</h2>"),
    ):
        assert words in text, words
    assert "Left out" not in text


def test_read_run_reads_a_run_of_version_0_1_0() -> None:
    run = read_run(OLD)
    assert run.notes == [] and run.last_step == 40
    assert run.series("Train/Samples/train_loss")[0] == (1, 5.510673048799985)
    assert run.series("Validation/loss") == [(40, 2.195706890193403)]
    assert run.record["parameters"] == 7664 and [rank["pipe"] for rank in run.record["ranks"]] == [0, 1]
    assert run.trace is not None
    traced = read_trace(run.trace)
    assert traced is not None and traced.step == 3 and traced.schedule is not None
    timeline = traced.timeline()
    assert [len(row) for row in timeline.rows] == [8, 8] and 0 < timeline.bubble < 1
    assert sum(traced.parts(0).values()) > 0


def written(folder: str) -> None:
    model = triax.PipelineModule(
        [nn.Linear(4, 4), nn.Linear(4, 4)], grid=triax.Grid(), loss_fn=lambda y, _: y.square().mean()
    )
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW"},
        "json_monitor": {"enabled": True, "output_path": folder, "job_name": "new"},
        "timeline": {"step": 3},
    }
    engine, *_ = triax.initialize(model=model, config=config)
    for _ in range(3):
        engine.train_batch(iter([(torch.ones(4, 4), torch.ones(4))]))


def test_a_new_run_has_the_keys_of_version_0_1_0(ranks: Any, tmp_path: Path) -> None:
    ranks(1, written, str(tmp_path))
    old, new = read_run(OLD), read_run(tmp_path / "new")
    without = {"Train/Samples/tokens_per_second", "Train/Samples/bubble"}  # no tokens; recorded in step 3 only
    assert set(old.rows[0]) - without <= set(new.rows[0])
    # since runs say which steps were taken on which grid, and with which command
    added = ("since_step", "earlier", "command")
    assert list(old.record) == [key for key in new.record if key not in added] and new.record["since_step"] == 1
    assert list(old.record["ranks"][0]) == list(new.record["ranks"][0])
    for report in ("memory", "traffic"):
        assert set(old.record["ranks"][0][report]) == set(new.record["ranks"][0][report])
    assert old.trace is not None and new.trace is not None
    assert set(old.trace["otherData"]) == set(new.trace["otherData"])
    kinds = [{(event["ph"], *sorted(event)) for event in run.trace["traceEvents"]} for run in (old, new) if run.trace]
    assert kinds[1] <= kinds[0]
    assert old.record["schedule"].keys() == new.record["schedule"].keys()


@pytest.mark.parametrize(
    ("module", "file", "shown"),
    [
        ("triax.cli.main", "/x/triax/cli/main.py", "python -m triax.cli.main train a.yaml"),
        ("own.__main__", "/x/own/__main__.py", "python -m own train a.yaml"),
        (None, "/x/bin/triax", "triax train a.yaml"),
    ],
)
def test_run_json_has_the_command_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str | None, file: str, shown: str
) -> None:
    main = types.ModuleType("__main__")
    main.__spec__ = ModuleSpec(module, None) if module is not None else None
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", [file, "train", "a.yaml"])
    record: dict[str, Any] = {field.name: None for field in dataclasses.fields(RunRecord)}
    write_run(tmp_path, RunRecord(**record))
    assert json.loads((tmp_path / "run.json").read_text())["command"] == shown
