"""grid/launcher/launch.py: ranks start and end together, and the last line names the failure."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from triax.grid.launcher.launch import STOP, cores, launch, put_aside
from triax.grid.launcher.worker import lost_peer
from triax.grid.topology import Topology
from triax.testing.pool import slowdown

from support.processes import TRIAX, is_alive, last_line, started
from support.sweeps import some

GRID = """
import os, signal, sys, time
import torch
from triax.grid import Grid
grid = Grid(pipe=2)
x = torch.ones(1)

def forever():
    while True:
        grid.world.all_reduce(x)
        x.fill_(1.0)
"""


@pytest.fixture
def run(ranks: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a script on two ranks: its exit code, and what the launcher printed to stdout and stderr.

    `ranks` is asked for so that the pool's fork server, which has torch, is the one that starts these too. (So
    rank 0 prints where the server does: what it has to say, it writes to `said.txt`.)
    """

    def go(body: str, *args: object, **options: Any) -> tuple[int, str, str]:
        script = tmp_path / "script.py"
        script.write_text(GRID + body)
        options = {"topology": Topology(pipe=2), "logs": tmp_path / "logs", **options}
        start = time.monotonic()
        code = launch(script, *args, ranks=2, **options)
        assert time.monotonic() - start < 30 * slowdown()
        return code, *capfd.readouterr()

    return go


def test_ranks_find_each_other_and_their_arguments(run: Any, tmp_path: Path) -> None:
    code, out, err = run(
        "grid.world.all_reduce(x)\n"
        "if grid.rank == 0: sys.stdout = open(sys.argv[1], 'w')\n"
        "print('rank', grid.rank, 'sum', int(x), sys.argv[2:], torch.get_num_threads(), 'LOCAL_RANK' in os.environ)",
        tmp_path / "said.txt",
        "--lr",
        0.1,
        threads=1,
    )
    assert (code, out, err) == (0, "", "")
    assert (tmp_path / "said.txt").read_text() == "rank 0 sum 2 ['--lr', '0.1'] 1 True\n"
    assert (tmp_path / "logs" / "rank-1.log").read_text() == "rank 1 sum 2 ['--lr', '0.1'] 1 True\n"


def test_a_launch_restores_environment_and_signal_handlers(run: Any) -> None:
    before, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    assert run("")[0] == 0
    assert dict(os.environ) == before
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_killed_rank_is_named_last(run: Any) -> None:
    code, _, err = run("if grid.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\nforever()")
    assert code == 128 + signal.SIGKILL
    assert last_line(err).startswith("rank 1 (pipe 1, data 0, tensor 0) died: SIGKILL")
    assert "Traceback" not in err


def test_a_killed_first_rank_is_named_last(run: Any) -> None:
    """Rank 0 may hold the store, but its end must not look like a failure of all ranks."""
    code, _, err = run("if grid.rank == 0: os.kill(os.getpid(), signal.SIGSEGV)\nforever()")
    assert code == 128 + signal.SIGSEGV
    assert last_line(err).startswith("rank 0 (pipe 0, data 0, tensor 0) died: SIGSEGV")


def test_a_rank_that_exits_without_an_exception_is_named(run: Any) -> None:
    code, _, err = run("if grid.rank == 1: os._exit(3)\nforever()", topology=None)
    assert code == 3
    assert last_line(err).startswith("rank 1 (pipe 1, data 0, tensor 0) died: exit status 3, without an exception")


def test_a_rank_that_leaves_by_os_exit_is_named(run: Any) -> None:
    """A rank that ends by ``os._exit(0)`` looks like one that is done; the rank that lost it is not to blame."""
    code, _, err = run("if grid.rank == 1: os._exit(0)\nforever()")
    assert code == 1
    assert last_line(err).startswith(
        "rank 1 (pipe 1, data 0, tensor 0) left with exit status 0, without an exception, before its script ended, and "
        "rank 0 (pipe 0, data 0, tensor 0) lost it"
    )


def test_ranks_do_not_wait_for_a_rank_that_left_at_its_end(run: Any) -> None:
    """Each rank waits at its end until all are done, but not for one that left by ``os._exit(0)``."""
    assert run("grid.world.all_reduce(x)\nif grid.rank == 1: os._exit(0)")[0] == 0


# A failing rank waits for 1.5 s, so that a rank that was killed is noticed first: here none is.
HASTY = "import triax.grid.launcher.worker as worker; worker.LINGER = 0.2\n"

