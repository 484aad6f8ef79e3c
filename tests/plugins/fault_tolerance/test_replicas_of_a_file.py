"""A training file with ``fault_tolerance``: kill -9 under ``triax run --replicas``, a replay, and one process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import triax
from triax.base.errors import ConfigError
from triax.data.token_data import TokenData
from triax.engine.monitor.report.membership import read_membership
from triax.grid import layout_of
from triax.plugins.fault_tolerance.membership import History, Ledger
from triax.train.file import read_training_file
from triax.train.job import Job, resolve
from triax.train.model import build_module, parameter_groups

from support.processes import started
from support.reference import gpt_logits
from support.tokenized import folder

RUN = """\
name: {name}
model: {{preset: bytes-tiny}}
data: {{training: tokens, held_out: 0.2, threads: 0}}
training: {{steps: 14, sequence: 32, learning_rate: {{peak: 1e-2}}}}
batch: {{size: 4, microbatch: 2}}
precision: fp64
evaluate: {{every: 5, patience: 9}}
checkpoint: {{every: 4}}
export: false
fault_tolerance: {faults}
"""
STEPS = 14
RUN_REPLICAS = [sys.executable, "-m", "triax.cli.main", "run", "--replicas", "2", "--nproc", "1", "--min-replicas", "2"]
TRAIN = ["--no-python", sys.executable, "-m", "triax.cli.main", "train", "run.yaml"]


def job(root: Path, faults: str, name: str = "faults") -> Job:
    """Resolve the training file, which is written."""
    (root / "run.yaml").write_text(RUN.format(name=name, faults=faults))
    return resolve(read_training_file(root / "run.yaml", [])[0])


def written(root: Path, name: str, replica: str) -> dict[int, float]:
    """Losses that a replica has written: step -> loss."""
    file = root / "runs" / name / f"replica-{replica}" / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {row["step"]: row["Train/Samples/train_loss"] for row in rows if "Train/Samples/train_loss" in row}


def rank_of(root: Path, replica: str) -> int:
    """Process number of the rank of a replica: the process of this folder with a rank's environment and command."""
    for each in Path("/proc").iterdir():
        if each.name.isdecimal():
            with contextlib.suppress(OSError):
                variables = (each / "environ").read_bytes().split(b"\0")
                words = (each / "cmdline").read_bytes().split(b"\0")
                here = (each / "cwd").resolve() == root.resolve()
                is_rank = f"TRIAX_REPLICA={replica}".encode() in variables and b"RANK=0" in variables
                if here and is_rank and words[-3:-1] == [b"train", b"run.yaml"] and b"run" not in words:
                    return int(each.name)
    raise LookupError(f"replica {replica} has no rank")


def coordinator_of(launcher: int) -> int:
    """Process number of the coordinator that a launcher has started."""
    for each in map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()):
        if b"coordinator" in Path(f"/proc/{each}/cmdline").read_bytes().split(b"\0"):
            return each
    raise LookupError(f"launcher {launcher} has no coordinator")


def in_one_process(job: Job, history: Path) -> list[float]:
    """Losses of plain PyTorch that takes the samples of a history."""
    module = build_module(job, triax.Grid())
    weights: dict[str, torch.Tensor] = {layout_of(p).name: p for p in module.parameters()}
    groups = parameter_groups(job, module)
    adam = torch.optim.AdamW(groups or module.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    loader = TokenData("tokens", 32, held_out=0.2).loader(4, 4, threads=0)
    ledger, past, found = Ledger(), History.from_file(history), []
    assert job.learning_rate is not None
    for step in range(STEPS):
        members, counted = past.members(step), past.counted(step)
        shares = ledger.plan(members)
        total, weight = torch.zeros((), dtype=torch.float64), 0
        for name in counted:
            loader.seek(shares[name])
            (ids, documents), labels = next(loader)
            logits = gpt_logits(weights, ids, 2, 4, documents)
            total = total + F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            weight += int((labels != -100).sum())
        ledger.record(step, members, counted)
        for group in adam.param_groups:
            group["lr"] = 1e-2 * job.learning_rate.share(step)
        adam.zero_grad()
        (total / weight).backward()
        torch.nn.utils.clip_grad_norm_([*module.parameters()], 1.0)
        adam.step()
        found.append(float(total.detach() / weight))
    return found


@pytest.mark.exhaustive
def test_a_killed_replica_and_coordinator_are_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    folder(tmp_path, 60)
    whole = job(tmp_path, "true")
    with started(*RUN_REPLICAS, "--max-restarts", "2", *TRAIN) as process:
        deadline = time.monotonic() + 100
        while max(written(tmp_path, "faults", "1"), default=0) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(coordinator_of(process.pid), signal.SIGKILL)
        before = max(written(tmp_path, "faults", "1"))
        while max(written(tmp_path, "faults", "1")) < before + 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(rank_of(tmp_path, "1"), signal.SIGKILL)
        out, errors = process.communicate(timeout=150)
        assert process.returncode == 0, out + errors
        assert "the coordinator died with code -9: it is started again (1 of 2)" in errors
    found = [written(tmp_path, "faults", name) for name in "01"]
    assert [*found[0]] == [*range(1, STEPS + 1)] and found[1].items() <= found[0].items() and STEPS in found[1]
    history = tmp_path / "runs" / "faults" / "history" / "0.jsonl"
    past = History.from_file(history)
    assert any("1" not in past.counted(step) for step in range(STEPS))
    expected = in_one_process(whole, history)
    assert [*found[0].values()] == pytest.approx(expected, rel=1e-10)

    membership = read_membership(tmp_path / "runs" / "faults")
    assert membership is not None and membership.names == ["0", "1"]
    assert membership.lost["restart"] > 0 and membership.lost["joining"] > 0 and 0 < membership.goodput < 1

    job(tmp_path, f"{{replay: {history}}}", "again")
    done = subprocess.run([*RUN_REPLICAS, *TRAIN], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert written(tmp_path, "again", "1") == found[0]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("training={tokens: 1e6}", "training.tokens does not fix a number of steps"),
        ("training.time_limit=1h", "training.time_limit would end each replica"),
        ("training.spikes=rewind", "training.spikes rewind"),
        ("method=dpo", "method dpo does not work with fault_tolerance"),
        ("schedule.partition=time", "schedule.partition time measures the layers"),
    ],
)
def test_a_training_file_refuses_settings_replicas_cannot_share(tmp_path: Path, change: str, problem: str) -> None:
    (tmp_path / "run.yaml").write_text(RUN.format(name="a", faults="true"))
    with pytest.raises(ConfigError, match=problem):
        read_training_file(tmp_path / "run.yaml", [change])


def test_each_replica_of_a_training_file_has_its_own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIAX_REPLICA", "b")
    found: Any = job(tmp_path, "true")
    own = Path("runs") / "faults" / "replica-b"
    assert (found.folder, found.checkpoints) == (own, "runs/faults/checkpoints/replica-b")
    assert found.options.fault_tolerance.folder == "runs/faults/history"
