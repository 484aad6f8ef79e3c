"""examples/train_gpt.py, as a user runs it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from triax.pipe.program.ops import Op
from triax.pipe.program.timeline import Span, Timeline
from triax.train import progress as report

from paths import EXAMPLES
from processes import program

sys.path.insert(0, str(EXAMPLES))

import train_gpt

LOSS = "Train/Samples/train_loss"
SMALL = "--layers 2 --width 16 --heads 2 --sequence 32 --batch 8 --microbatch 2 --steps 6 --warmup 2 --validation 16"


def text(folder: Path) -> None:
    """Write a small text of 8 files to folder/text."""
    if not (folder / "text").exists():
        (folder / "text").mkdir()
        for index in range(8):
            (folder / "text" / f"{index}.txt").write_text(f"def number{index}(x):\n    return x + {index}\n" * 30)


def words(options: str) -> list[str]:
    return [str(EXAMPLES / "train_gpt.py"), *shlex.split(options)]


def start(folder: Path, options: str, launcher: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the example on a small text in `folder`."""
    text(folder)
    command = [*(launcher or [sys.executable]), *words(options)]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def losses(folder: Path, name: str) -> list[float]:
    rows = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return [row[LOSS] for row in rows if LOSS in row]


def test_a_run_from_one_command(ranks: Any, tmp_path: Path) -> None:
    """Four processes and one process: the same losses; and everything that a run leaves."""
    wide = start(
        tmp_path,
        f"--text text --pipe 2 --tensor 2 --sequence-parallel {SMALL} --dtype float64 --name wide --sample 5 "
        "--print-losses",
    )
    assert wide.returncode == 0, wide.stderr
    ranks(1, program, words(f"--text text {SMALL} --dtype float64 --name one --sample 0"), str(tmp_path))
    assert losses(tmp_path, "wide") == pytest.approx(losses(tmp_path, "one"), abs=1e-9, rel=0)
    assert len(losses(tmp_path, "one")) == 6

    said = wide.stdout
    assert [f"step {i} loss {loss!r}" for i, loss in enumerate(losses(tmp_path, "wide"), 1)] == [
        line for line in said.splitlines() if line.startswith("step") and "/" not in line
    ]
    assert "2 pipe x 1 data x 2 tensor; ZeRO 1; 1f1b with 4 microbatches of 2" in said
    assert "nats per byte on held-out documents; byte bigrams: " in said
    assert "\ndef " in said  # the sample
    assert "schedule.png: the pipeline of step 6 as measured\n" in said
    assert said.count("trained 6 steps") == 1  # rank 0 alone speaks
    folder = tmp_path / "runs" / "wide"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert "Validation/byte_bigrams_loss" in rows[-1] and "Validation/loss" in rows[-2]
    assert all("Train/Samples/tokens_per_second" in row for row in rows[:6])
    page = (folder / "report.html").read_text()
    assert "validation" in page and "Simulated with its costs" in page and "rank 3 (pipe 1, data 0, tensor 1)" in page
    assert json.loads((folder / "timeline.json").read_text())["otherData"]["step"] == 6
    assert {path.name for path in (folder / "model").iterdir()} == {"config.json", "model.safetensors"}
    for picture in ("loss.png", "schedule.png"):
        assert (folder / picture).read_bytes()[:4] == b"\x89PNG"
    assert {path.name for path in folder.glob("*.log")} == {"rank-1.log", "rank-2.log", "rank-3.log"}
    assert all(path.read_text() == "" for path in folder.glob("*.log"))


@pytest.mark.parametrize("axes", ["--context 2", "--experts 4 --data 2 --expert-parallel 2"])
def test_the_context_and_the_expert_axis_learn_the_same(ranks: Any, tmp_path: Path, axes: str) -> None:
    text(tmp_path)
    experts = "--experts 4" if "--experts" in axes else ""
    common = f"--text text {SMALL} --steps 3 --dtype float64 --sample 0"
    ranks(2, program, words(f"{common} {axes} --name two"), str(tmp_path))
    ranks(1, program, words(f"{common} {experts} --name one"), str(tmp_path))
    assert losses(tmp_path, "two") == pytest.approx(losses(tmp_path, "one"), abs=1e-9, rel=0)