WAITS = "if grid.rank == 0: grid.pipe.all_reduce(x)\n"


def test_a_rank_that_ends_in_order_but_too_early_is_named(run: Any) -> None:
    """A rank with fewer steps than the others ends in order, while they wait for it."""
    code, _, err = run(WAITS)
    assert code == 1
    assert last_line(err).startswith(
        "rank 1 (pipe 1, data 0, tensor 0) ended without an error, while rank 0 (pipe 0, data 0, tensor 0) waited for "
        "it: let all ranks take the same number of steps"
    )


@pytest.mark.exhaustive
def test_time_limit_that_ended_a_slow_rank_is_named(run: Any) -> None:
    code, _, err = run(f"grid = Grid(pipe=2, timeout=2)\n{WAITS}time.sleep(60)")
    assert code == 1
    assert last_line(err).startswith(
        "rank 0 (pipe 0, data 0, tensor 0) waited until its time limit expired, while rank 1 (pipe 1, data 0, "
        "tensor 0) was still at work: if that rank is only slow, give triax.Grid(timeout=...) more seconds"
    )


def test_the_last_line_is_the_exception_of_the_failed_rank(run: Any) -> None:
    code, _, err = run(
        f"{HASTY}def inner(): raise ValueError('the second\\nhas two lines')\nif grid.rank == 1: inner()\nforever()"
    )
    assert code == 1
    assert last_line(err) == "rank 1 (pipe 1, data 0, tensor 0) failed: ValueError: the second"
    assert err.count("Traceback") == 1 and "in inner" in err
    assert "launch.py" not in err and "runpy" not in err


def test_an_error_that_names_its_rank_is_printed_unchanged(run: Any) -> None:
    message = "rank 1 (pipe 1, data 0, tensor 0), 1B0: shapes differ"
    code, _, err = run(f"{HASTY}if grid.rank == 1: raise RuntimeError({message!r})\nforever()")
    assert code == 1
    assert last_line(err) == f"{message} (RuntimeError)"


def test_a_lost_connection_is_not_named_as_the_cause(run: Any, tmp_path: Path) -> None:
    """The launcher shows the rank that failed first, although it closed its sockets and ended later."""
    code, _, err = run(
        "if grid.rank == 1:\n"
        "    torch.distributed.destroy_process_group()\n"
        "    grid.world.close()\n"
        "    grid.pipe.close()\n"
        "    grid.mesh = None\n"
        "    time.sleep(0.7)\n"
        "    raise KeyError('the cause')\n"
        "forever()"
    )
    assert code == 1
    assert last_line(err) == "rank 1 (pipe 1, data 0, tensor 0) failed: KeyError: 'the cause'"
    assert err.count("Traceback") == 1


def test_logs_of_an_earlier_run_are_moved_into_a_folder(tmp_path: Path) -> None:
    """The next run, perhaps only a restart, must not delete the log that says why the last one failed."""
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "rank-0.log").write_text("the cause")
    (logs / "rank-1.log").write_text("")
    put_aside(logs)
    assert [path.read_text() for path in logs.rglob("rank-*.log")] == ["the cause"] and not [*logs.glob("rank-*.log")]


def test_user_error_is_one_line_and_code_2(run: Any, tmp_path: Path) -> None:
    code, _, err = run(
        f"{HASTY}from triax.grid.launcher.launch import user_error\n"
        "if grid.rank == 0: sys.stderr = open(sys.argv[1], 'w')\n"
        "user_error('3 is not 4; give 4')",
        tmp_path / "said.txt",
    )
    assert (code, err) == (2, "")
    assert (tmp_path / "said.txt").read_text() == "script.py: error: 3 is not 4; give 4\n"
    assert (tmp_path / "logs" / "rank-1.log").read_text() == ""


def test_a_failed_rank_gives_its_exit_code_and_ends_its_children(run: Any, tmp_path: Path) -> None:
    start = (
        "import subprocess\nchild = subprocess.Popen(['sleep', '600'])\nopen(sys.argv[1], 'w').write(str(child.pid))\n"
    )
    for ending, expected in (("sys.exit(3)", 3), ("sys.exit(-1)", 255), ("os._exit(7)", 7)):
        code, _, err = run(f"{HASTY}if grid.rank == 1:\n  exec({start!r})\n  {ending}\nforever()", tmp_path / "child")
        assert code == expected, err
        end_of([int((tmp_path / "child").read_text())])
    assert run("sys.exit(256)")[0] == 0  # as Python ends
    code, _, err = run(f"{HASTY}if grid.rank == 1: sys.exit('no more paper')\nforever()")
    assert code == 1
    assert last_line(err) == "rank 1 (pipe 1, data 0, tensor 0) failed: no more paper"


