"""The launcher of replicas: what it prints when a process that it has started dies, and what it leaves when killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from triax.base.errors import ConfigError
from triax.grid.launcher.replica_jobs import drain, run_replicas

from support.processes import TRIAX, is_alive, started


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


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until a condition holds, for at most a minute."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_killed_launcher_leaves_no_processes(tmp_path: Path) -> None:
    """Its replicas and coordinator end; ``triax replicas drain`` signals no other process with one of their numbers."""
    (tmp_path / "script.py").write_text("import os, time\nopen(f'{os.getpid()}.rank', 'w')\ntime.sleep(600)\n")
    logs = tmp_path / "runs" / "logs"
    with started(*TRIAX, "run", "--replicas", 2, "--nproc", 1, "script.py", cwd=tmp_path) as run:
        wait_for(lambda: len([*tmp_path.glob("*.rank")]) == 2 or run.poll() is not None)
        ranks = [int(each.stem) for each in tmp_path.glob("*.rank")]
        children = [*map(int, Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split())]
        assert len(ranks) == 2 and len(children) == 3
        with pytest.raises(ConfigError, match="a replica 1 runs already"):
            run_replicas(lambda _: [], ["1"], "", 0, logs, 1.0, print)
        run.kill()
        run.wait()
        wait_for(lambda: not any(map(is_alive, [*ranks, *children])))
    (logs / "replica-1.pid").write_text(str(os.getpid()))  # the number is another process's now
    for name in ("1", "2", "../1"):
        with pytest.raises(ConfigError, match=f"no replica {re.escape(name)} runs with its log in .* \\(none\\)"):
            drain(name, logs, 1.0)


def test_a_drain_file_of_an_earlier_run_is_ignored(tmp_path: Path) -> None:
    """Otherwise a replica that is killed would count as one that was asked to leave, and not start again."""
    (tmp_path / "replica-a.drain").touch()
    said: list[str] = []
    program = "import os\nos.kill(os.getpid(), 9)"
    code = run_replicas(lambda _: [sys.executable, "-S", "-c", program], ["a"], "", 1, tmp_path, 1.0, said.append)
    assert code == -signal.SIGKILL and said[0] == "replica a died with code -9: it is started again (1 of 1)"
    assert not [*tmp_path.iterdir()]
