"""train/requeue.py: Slurm's signal saves on all ranks, and rank 0 puts the job into the queue again."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from triax.checkpoint.format.folder import tags
from triax.train.requeue import requeued

from support.checkpoint_jobs import Cell, Job, make
from support.file_runs import rows_of
from support.processes import started
from support.tokenized import folder

# A run that only a signal ends, or a checkpoint from.
LONG = """\
name: long
model: {preset: bytes-tiny}
data: {training: tokens, held_out: 0.2, threads: 0}
training: {steps: 100000, sequence: 32, learning_rate: 1e-3}
evaluate: {every: 100000}
checkpoint: {every: 100000}
batch: {size: 8, microbatch: 2}
"""


def leave(folder: str, number: int, requeue: bool) -> tuple[int, int]:
    """Train until a signal that rank 1 alone gets; the step at which this rank left, and its exit code."""
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)}
    engine = make(Cell((1, 2, 1), stage=1), Job(), checkpoint={"dir": f"{folder}/run", "every": 1000})
    path = os.environ["PATH"]
    os.environ |= {"PATH": f"{folder}:{path}", "SLURM_JOB_ID": "77"}
    try:
        with requeued(requeue, engine.grid.rank):
            while engine.global_steps < 5:
                if engine.global_steps == 1 and engine.grid.rank == 1:
                    os.kill(os.getpid(), number)
                    if number == signal.SIGUSR1:
                        os.kill(os.getpid(), number)  # the launcher and Slurm both send it
                        os.kill(os.getpid(), signal.SIGTERM)  # and the time limit has come
                engine.train_batch()
    except SystemExit as end:
        return engine.global_steps, int(end.code or 0)
    finally:
        os.environ["PATH"] = path
        del os.environ["SLURM_JOB_ID"]
        for each, handler in before.items():
            signal.signal(each, handler)
    return engine.global_steps, 0


def stub(folder: Path, code: int) -> Path:
    """A scontrol that writes down how it was called."""
    said = folder / "said"
    script = folder / "scontrol"
    script.write_text(f"#!/bin/sh\necho \"$@\" >> {said}\necho 'Access/permission denied' >&2\nexit {code}\n")
    script.chmod(0o755)
    return said


@pytest.mark.parametrize(
    ("number", "requeue", "calls"),
    [(signal.SIGUSR1, True, "requeue 77\n"), (signal.SIGUSR1, False, ""), (signal.SIGTERM, True, "")],
)
def test_a_signal_saves_a_checkpoint_and_requeues_the_job(
    ranks: Any, tmp_path: Path, number: signal.Signals, requeue: bool, calls: str
) -> None:
    said = stub(tmp_path, 0)
    assert ranks(2, leave, str(tmp_path), int(number), requeue, timeout=60) == [(2, 128 + number)] * 2
    assert tags(tmp_path / "run") == ["global_step2"]
    assert (said.read_text() if said.exists() else "") == calls


def test_a_requeue_that_fails_says_what_to_do(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    stub(tmp_path, 1)
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    for path, reason in ((str(tmp_path), "Access/permission denied"), ("/nowhere", "No such file or directory")):
        monkeypatch.setenv("PATH", f"{path}:/bin" if path != "/nowhere" else path)
        with pytest.raises(SystemExit), requeued(True, 0):
            raise SystemExit(138)
        assert "the job was not requeued: scontrol requeue 5 failed" in caplog.text and reason in caplog.text


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_ctrl_c_saves_a_checkpoint_and_ends_the_run(tmp_path: Path, processes: int) -> None:
    """The run ends after the step and says the reason; the same command continues from there."""
    folder(tmp_path, 60)
    (tmp_path / "run.yaml").write_text(LONG)
    triax, run = Path(sys.executable).parent / "triax", tmp_path / "runs" / "long"
    with started(triax, "train", "run.yaml", f"grid.pipe={processes}", cwd=tmp_path) as process:
        while process.poll() is None and not (run / "metrics.jsonl").exists():
            time.sleep(0.02)
        assert process.poll() is None, process.communicate()
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=100)
    assert process.returncode == 130 and "SIGINT was received: the run ends after step" in err, err
    assert "Ctrl-C again ends it at once" in err and "Traceback" not in err
    last = max(row["step"] for row in rows_of(run))
    assert tags(run / "checkpoints") == [f"global_step{last}"]
