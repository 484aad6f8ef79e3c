"""Writers of other packages: a run writes to a local store of MLflow or trackio, and its own reader reads it back."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import triax
from triax.base.errors import ConfigError

METRIC = "Train/Samples/train_loss"
STEPS = 3


# Imported within tests: it would take 2 s of each worker's collection, and one worker has these tests.
@pytest.fixture(autouse=True)
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return MLflow; no run of it is left behind."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # mlflow-skinny has no database
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow

    yield mlflow
    mlflow.end_run()


def engine_with(folder: Path, writers: dict[str, dict[str, str]]) -> triax.Engine:
    """Return an engine with writers, and with metrics.jsonl beside them."""
    torch.manual_seed(0)
    model = triax.PipelineModule([triax.LayerSpec(nn.Linear, 3, 3)], loss_fn=nn.functional.mse_loss)
    monitor = triax.Monitoring(json=str(folder), writers=writers)
    return triax.Engine(model, optimizer=triax.Optimizer("SGD", lr=0.1), batch=2, monitor=monitor)


def train_step(engine: Any) -> None:
    engine.train_batch(iter([(torch.randn(2, 3), torch.randn(2, 3))]))


def written(folder: Path, writer: str, **arguments: str) -> dict[int, float]:
    """Train with a writer; return the losses in metrics.jsonl, by step."""
    engine = engine_with(folder, {writer: arguments})
    for _ in range(STEPS):
        train_step(engine)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[METRIC] for line in lines}


def test_mlflow_reads_the_losses_of_a_run_back(mlflow: Any, tmp_path: Path) -> None:
    store = (tmp_path / "mlruns").as_uri()
    expected = written(tmp_path / "run", "mlflow", experiment="digits", run_name="first", tracking_uri=store)
    client = mlflow.MlflowClient(store)
    experiment = client.get_experiment_by_name("digits")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    found = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, METRIC)}
    assert run.info.run_name == "first" and found == expected and len(found) == STEPS


def test_mlflow_metrics_go_to_the_users_own_run(mlflow: Any, tmp_path: Path) -> None:
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    mlflow.set_experiment("mine")
    with mlflow.start_run() as run:
        expected = written(tmp_path / "run", "mlflow")
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, METRIC)
    assert {metric.step: metric.value for metric in history} == expected


def test_trackio_reads_the_losses_of_a_run_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trackio
    from trackio import sqlite_storage

    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", tmp_path / "trackio")
    expected = written(tmp_path / "run", "trackio", project="digits", name="first")
    trackio.finish()
    (run,) = trackio.Api().runs("digits")
    rows = sqlite_storage.SQLiteStorage.get_metric_values("digits", run.name, METRIC)
    assert {row["step"]: row["value"] for row in rows} == expected and len(rows) == STEPS


def test_a_tracker_that_fails_does_not_stop_the_run(
    mlflow: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """MLflow's store is away during a step, and is back for the next one."""
    store = tmp_path / "mlruns"
    engine = engine_with(tmp_path / "run", {"mlflow": {"tracking_uri": store.as_uri()}})
    store.rename(tmp_path / "away")
    train_step(engine)
    shutil.rmtree(store, ignore_errors=True)
    (tmp_path / "away").rename(store)
    assert "cannot be written: monitor.writers.mlflow:" in caplog.text
    train_step(engine)
    run = mlflow.active_run()
    assert run is not None
    assert [m.step for m in mlflow.MlflowClient().get_metric_history(run.info.run_id, METRIC)] == [2]


@pytest.mark.parametrize(
    ("writers", "words"),
    [
        ({"mlfow": {}}, "there is no 'mlfow'; did you mean 'mlflow'?"),
        ({"mlflow": {"experimnt": "digits"}}, "mlflow has no experimnt"),
        ({"mlflow": {"tracking_uri": "nowhere://"}}, "the writer monitor.writers.mlflow cannot be made"),
    ],
)
def test_a_writer_that_cannot_be_made_is_refused(tmp_path: Path, writers: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        engine_with(tmp_path, writers)
