"""`triax train FILE --dry-run`: a training file without its data, on a cluster that is not here."""

from __future__ import annotations

import re
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from triax.cli.dry_run import JobSteps
from triax.cli.main import app
from triax.plugins.dry_run.dry_run import dry_run
from triax.plugins.dry_run.rank import Settings
from triax.train.file import read_training_file
from triax.train.job import resolve

from support.paths import DOCS, ROOT
from support.resident import status

FILE = """
model: {preset: llama-tiny, overrides: {num_hidden_layers: 4}}
data: {training: no-such-tokens}
grid: {pipe: 2, data: 4, tensor: 2}
training: {steps: 4, sequence: 64}
batch: {size: 32, microbatch: 2}
precision: bf16
"""


@pytest.mark.exhaustive
def test_a_training_file_dry_runs_without_its_data(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(FILE)
    words = [sys.executable, "-m", "triax.cli.main", "train", str(file), "--dry-run"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "dry run of 16 ranks: pipe 2 x data 4 x tensor 2" in done.stdout
    assert "the dry run ran 2 of the 4 microbatches of a step" in done.stdout
    assert "nothing would have failed" in done.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("command", "ranks"),
    re.findall(r"^\| `(triax .*?--dry-run.*?)` \| (\d+) \|", (DOCS / "launch.md").read_text(), re.MULTILINE),
)
def test_a_dry_run_of_1024_ranks_takes_under_a_minute_and_4_gib(command: str, ranks: str, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "triax.cli.main", *shlex.split(command)[1:]]
    words = [str(ROOT / word) if word.startswith("examples/") else word for word in words]
    start = time.monotonic()
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    seconds, largest = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    assert done.returncode == 0, done.stdout + done.stderr
    assert "dry run of 1,024 ranks" in done.stdout and f"; {ranks} ranks were run" in done.stdout
    assert seconds < 60
    stages = 8 if "--pipe 8" in command else 4  # that run at the same time, beside the command itself
    assert largest * (1 + stages) < 4


def test_a_planned_training_file_dry_runs_in_stage_3(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    asked = ["--model", "llama-tiny", "--gpus", "8", "--batch", "16", "--sequence", "32", "--layout"]
    planned = CliRunner().invoke(app, ["plan", *asked, "pipe=2,tensor=2,zero=3", "--output", str(file)])
    assert planned.exit_code == 0, planned.output
    assert yaml.safe_load(file.read_text())["zero"] == 3
    run = dry_run(JobSteps(resolve(read_training_file(file)[0])), Settings(8))
    assert run.problems == []
    # A quarter of the optimizer's memory of the two stages, whose weights no rank holds as a whole.
    held = [run.records[rank]["memory"] for rank in (0, 4)]
    assert all(2 * each["parameters"] == each["masters"] > 0 for each in held), held


LARGE = """
model: {preset: llama3-70b, overrides: {num_hidden_layers: 2}}
data: {training: no-such-tokens}
grid: {pipe: 2, data: 2}
training: {steps: 4, sequence: 2048}
batch: {size: 8, microbatch: 2}
precision: bf16
"""
OFFLOADS: dict[str, dict[str, Any]] = {
    "optimizer to cpu": {"zero": {"stage": 1, "offload_optimizer": "cpu"}},
    "all to cpu": {"zero": {"stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"}},
    "all to nvme": {
        "zero": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "path": "no-such-folder"},
            "offload_parameters": {"device": "nvme", "path": "no-such-folder"},
        },
        "checkpoint": {"background": False},
    },
    "inputs of recomputed layers": {"recompute": {"interval": 1, "cpu_checkpointing": True}},
    "activations to cpu": {
        "schedule": {"name": "gpipe", "offload": {"device": "cpu", "copy_time": 0.1}},
        "batch": {"size": 32},
    },
}


def bounded(program: Callable[[], None]) -> None:
    """Run a program in a process that can allocate 1 GiB more, and write 1 MiB into a file."""
    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + 2**30,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20,) * 2)
    program()


@pytest.mark.parametrize("offload", OFFLOADS)
def test_a_dry_run_allocates_no_memory_for_offloaded_state(offload: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    settings = yaml.safe_load(LARGE)
    for section, keys in OFFLOADS[offload].items():
        settings[section] = settings.get(section, {}) | keys
    file.write_text(yaml.safe_dump(settings))
    job = resolve(read_training_file(file)[0])
    assert job.schedule.offloads == (offload == "activations to cpu")  # of 4 microbatches it would offload none
    run = dry_run(partial(bounded, JobSteps(job)), Settings(4))
    assert run.problems == [], (run.problems, run.logs)
    for record in run.records.values():
        offloaded = sum(sum(kinds.values()) for kinds in record["offloaded"].values())
        # A rank has half of the fp32 masters and two moments; in stage 3 of the bf16 weights and fp32 gradients too.
        expected = {"optimizer to cpu": 12 / 2, "all to cpu": 18 / 2, "all to nvme": 18 / 2}.get(offload, 0)
        assert offloaded == pytest.approx(expected * record["parameters"], rel=1e-3)
        if job.schedule.offloads:  # of 8 microbatches, of about 1.5 GiB each, one or two are on the device at a time
            memory = record["memory"]
            assert 1.5 * 2**30 < memory.get("activations", 0) + memory["working"] < 4 * 2**30


def test_ranks_of_a_dry_run_end_with_the_process_that_started_it(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(FILE)
    words = [sys.executable, "-m", "triax.cli.main", "train", str(file), "--dry-run"]
    with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        assert "rank 0 of 16 and its pipeline run a step" in process.stderr.readline()
        while not (children := Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()):
            time.sleep(0.01)
        process.terminate()
    for _ in range(1000):
        left = [each for each in children if Path(f"/proc/{each}").exists()]
        if not left:
            break
        time.sleep(0.01)
    assert not left
