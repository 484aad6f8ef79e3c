"""Runs under ``triax run`` that are told to go, lose a host, and come back, on as many ranks as there are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from triax.checkpoint.format.folder import tags

from support.checkpoint_jobs import losses
from support.paths import ROOT
from support.processes import TRIAX, free_port, last_line, started

# A step a tenth of a second long, on every rank a replica. Near its end it waits for what the test does.
SCRIPT = """
import json, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch.distributed as dist
from support.checkpoint_jobs import Cell, Job, make
from triax.grid.environment import read_environment

steps, folder, pause = int(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4])
world = read_environment().world_size
section = {"dir": str(folder / "saved"), "every": 2, "keep": 3, "resume": "auto", "async": True}
engine = make(Cell((1, world, 1), stage=1), Job(), checkpoint=section)
with (folder / "losses.jsonl").open("a") as file:
    while engine.global_steps < steps:
        loss = engine.train_batch().item()
        if engine.grid.rank == 0:
            file.write(json.dumps([world, engine.global_steps, loss]) + "\\n")
            file.flush()
        time.sleep(pause)
        while engine.global_steps >= steps - 5 and not (folder / "go on").exists():
            time.sleep(0.05)
engine.wait_for_checkpoint()
"""


def script(folder: Path) -> Path:
    path = folder / "script.py"
    path.write_text(SCRIPT)
    return path


def seen(folder: Path) -> list[tuple[int, int, float]]:
    file = folder / "losses.jsonl"
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def wait_until(folder: Path, process: Any, world: int, step: int) -> None:
    deadline = time.monotonic() + 200
    while not any(at == world and number >= step for at, number, _ in seen(folder)):
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.05)


def require_undisturbed_losses(folder: Path, steps: int, left: int) -> None:
    """Check that each step's loss, also of repeated steps, equals the undisturbed run's, and that no step is missing.

    But for those steps after which the ranks were told to go, ``left`` times at the most: they are in a checkpoint, and
    train_batch did not return.
    """
    wanted, last, gaps = losses(steps), 0, 0
    for _, step, loss in seen(folder):
        assert step <= last + 2 and loss == pytest.approx(wanted[step - 1], rel=1e-10, abs=1e-10)
        gaps += step == last + 2
        last = step
    assert last == steps and gaps <= left and tags(folder / "saved")[-1] == f"global_step{steps}"


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_sigterm_to_the_launcher_saves_and_a_restart_resumes(tmp_path: Path) -> None:
    """A preempted host: no step is computed twice."""
    command = [*TRIAX, "run", "--nproc", 2, "--log-dir", tmp_path / "logs", "--threads", 1, "--tee", "none"]
    command += [script(tmp_path), ROOT / "tests", 12, tmp_path]
    with started(*command, 0.05, cwd=tmp_path) as process:
        wait_until(tmp_path, process, 2, 3)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=150)
    assert process.returncode == 128 + signal.SIGTERM and "stopped by SIGTERM" in last_line(err), err
    done = seen(tmp_path)[-1][1]
    saved = int(tags(tmp_path / "saved")[-1].removeprefix("global_step"))
    assert saved in (done, done + 1) and saved >= 3
    (tmp_path / "go on").touch()
    again = subprocess.run([str(word) for word in [*command, 0]], cwd=tmp_path, capture_output=True, timeout=200)
    assert again.returncode == 0, again.stderr
    require_undisturbed_losses(tmp_path, 12, left=1)
    assert len({step for _, step, _ in seen(tmp_path)}) == len(seen(tmp_path))  # no step twice


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_a_run_continues_when_hosts_leave_and_join(tmp_path: Path) -> None:
    """One of two hosts (``--nnodes 1:2``) is killed, later there are two again: other data axes, equal losses."""
    steps, port = 120, free_port()
    command = [*TRIAX, "run", "--nnodes", "1:2", "--nproc", 1, "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "j"]
    command += ["--rdzv-conf", "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=8"]
    command += ["--max-restarts", 9, "--threads", 1, "--tee", "none", "--log-dir"]
    end = [script(tmp_path), ROOT / "tests", steps, tmp_path, 0.1]
    with started(*command, tmp_path / "one", *end, cwd=tmp_path) as one:
        wait_until(tmp_path, one, 1, 1)
        with started(*command, tmp_path / "two", *end, cwd=tmp_path) as two:
            wait_until(tmp_path, one, 2, 1)
            joined = seen(tmp_path)[-1][1]
            wait_until(tmp_path, one, 2, joined + 3)
            os.killpg(two.pid, signal.SIGKILL)  # the host is gone, and says nothing
        left = seen(tmp_path)[-1][1]
        wait_until(tmp_path, one, 1, left + 2)
        with started(*command, tmp_path / "three", *end, cwd=tmp_path) as three:
            wait_until(tmp_path, one, 2, left + 3)
            (tmp_path / "go on").touch()
            assert three.wait(200) == 0
            _, err = one.communicate(timeout=150)
        assert one.returncode == 0, err
    worlds = [world for world, _, _ in seen(tmp_path)]
    changes = [a for a, b in zip(worlds, worlds[1:] + [0], strict=True) if a != b]
    assert changes == [1, 2, 1, 2], changes
    require_undisturbed_losses(tmp_path, steps, left=2)
