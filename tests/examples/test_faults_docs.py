"""docs/faults.md: its commands, with replicas of processes, one of which is drained, and the report of its file."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from triax.plugins.fault_tolerance.membership import Change, read_changes

from support.paths import DOCS
from support.processes import TRIAX, free_port, started
from support.readme_blocks import blocks, commands, programs
from support.tokenized import folder

TEXT = (DOCS / "faults.md").read_text()
RUN, DRAIN, SECRET, COORDINATOR, BY_NAME, TORCHRUN, FILE, REPORT = (
    shlex.split(command, comments=True) for _, command in commands(TEXT)
)
SECONDS = 200


def typed(command: list[str], address: str = "") -> list[Any]:
    """Return a command of the page, with the address of a coordinator here."""
    words = [address if address and word.startswith("host:") else word for word in command]
    words = ["127.0.0.1" if word == "host" else word for word in words]
    programs = {"triax": TRIAX, "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
    return [each for word in words for each in programs.get(word, [word])]


@contextlib.contextmanager
def place(root: Path, slower: float = 0.0) -> Iterator[dict[str, str]]:
    """Write the page's program, with a pause in each step; yields the variables of a process."""
    (source,) = programs(TEXT).values()
    pause = f"    __import__('time').sleep({slower})\n"
    (root / "train.py").write_text(source.replace("    loss = engine", pause + "    loss = engine"))
    yield {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def history(root: Path, name: str) -> list[Change]:
    """Changes that a replica has written so far."""
    file = root / "history" / f"{name}.jsonl"
    return read_changes(file) if file.exists() else []


@pytest.mark.exhaustive
def test_draining_a_replica_lets_the_others_finish(tmp_path: Path) -> None:
    with place(tmp_path, slower=1.0) as variables:
        options: dict[str, Any] = {"cwd": tmp_path, "env": variables}
        with started(*typed(RUN), **options) as run:
            deadline = time.monotonic() + SECONDS
            while not any("3" in (each.members or ()) for each in history(tmp_path, "3")):
                assert time.monotonic() < deadline and run.poll() is None
                time.sleep(0.1)
            done = subprocess.run(typed(DRAIN), capture_output=True, text=True, timeout=SECONDS, check=False, **options)
            assert done.returncode == 0 and done.stdout == "replica 3 has left\n", done.stdout + done.stderr
            out, errors = run.communicate(timeout=SECONDS)
            assert run.returncode == 0, out + errors
    last = [each for each in history(tmp_path, "0") if each.members is not None][-1]
    assert last.members is not None and "3" not in last.members and last.facts["left"] == ["3"]
    losses = dict(re.findall(r"^replica (\d): (\d\.\d{4})$", out, re.MULTILINE))
    assert set(losses) == {*"012"} and len({*losses.values()}) == 1
    assert "replica 3 was asked to go and has left" in errors


@pytest.mark.exhaustive
def test_replicas_of_several_launchers_join_one_run(tmp_path: Path) -> None:
    port = free_port()
    variables, command = TORCHRUN[:2], typed(TORCHRUN[2:])
    own = dict(each.replace("host:29510", f"127.0.0.1:{port}").split("=") for each in variables)
    server = [str(port) if word == "29510" else word for word in typed(COORDINATOR)]
    server = ["3" if before == "--min-replicas" else word for before, word in zip(["", *server], server, strict=False)]
    with place(tmp_path) as plain, contextlib.ExitStack() as open_:
        common = plain | dict(word.split("=") for word in SECRET[1:])
        options: dict[str, Any] = {"cwd": tmp_path, "env": common}
        meetings = open_.enter_context(started(*server, **options))
        both = open_.enter_context(started(*typed(BY_NAME, f"127.0.0.1:{port}"), **options))
        own |= {"PET_MASTER_PORT": str(free_port())}  # of torchrun: 29500 may be taken here
        third = open_.enter_context(started(*command, **{**options, "env": common | own}))
        for process in (both, third):
            out, errors = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, out + errors
        meetings.terminate()
        out, errors = meetings.communicate(timeout=SECONDS)
        assert out.count("\n") == 1 and not errors, out + errors  # its address: no line for each meeting
    assert history(tmp_path, "a")[0].members == ("a", "b", "c")


@pytest.mark.exhaustive
def test_the_faults_file_trains_and_its_report_lists_replicas(tmp_path: Path) -> None:
    folder(tmp_path, 60)
    (file,) = (each.text for each in blocks(TEXT) if each.language == "yaml")
    (tmp_path / "run.yaml").write_text(file)
    with place(tmp_path) as variables:
        options: dict[str, Any] = {"cwd": tmp_path, "env": variables, "capture_output": True, "text": True}
        done = subprocess.run([*typed(FILE), "training.steps=12"], timeout=SECONDS, check=False, **options)
        assert done.returncode == 0, done.stdout + done.stderr
        said = subprocess.run(typed(REPORT), timeout=SECONDS, check=True, **options).stdout
    assert "replicas 0, 1" in said and "goodput: steps that count" in said
    rows = (tmp_path / "runs" / "faults" / "replica-1" / "metrics.jsonl").read_text().splitlines()
    assert max(json.loads(row)["step"] for row in rows) == 12
    page = (tmp_path / "runs" / "faults" / "report.html").read_text()
    assert "<h2>Replicas</h2>" in page and "time lost by cause" in page
    for path in ("history/0.jsonl", "replica-0/model/config.json", "checkpoints/replica-1/latest"):
        assert (tmp_path / "runs" / "faults" / path).exists()