def end_of(pids: list[int], limit: float = 10) -> None:
    """Wait for the end of processes."""
    deadline = time.monotonic() + limit * slowdown()
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)


def test_missing_deepspeed_names_the_way_to_run_the_script(run: Any, tmp_path: Path) -> None:
    _, _, err = run(f"{HASTY}raise ModuleNotFoundError(\"No module named 'deepspeed'\")")
    hint = f"triax run --module triax.compat.deepspeed {tmp_path / 'script.py'}, or change its import to: "
    assert last_line(err).endswith(
        f"'deepspeed'. To run the script as it is, write {hint}import triax.compat.deepspeed as deepspeed"
    )


@pytest.mark.parametrize("number", [signal.SIGUSR1, pytest.param(signal.SIGTERM, marks=pytest.mark.exhaustive)])
def test_ranks_save_after_a_signal_to_every_process(number: signal.Signals, tmp_path: Path) -> None:
    """Slurm sends signals to all processes of a job: the launcher waits for its ranks, and the fork server stays."""
    script = tmp_path / "program.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "from triax.grid.launcher.launch import launch\n"
        "def work():\n"
        "    got = []\n"
        f"    signal.signal({int(number)}, lambda *_: got.append(1))\n"
        "    os.write(1, b'ready\\n')\n"
        "    while not got:\n"
        "        time.sleep(0.01)\n"
        "    time.sleep(0.5)\n"
        "    os.write(1, b'saved\\n')\n"
        "    sys.exit(143)\n"
        "if __name__ == '__main__':\n"
        "    sys.exit(launch(work, ranks=2))\n"
    )
    with started(sys.executable, script) as program:
        assert program.stdout is not None and program.stderr is not None
        assert [program.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        os.killpg(program.pid, number)
        assert program.wait(20 * slowdown()) == 128 + number
        assert [program.stdout.readline() for _ in range(2)] == ["saved\n"] * 2
        assert last_line(program.stderr.read()) == f"stopped by {number.name}; all 2 ranks have ended"


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive), signal.SIGTERM, signal.SIGKILL]
)
def test_a_signal_stops_all_ranks(number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C stops a program that launches itself while its ranks wait for one another.

    So do other signals; what the ranks have started ends too: programs, and the worker processes of data loaders.
    """
    script = tmp_path / "program.py"
    script.write_text(
        "import sys\n"
        "from triax.grid.launcher.launch import launch\n"
        "def work():\n"
        + "".join(f"    {line}\n" for line in GRID.strip().splitlines())
        + "    import multiprocessing, subprocess\n"
        "    assert multiprocessing.get_start_method() == sys.argv[1]\n"
        "    child = subprocess.Popen(['sleep', '600'])\n"
        "    worker = multiprocessing.get_context('forkserver').Process(target=time.sleep, args=(600,), daemon=True)\n"
        "    worker.start()\n"
        "    os.write(1, b'%d %d %d\\n' % (os.getpid(), child.pid, worker.pid))\n"
        "    forever()\n"
        "if __name__ == '__main__':\n"
        "    sys.exit(launch(work, ranks=2))\n"
    )
    with started(sys.executable, script, multiprocessing.get_start_method()) as program:
        assert program.stdout is not None and program.stderr is not None
        lines = [program.stdout.readline().split() for _ in range(2)]
        pids, theirs = [int(line[0]) for line in lines], [int(pid) for line in lines for pid in line[1:]]
        os.killpg(program.pid, number) if number == signal.SIGINT else program.send_signal(number)
        if number == signal.SIGKILL:  # the launcher can say nothing, and do nothing
            assert program.wait(20 * slowdown()) == -number
        else:
            assert program.wait(20 * slowdown()) == 128 + number
            assert last_line(program.stderr.read()) == f"stopped by {number.name}; all 2 ranks have ended"
        end_of(pids, 10 if number == signal.SIGKILL else 0)
        end_of(theirs)


@pytest.mark.parametrize("begun", some([1, 4], [1]))
def test_sigterm_while_ranks_start_ends_all_processes(begun: int, tmp_path: Path) -> None:
    """Ranks that the launcher does not know yet end too, and print no traceback of the fork server."""
    script = tmp_path / "program.py"
    script.write_text(
        "import multiprocessing, os, signal, sys, threading, time\n"
        "from triax.grid.launcher.launch import launch\n"
        "def stop():\n"
        f"    while len(multiprocessing.active_children()) < {begun}:\n"
        "        time.sleep(0.0001)\n"
        "    os.killpg(0, signal.SIGTERM)\n"
        "if __name__ == '__main__':\n"
        "    threading.Thread(target=stop, daemon=True).start()\n"
        "    sys.exit(launch(time.sleep, 600, ranks=4))\n"
    )
    with started(sys.executable, script) as program:
        assert program.stdout is not None and program.stderr is not None
        assert program.wait(20 * slowdown()) == 128 + signal.SIGTERM
        # Until the last process of the group has ended.
        assert (program.stdout.read(), program.stderr.read()) == ("", "stopped by SIGTERM; all 4 ranks have ended\n")


@pytest.mark.exhaustive
def test_the_second_ctrl_c_ends_ranks_that_save(tmp_path: Path) -> None:
    """The launcher waits for ranks that save after the first one."""
    script = tmp_path / "program.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "from triax.grid.launcher.launch import launch\n"
        "def work():\n"
        "    signal.signal(signal.SIGINT, lambda *_: os.write(1, b'saves\\n'))\n"
        "    os.write(1, b'%d\\n' % os.getpid())\n"
        "    end = time.monotonic() + 600\n"
        "    while time.monotonic() < end: time.sleep(1)\n"
        "if __name__ == '__main__':\n"
        "    sys.exit(launch(work, ranks=2))\n"
    )
    with started(sys.executable, script) as program:
        assert program.stdout is not None and program.stderr is not None
        pids = [int(program.stdout.readline()) for _ in range(2)]
        os.killpg(program.pid, signal.SIGINT)
        assert [program.stdout.readline() for _ in range(2)] == ["saves\n"] * 2
        time.sleep(STOP + 1)
        assert program.poll() is None
        os.killpg(program.pid, signal.SIGINT)
        assert program.wait(20 * slowdown()) == 128 + signal.SIGINT
        assert last_line(program.stderr.read()) == "stopped by SIGINT; all 2 ranks have ended"
        end_of(pids)


@pytest.mark.exhaustive
def test_temporary_folders_of_dead_launchers_are_removed(tmp_path: Path) -> None:
    """The next run removes the folders of a killed launcher, and not those of a living one."""
    temporary = tmp_path / "tmp"
    for folder in ("pymp-of-another-program", "triax-launch-without-lock"):
        (temporary / folder).mkdir(parents=True)
    others = set(temporary.iterdir())
    environment = {**os.environ, "TMPDIR": str(temporary)}
    (tmp_path / "quick.py").touch()
    (tmp_path / "stays.py").write_text("import time\nopen('ready', 'w').close()\ntime.sleep(100)\n")
    run: list[object] = [*TRIAX, "run", "--log-dir", "none"]

    def quick() -> None:
        done = subprocess.run(
            [*map(str, run), "quick.py"], cwd=tmp_path, env=environment, capture_output=True, timeout=60
        )
        assert done.returncode == 0, done.stderr

    with started(*run, "stays.py", cwd=tmp_path, env=environment) as launcher:
        deadline = time.monotonic() + 60
        while not (tmp_path / "ready").exists():
            assert time.monotonic() < deadline and launcher.poll() is None
            time.sleep(0.02)
        alive = set(temporary.iterdir()) - others
        assert {each.name.partition("-")[0] for each in alive} == {"triax", "pymp"}
        quick()
        assert set(temporary.iterdir()) == alive | others  # those of a living launcher stay
        launcher.kill()
        launcher.wait()
        quick()
        assert set(temporary.iterdir()) == others


def test_errors_of_lost_peers_are_recognized() -> None:
    for words in (
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:554] Connection closed by peer [127.0.0.1]:23156",
        "NCCL error: remote process exited",
        "Broken pipe",
    ):
        assert lost_peer(RuntimeError(words))
    wrapped = RuntimeError("rank 0, 0F1: failed")
    wrapped.__cause__ = ConnectionResetError("Connection reset by peer")
    assert lost_peer(wrapped)
    assert not lost_peer(ValueError("connection closed: a word of the user's"))
    assert not lost_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_cores_counts_the_cores_of_the_process() -> None:
    with_one_core = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
    with_one_core += "from triax.grid.launcher.launch import cores; print(cores())"
    done = subprocess.run([sys.executable, "-c", with_one_core], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n" and cores() == len(os.sched_getaffinity(0))