def test_time_limit_ends_in_good_order(ranks: Any, tmp_path: Path) -> None:
    text(tmp_path)
    options = words(f"--text text {SMALL} --steps 100000 --time-limit 0.005 --sample 0")
    (said,) = ranks(1, program, options, str(tmp_path))
    assert 1 < len(losses(tmp_path, "gpt")) < 2000
    assert " of 100000 steps in " in said and " min: training.time_limit = 0:00 min ended it\n" in said
    assert "nats per byte on held-out documents" in said
    assert (tmp_path / "runs" / "gpt" / "schedule.png").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--pipe 3 --processes 8", "grid: pipe 3 x tensor 1 takes 3 processes a replica, and there are 8"),
        ("--pipe 2 --data 3 --processes 8", "grid: data 3 x pipe 2 x tensor 1 is a grid of 6 processes"),
        ("--pipe 20", "grid.pipe 20 x schedule.chunks 1 is 20 stages, but the model has 8 layers"),
        ("--expert-parallel 2 --data 2", "grid.expert is 2, but a GPTConfig has no experts"),
        ("--experts 3 --expert-parallel 2 --data 2", "grid.expert is 2, but it does not divide the model's 3 experts"),
        ("--experts 4 --expert-parallel 2", "expert=2 does not divide data x context = 1 x 1"),
        ("--tensor 5", "num_attention_heads is 4, but tensor=5 needs at least 5. Give tensor=4 at most"),
        ("--tensor 3 --sequence-parallel", "training.sequence 128 is not shared evenly by grid.tensor 3"),
        ("--pipe 0", "grid.pipe = 0"),
        ("--text nowhere", "nowhere does not exist"),
        ("--batch 30 --microbatch 4", "it must be a multiple of training.microbatch 4 x 1 replicas"),
        ("--heads 5", "num_attention_heads=5 does not divide hidden_size=128"),
        ("--sequence 16 --sample 5 --prompt 'a very long prompt' --text text", "sample.prompt has 18 tokens"),
        ("--steps 0", "training.steps = 0"),
        ("--resume", "give that folder as --save too"),
    ],
)
def test_what_cannot_be_is_one_line(
    tmp_path: Path, options: str, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Wrong options end with one line, and are checked in this process before any other process starts."""
    text(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", words(options))
    with pytest.raises(SystemExit) as left:
        train_gpt.main()
    printed = capfd.readouterr()
    assert left.value.code == 2
    assert_one_line(printed.err, printed.out, said)


@pytest.mark.exhaustive
def test_a_refusal_is_the_programs_one_line(tmp_path: Path) -> None:
    run = start(tmp_path, "--pipe 3 --processes 8")
    assert run.returncode == 2
    assert_one_line(run.stderr, run.stdout, "pipe 3 x tensor 1 takes 3 processes a replica, and there are 8")


def assert_one_line(err: str, out: str, said: str) -> None:
    assert err.startswith("train_gpt.py: error: ") and said in err
    assert err.count("\n") == 1
    assert out == ""


@pytest.mark.exhaustive
def test_under_torchrun(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    good = start(tmp_path, f"--text text --pipe 2 --tensor 2 {SMALL} --name torchrun --sample 0", torchrun)
    assert good.returncode == 0, good.stderr
    assert len(losses(tmp_path, "torchrun")) == 6 and good.stdout.count("trained 6 steps") == 1
    bad = start(tmp_path, "--text text --pipe 3", torchrun)
    assert bad.returncode != 0
    assert bad.stderr.count("train_gpt.py: error: grid: pipe 3 x tensor 1 takes 3 processes a replica") == 1


@pytest.mark.exhaustive
def test_a_run_goes_on_elsewhere(tmp_path: Path) -> None:
    """Half of it on four processes, the rest on one; a run that is done says so."""
    options = f"--text text {SMALL} --dtype float64 --dropout 0.1 --sample 0 --validate-every 3 --save saved"
    whole = start(tmp_path, f"{options} --pipe 2 --data 2 --zero 2 --name whole")
    assert whole.returncode == 0, whole.stderr
    kept = sorted(path.name for path in (tmp_path / "saved").iterdir() if not path.name.startswith("."))
    assert kept == ["global_step3", "global_step6", "latest"]
    done = start(tmp_path, f"{options} --resume --name done")
    assert done.returncode == 0 and "saved is of step 6 of 6: give more steps" in done.stdout
    shutil.rmtree(tmp_path / "saved" / "global_step6")
    rest = start(tmp_path, f"{options} --resume --name rest")
    assert rest.returncode == 0, rest.stderr
    assert losses(tmp_path, "rest") == pytest.approx(losses(tmp_path, "whole")[3:], abs=1e-9, rel=0)


def test_a_timeline_is_drawn_from_its_first_op() -> None:
    late = Timeline(((Span(Op("F", 0, 0), 100.0, 101.0),), (Span(Op("F", 1, 0), 101.25, 103.0),)))
    assert report.from_zero(late).rows == ((Span(Op("F", 0, 0), 0.0, 1.0),), (Span(Op("F", 1, 0), 1.25, 3.0),))


def test_minutes() -> None:
    assert [report.minutes(s) for s in (0, 59.9, 61, 600)] == ["0:00", "0:59", "1:01", "10:00"]
