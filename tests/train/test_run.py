"""`triax train` on several processes has the losses of one; its results, its time limit, its refusals."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import triax
from triax.base.errors import ConfigError
from triax.engine.monitor.report import pictures
from triax.pipe.program.ops import Op
from triax.pipe.program.timeline import Span, Timeline
from triax.train import loop, progress
from triax.train.job import resolve
from triax.train.sections import TrainingFile
from triax.train.start import make_job

from support.file_runs import NoPictures, rows_of, written_losses
from support.processes import TRIAX

SHAPE = {
    "vocab_size": 256,
    "max_position_embeddings": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
EXPERTS = {"intermediate_size": 32, "num_key_value_heads": 2, "num_experts": 4}


def values(name: str = "run", **changes: Any) -> dict[str, Any]:
    """Return a small training file; a change replaces keys of a section, or a value."""
    found: dict[str, Any] = {
        "name": name,
        "seed": 3,
        "model": {"preset": "bytes-small", "overrides": SHAPE},
        "data": {"training": "tokens", "held_out": 0.2, "document_mask": False},
        "training": {"steps": 6},
        "batch": {"size": 8, "microbatch": 2},
        "precision": "fp64",
        "zero": 1,
        "evaluate": {"sequences": 16},
        "checkpoint": False,
    }
    for key, value in changes.items():
        found[key] = found[key] | value if isinstance(found.get(key), dict) and isinstance(value, dict) else value
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, with a folder of tokens."""
    monkeypatch.chdir(tmp_path)
    for index in range(8):
        (tmp_path / f"{index}.txt").write_text(f"def number{index}(x):\n    return x + {index}\n" * 30)
    triax.data.tokenize([f"{index}.txt" for index in range(8)], "bytes", "tokens")
    return tmp_path


def train(given: dict[str, Any], folder: str, pictures: bool = False) -> None:
    """Train on this rank."""
    os.chdir(folder)
    loop.train(make_job(TrainingFile.of(given)), [] if pictures else [NoPictures()])


def losses(folder: Path, name: str) -> list[float]:
    return written_losses(folder / "runs" / name)


