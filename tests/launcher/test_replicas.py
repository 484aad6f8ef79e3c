"""The launcher of replicas: what it prints when a process that it has started dies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from triax.launcher.replicas import run_replicas


@pytest.mark.parametrize("restarts", [0, 2])
def test_a_coordinator_that_is_not_started_again_is_named(restarts: int, tmp_path: Path) -> None:
    said: list[str] = []
    ended = tmp_path / "ended"  # the replica runs until the last message
    program = f"import os, time\nwhile not os.path.exists({str(ended)!r}):\n    time.sleep(0.01)"

    def say(text: str) -> None:
        said.append(text)
        if "not started again" in text:
            ended.touch()

    def serve() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(3)"])

    code = run_replicas(lambda _: [sys.executable, "-S", "-c", program], ["a"], "", restarts, tmp_path, 9.0, say, serve)
    died = "the coordinator died with code 3: it is"
    assert said == [
        *(f"{died} started again ({number} of {restarts})" for number in range(1, restarts + 1)),
        f"{died} not started again (--max-restarts {restarts}); the replicas wait for it, then end",
        "replica a has ended with code 0",
    ]
    assert code == 0
