"""Two hosts whose connection breaks, and hosts that come and go."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.launched_scripts import ELSEWHERE, written
from support.network_namespaces import Namespaces
from support.processes import TRIAX, free_port, last_line, started

# A script that runs until the test ends it.
GOES_ON = """
for number in range(int(sys.argv[1])):
    grid.world.all_reduce(x)
    x.fill_(1.0)
    if grid.rank == 0 and number % 20 == 0:
        print(f"step {number} of attempt {attempt}", flush=True)
    time.sleep(0.05)
print(f"rank {grid.rank} is at the end", flush=True)
"""


class Loopback:
    """Two simulated hosts on this machine, for use without network namespaces: a lost host is a stopped process."""

    hosts = ("127.0.0.2", "127.0.0.3")
    template = ELSEWHERE

    def down(self) -> None:
        self.signal(signal.SIGSTOP)

    def up(self) -> None:
        self.signal(signal.SIGCONT)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the second launcher and its ranks, found by their environment."""
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if b"\0HOST=127.0.0.3\0" in b"\0" + (folder / "environ").read_bytes() + b"\0":
                    os.kill(int(folder.name), number)

    def close(self) -> None:
        pass


def network() -> Namespaces | Loopback:
    """Namespaces where one may make them, else the loopback."""
    return Namespaces.made() or Loopback()


@pytest.fixture(params=["best", "loopback"])
def two_hosts(request: pytest.FixtureRequest) -> Iterator[Namespaces | Loopback]:
    hosts = network() if request.param == "best" else Loopback()
    print(f"two hosts: {type(hosts).__name__}")
    try:
        yield hosts
    finally:
        hosts.close()


def job_on(hosts: Namespaces | Loopback, folder: Path, *options: object, steps: int) -> list[object]:
    (folder / "hosts").write_text("".join(f"{host} slots=2\n" for host in hosts.hosts))
    written(folder, GOES_ON)
    words: list[object] = [*TRIAX, "run", "--hostfile", "hosts", "--launcher", hosts.template, "--host-timeout", 5]
    return [*words, "--master-port", free_port(), "--log-dir", "logs", *options, "script.py", steps]


def wait_for(path: Path, words: str, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not (path.exists() and words in path.read_text()):
        assert time.monotonic() < deadline, path.read_text() if path.exists() else f"no {path}"
        time.sleep(0.1)


@pytest.mark.exhaustive
def test_a_pulled_cable_ends_the_job_on_both_hosts(two_hosts: Namespaces | Loopback, tmp_path: Path) -> None:
    with started(*job_on(two_hosts, tmp_path, steps=100_000), cwd=tmp_path) as process:
        wait_for(tmp_path / "logs" / "rank-0.log", "step 20 ")
        two_hosts.down()
        pulled = time.monotonic()
        out, err = process.communicate(timeout=120)
        took = time.monotonic() - pulled
        assert process.returncode == 1, err
        a, b = two_hosts.hosts
        lost = f"({b} has sent no heartbeat|{a}, the first host, has not answered {b}) for \\d+ s: it, its launcher or"
        assert re.match(lost, last_line(err)), err
        assert took < 100  # no wait without end
        assert "is at the end" not in out


@pytest.mark.exhaustive
def test_with_restarts_a_job_goes_on_when_the_cable_is_back(two_hosts: Namespaces | Loopback, tmp_path: Path) -> None:
    with started(*job_on(two_hosts, tmp_path, "--max-restarts", 2, steps=150), cwd=tmp_path) as process:
        wait_for(tmp_path / "logs" / "rank-0.log", "step 20 ")
        two_hosts.down()
        time.sleep(12)  # longer than the limit of 5 s
        two_hosts.up()
        out, err = process.communicate(timeout=150)
        assert process.returncode == 0, err
        assert "step 140 of attempt 1" in out or "step 140 of attempt 2" in out
        assert "restarting all ranks (1 of 2)" in err
        for rank in range(4):
            assert f"rank {rank} is at the end" in (tmp_path / "logs" / f"rank-{rank}.log").read_text()


@pytest.mark.exhaustive
def test_a_second_host_joins_a_running_job(tmp_path: Path) -> None:
    """torchrun's MIN:MAX and its own rendezvous: the second host's ranks join a job that runs already."""
    written(tmp_path, GOES_ON)
    words = [*TRIAX, "run", "--nnodes", "1:2", "--nproc", "1", "--rdzv-endpoint", f"localhost:{free_port()}"]
    words += ["--rdzv-id", "job", "--max-restarts", "3", "--rdzv-conf", "last_call_timeout=1"]
    with started(*words, "--log-dir", "one", "script.py", 400, cwd=tmp_path) as one:
        wait_for(tmp_path / "one" / "rank-0.log", "rank 0 of 1, attempt 0")
        with started(*words, "--log-dir", "two", "script.py", 60, cwd=tmp_path) as two:
            deadline = time.monotonic() + 90
            while "of 2, attempt 1" not in "".join(path.read_text() for path in tmp_path.glob("*/rank-*.log")):
                assert time.monotonic() < deadline
                time.sleep(0.1)
            assert two.poll() is None and one.poll() is None