@pytest.mark.parametrize("flag", ["-q", "-v"])
def test_a_quiet_run_prints_no_progress(folder: Path, flag: str) -> None:
    (folder / "run.yaml").write_text(yaml.safe_dump(values("run", training={"steps": 2}, grid={"pipe": 2})))
    done = subprocess.run([*TRIAX, flag, "train", "run.yaml"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert (done.stdout == "") == (flag == "-q") and (folder / "runs" / "run" / "report.html").exists()
    wrong = subprocess.run([*TRIAX, flag, "train", "none.yaml"], capture_output=True, text=True, check=False)
    lines = wrong.stderr.splitlines()
    assert wrong.returncode == 2 and lines[-1].startswith("triax: none.yaml")
    assert lines[0].startswith("Traceback") if flag == "-v" else len(lines) == 1


def test_triax_train_on_four_processes_has_the_losses_of_one(ranks: Any, folder: Path) -> None:
    """Four processes and one process: the same losses; and everything that a run leaves."""
    wide = values(
        "wide",
        grid={"pipe": 2, "tensor": 2, "sequence_parallel": True},
        sample={"prompt": "def ", "tokens": 5},
        monitor={"print_losses": True},
    )
    (folder / "run.yaml").write_text(yaml.safe_dump(wide))
    done = subprocess.run([*TRIAX, "train", "run.yaml"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    ranks(1, train, values("one"), str(folder))
    assert losses(folder, "wide") == pytest.approx(losses(folder, "one"), abs=1e-10, rel=0)
    assert len(losses(folder, "one")) == 6

    said = done.stdout
    assert [f"step {i} loss {loss!r}" for i, loss in enumerate(losses(folder, "wide"), 1)] == [
        line for line in said.splitlines() if line.startswith("step") and "/" not in line
    ]
    assert "2 pipe x 1 data x 2 tensor; ZeRO 1; 1f1b with 4 microbatches of 2" in said
    assert "nats per byte on held-out documents" in said
    assert "\ndef " in said  # the sample
    assert "schedule.png: the pipeline of step 6 as measured\n" in said
    assert said.count("trained 6 of 6 steps") + said.count("trained 6 steps") == 1  # rank 0 alone speaks
    made = folder / "runs" / "wide"
    rows = rows_of(made)
    assert "Validation/loss" in rows[-1]
    assert all("Train/Samples/tokens_per_second" in row for row in rows[:6])
    page = (made / "report.html").read_text()
    assert "validation" in page and "Simulated with its costs" in page and "rank 3 (pipe 1, data 0, tensor 1)" in page
    assert json.loads((made / "timeline.json").read_text())["otherData"]["step"] == 6
    assert {path.name for path in (made / "model").iterdir()} >= {"config.json", "model.safetensors"}
    for picture in ("loss.png", "schedule.png"):
        assert (made / picture).read_bytes()[:4] == b"\x89PNG"
    assert {path.name for path in made.glob("*.log")} == {"rank-1.log", "rank-2.log", "rank-3.log"}
    assert all(path.read_text() == "" for path in made.glob("*.log"))


@pytest.mark.parametrize("grid", [{"context": 2}, {"data": 2, "expert": 2}])
def test_context_and_expert_axes_have_the_losses_of_one_process(ranks: Any, folder: Path, grid: dict[str, int]) -> None:
    model = {"preset": "mixtral-tiny", "overrides": SHAPE | EXPERTS} if "expert" in grid else {}
    ranks(2, train, values("two", model=model, grid=grid, training={"steps": 3}), str(folder))
    ranks(1, train, values("one", model=model, training={"steps": 3}), str(folder))
    assert losses(folder, "two") == pytest.approx(losses(folder, "one"), abs=1e-10, rel=0)


def test_a_time_limit_ends_the_run_and_evaluates(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(values(training={"steps": 100_000, "time_limit": "0.3s"}), str(folder), pictures=True)
    said = capfd.readouterr().out
    assert 1 < len(losses(folder, "run")) < 2000
    assert " of 100000 steps in " in said and " min: training.time_limit = 0:00 min ended it\n" in said
    assert "nats per byte on held-out documents" in said
    assert (folder / "runs" / "run" / "schedule.png").exists()


@pytest.mark.parametrize(
    ("changes", "processes", "said"),
    [
        ({"grid": {"pipe": 3}}, 8, "grid: pipe 3 x tensor 1 takes 3 processes a replica, and there are 8"),
        ({"grid": {"pipe": 2, "data": 3}}, 8, "is a grid of 6 processes, and there are 8"),
        ({"grid": {"pipe": 20}}, None, "grid.pipe 20 x schedule.chunks 1 is 20 stages, but the model has 6 layers"),
        (
            {"grid": {"expert": 2, "data": 2}, "model": {"preset": "mixtral-tiny", "overrides": {"num_experts": 3}}},
            None,
            "grid.expert is 2, but it does not divide the model's 3 experts",
        ),
        ({"grid": {"tensor": 5}}, None, "num_attention_heads is 2, but tensor=5 needs at least 5"),
        (
            {"grid": {"tensor": 2, "sequence_parallel": True}, "training": {"sequence": 31}},
            None,
            "training.sequence 31 is not shared evenly by grid.tensor 2",
        ),
        ({"batch": {"microbatch": 3}}, None, "batch: size 8 is no multiple of microbatch 3"),
        ({"model": {"overrides": SHAPE | {"num_attention_heads": 5}}}, None, "num_attention_heads=5 does not divide"),
    ],
)
def test_impossible_training_files_are_refused(changes: dict[str, Any], processes: int | None, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(TrainingFile.of(values(**changes)), processes)
    assert said in str(refused.value)


def test_a_sample_prompt_that_is_too_long_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"sample\.prompt has 40 tokens"):
        make_job(TrainingFile.of(values(sample={"prompt": 40 * "a", "tokens": 5})))


def test_a_timeline_is_drawn_from_its_first_op() -> None:
    late = Timeline(((Span(Op("F", 0, 0), 100.0, 101.0),), (Span(Op("F", 1, 0), 101.25, 103.0),)))
    assert pictures.from_zero(late).rows == ((Span(Op("F", 0, 0), 0.0, 1.0),), (Span(Op("F", 1, 0), 1.25, 3.0),))


def test_seconds_are_shown_as_minutes_and_seconds() -> None:
    assert [progress.minutes(s) for s in (0, 59.9, 61, 600)] == ["0:00", "0:59", "1:01", "10:00"]
