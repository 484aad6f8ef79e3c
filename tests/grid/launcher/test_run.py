"""``triax run``, mpirun and srun: scripts on many processes, restarts, and environment variables."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from triax.base.errors import ConfigError
from triax.cli.main import app
from triax.compat.launcher_options import IDLE, REFUSED
from triax.grid.environment import Environment, read_environment
from triax.grid.launcher.launch import cores, launch
from triax.grid.launcher.log_tail import LogTail

from support.command_line import run_triax
from support.launched_scripts import ELSEWHERE, SCRIPT, written
from support.paths import DOCS
from support.processes import TRIAX, as_mpich, as_mpirun, as_srun, free_port, last_line, started
from support.readme_blocks import block_of

# Rank 1 is killed in the middle of work, so many times.
FALLS = """
for number in range(20):
    if grid.rank == 1 and attempt < int(sys.argv[1]) and number == 10:
        os.kill(os.getpid(), signal.SIGKILL)
    grid.world.all_reduce(x)
    x.fill_(1.0)
print(f"rank {grid.rank} is at the end", flush=True)
"""


def test_triax_run_of_a_module_logs_and_names_the_failure_last(tmp_path: Path) -> None:
    """End-to-end run of a module with its arguments and with torchrun's option names."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "__init__.py").touch()
    (tmp_path / "job" / "main.py").write_text(
        SCRIPT + "import atexit\n"
        "atexit.register(lambda: print('left in order', flush=True))\n"
        "print('threads', torch.get_num_threads(), os.environ['OMP_NUM_THREADS'], os.environ['MINE'])\n"
        "if sys.argv[1] == '--fail' and grid.rank == 1: raise ValueError('the cause')\n"
        "if sys.argv[1] == '--fail': grid.world.barrier()\n"
    )
    command = [*TRIAX, "run", "--nproc-per-node=2", "--log_dir", "logs", "--tee", "all", "--threads", "1"]
    command += ["--export", "MINE=a b", "-m", "job.main"]
    good = subprocess.run([*command, "--nproc", "7"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert good.returncode == 0, good.stderr
    said = [f"rank {rank} of 2, attempt 0, ['--nproc', '7']\nthreads 1 1 a b\nleft in order\n" for rank in range(2)]
    for rank in range(2):
        assert (tmp_path / "logs" / f"rank-{rank}.log").read_text() == said[rank]
        assert re.findall(rf"^\[rank {rank}\] (.*)$", good.stdout, re.M) == said[rank].splitlines()
    bad = subprocess.run([*command, "--fail"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert bad.returncode == 1
    assert last_line(bad.stderr) == "rank 1 (pipe 0, data 1, tensor 0) failed: ValueError: the cause"
    assert bad.stderr.count("Traceback") == 1 and "job/main.py" in bad.stderr
    assert "Traceback" in (tmp_path / "logs" / "rank-1.log").read_text()


@pytest.mark.exhaustive
def test_a_run_restarts_after_each_of_ten_kills(ranks: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Ranks restart ten times; under torchrun, restarted gloo workers read the old ones' addresses, and 5 of 6 fail."""
    times = 10
    code = launch(written(tmp_path, FALLS), times, ranks=3, logs=tmp_path / "logs", tee=(), restarts=times)
    said = capfd.readouterr().err.strip().splitlines()
    assert code == 0, said
    assert said == [
        "rank 1 (pipe 0, data 1, tensor 0) died: SIGKILL (killed from outside, or by the kernel if memory ran out); "
        f"restarting all ranks ({number} of {times})"
        for number in range(1, times + 1)
    ]
    for rank in range(3):
        log = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
        assert log.count(f"rank {rank} of 3, attempt {times}") == 1
        assert log.endswith(f"rank {rank} is at the end\n")


def test_a_run_ends_after_its_last_restart(ranks: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = launch(written(tmp_path, FALLS), 5, ranks=2, logs=tmp_path / "logs", tee=(), restarts=1)
    first, last = capfd.readouterr().err.strip().splitlines()
    assert code == 128 + signal.SIGKILL
    assert first.endswith("(1 of 1)") and last.endswith("; the other ranks were stopped")


def test_output_of_ranks_is_shown_while_they_print(tmp_path: Path) -> None:
    out = (tmp_path / "out").open("w+")

    def shown() -> str:
        out.seek(0)
        return out.read()

    with LogTail(tmp_path, {0}, started=tmp_path, to=out), (tmp_path / "rank-0.log").open("wb", buffering=0) as log:
        (tmp_path / "here-0").touch()
        log.write(b"half a line, caf" + "é".encode()[:1])
        deadline = time.monotonic() + 20
        while "half a line, caf" not in shown():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        log.write("é".encode()[1:] + b"\nand the end " + "€".encode()[:2])
    assert shown() == "half a line, café\nand the end \ufffd"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none.py"], "There is no file none.py"),
        (["--nproc", "0", "script.py"], "--nproc is '0', but it must be a number of at least 1"),
        (["--nproc", "many", "script.py"], "--nproc is 'many'"),
        (["--nnodes", "3:2", "script.py"], "--nnodes '3:2'"),
        (["--nnodes", "2", "script.py"], "--nnodes 2 needs --hostfile"),
        (["--nnodes", "2", "--node-rank", "2", "--master-addr", "a", "script.py"], "count from 0 to 1"),
        (["--nnodes", "1:2", "script.py"], "--rdzv-endpoint is missing"),
        (["--rdzv-endpoint", "a:1", "--rdzv-conf", "timeout", "script.py"], "has 'timeout', which has no value"),
        (["--tee", "first", "script.py"], "--tee 'first'"),
        (["--export", "NO_SUCH", "script.py"], "--export NO_SUCH: this process has no such variable"),
        (["--hostfile", "none", "script.py"], "The hostfile none cannot be read"),
        (["--hostfile", "hosts", "--include", "c", "script.py"], "there is no host 'c'"),
        (["--hostfile", "hosts", "--num_gpus", "3", "script.py"], "--num_gpus is 3, but b has 2 slots"),
        (["--hostfile", "hosts", "--num_nodes", "3", "script.py"], "--num_nodes is 3, but there are 2 hosts"),
        (["--hostfile", "hosts", "--nnodes", "1:2", "script.py"], "is a fixed list"),
        (["--hostfile", "hosts", "--rdzv-endpoint", "a:1", "script.py"], "is a fixed list"),
        (["--hostfile", "hosts", "--launcher", "rsh {host}", "script.py"], "--launcher 'rsh {host}'"),
        (["--hostfile", "local", "script.py"], "Give --master-addr"),
        (["--nnodes", "2", "--node-rank", "0", "--master-addr", "a..b", "script.py"], "--master-addr: 'a..b' is not"),
        (["--hostfile", "hosts", "--master-addr", "-a", "script.py"], "--master-addr: '-a' is not the name or address"),
        (["--rdzv-endpoint", "a b:1", "script.py"], "--rdzv-endpoint: 'a b' is not the name or address of a host"),
        (["--export", "A$(b)=1", "script.py"], "--export 'A$(b)=1': write letters, digits and _"),
    ],
)
def test_triax_run_refuses_wrong_arguments_before_it_starts(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script.py").touch()
    (tmp_path / "hosts").write_text("a slots=4\nb slots=2\n")
    (tmp_path / "local").write_text("localhost slots=1\nb slots=1\n")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["run", *words])
    assert isinstance(result.exception, ConfigError), result.output
    assert said in str(result.exception)


TOLD = """
import argparse, os, sys
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--steps", type=int)
args = parser.parse_args()
print("told", args.local_rank, args.steps, os.environ["RANK"], os.environ["WORLD_SIZE"], flush=True)
"""


def logged(folder: Path, *words: str, **more: str) -> list[str]:
    """Run ``triax run`` in a folder; return what its ranks print, in order."""
    done = subprocess.run(
        [*TRIAX, "run", *words], cwd=folder, capture_output=True, text=True, timeout=120, env={**os.environ, **more}
    )
    assert done.returncode == 0, done.stderr
    found = sorted((folder / "runs" / "logs").glob("rank-*.log"))
    return [line for path in found for line in path.read_text().splitlines()]


@pytest.mark.exhaustive
def test_triax_run_takes_horovodruns_command_line(tmp_path: Path) -> None:
    """``-np``, ``-H``, ``python`` before the script, and the local rank that scripts with this option get."""
    (tmp_path / "train.py").write_text(TOLD)
    words = ["-np", "2", "-H", "localhost:3", "--gloo", "--cycle-time-ms", "2", "python", "train.py", "--steps", "7"]
    assert logged(tmp_path, *words) == ["told 0 7 0 2", "told 1 7 1 2"]


@pytest.mark.exhaustive
def test_triax_run_takes_deepspeeds_command_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TOLD)
    (tmp_path / "hosts").write_text("one slots=2\ntwo slots=1\n")
    words = ["--num_gpus", "2", "--master_port", str(free_port()), "--no_local_rank", "--quiet", "train.py"]
    assert logged(tmp_path, *words) == ["told -1 None 0 2", "told -1 None 1 2"]
    words = ["--hostfile", "hosts", "--launcher", ELSEWHERE, "--master_addr", "127.0.0.1"]
    words += ["--master_port", str(free_port()), "train.py", "--steps", "1"]
    assert logged(tmp_path, *words) == ["told 0 1 0 3", "told 1 1 1 3", "told 0 1 2 3"]
    found = logged(tmp_path, "--no_python", "--num_gpus", "2", "sh", "-c", "echo rank $RANK of $WORLD_SIZE")
    assert found == ["rank 0 of 2", "rank 1 of 2"]


def test_options_of_other_launchers_are_noted_or_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runner = CliRunner()
    for name, instead in REFUSED.items():
        result = runner.invoke(app, ["run", name, "script.py"])
        assert isinstance(result.exception, ConfigError)
        assert str(result.exception) == f"triax run has no {name}: {instead}."
    for name, (values, why) in IDLE.items():
        result = runner.invoke(app, ["run", name, *["1"] * values, "nowhere.py"])
        assert "There is no file nowhere.py" in str(result.exception)
        assert caplog.messages[-1] == f"triax run: {name} does nothing: {why}"
    (tmp_path / "script.py").touch()
    runner.invoke(app, ["run", "--master_port", "7", "--nproc", "no", str(tmp_path / "script.py")])
    assert caplog.messages[-1].startswith("triax run: --master-port does nothing: on one host, ")
    for words, said in (
        (["--launcher", "openmpi", "--hostfile", "hosts"], "start the script with mpirun"),
        (["--launcher", "docker", "--ssh-port", "1", "--hostfile", "hosts"], "Write them in the command"),
        (["--launcher", "docker", "-p1", "-Hhosts"], "Write them in the command"),
        (["--rdzv-backend=c10d", "--rdzv_id", "j"], "--rdzv-endpoint is missing"),
        (["-hostfile", "hosts", "--rdzv-id=j"], "Leave out --nnodes MIN:MAX and --rdzv-"),
        (["-np", "9", "-H", "a:2,b:2"], "-np is 9, but the hosts have 4 slots"),
        (["-H", "a:2,a:2"], "a is listed twice"),
        (["-H", "a,b"], "The hostfile a,b cannot be read"),
        (["--no_ssh", "--node_rank", "5", "-H", "a:2,b:2"], "hosts count from 0 to 1"),
    ):
        (tmp_path / "hosts").write_text("a slots=2\n")
        (tmp_path / "script.py").touch()
        given = [re.sub("hosts$", str(tmp_path / "hosts"), word) for word in words]
        result = runner.invoke(app, ["run", *given, str(tmp_path / "script.py")])
        assert isinstance(result.exception, ConfigError), result.output
        assert said in str(result.exception)
    result = runner.invoke(app, ["run", "python", "-O", "script.py"])
    assert "options of Python have no effect here" in str(result.exception)


def test_triax_env_lists_versions_and_backends() -> None:
    result = CliRunner().invoke(app, ["env"])
    assert result.exit_code == 0
    for line in (rf"torch +│ {re.escape(torch.__version__)}", rf"{cores()} cores", "gloo", "tensorboard", "mpirun"):
        assert re.search(line, result.output), result.output


def test_two_hosts_start_again_together_and_name_the_dead_rank(tmp_path: Path) -> None:
    """A job of two launchers from a hostfile survives the first killed rank and ends at the second."""
    (tmp_path / "hosts").write_text("one slots=1\ntwo slots=2\n")
    command = [*TRIAX, "run", "--hostfile", "hosts", "--launcher", ELSEWHERE, "--master-addr", "127.0.0.1"]
    command += ["--master-port", str(free_port()), "--log-dir", "logs", "--max-restarts", "1"]
    written(tmp_path, FALLS)
    run = subprocess.run([*command, "script.py", "2"], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert run.returncode == 128 + signal.SIGKILL, run.stderr
    again = [line for line in run.stderr.splitlines() if "restarting all ranks (1 of 1)" in line]
    assert {line.partition(":")[0] for line in again} == {"one", "two"}
    assert last_line(run.stderr).startswith("rank 1 (pipe 0, data 1, tensor 0) died: SIGKILL")
    assert run.stdout.splitlines() == [f"rank 0 of 3, attempt {number}, ['2']" for number in (0, 1)] or (
        "attempt 1" in run.stdout and run.stdout.count("rank 0 of 3") == 2
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("variables", [as_mpirun, as_mpich, as_srun], ids=["mpirun", "mpich", "srun"])
def test_a_script_joins_under_other_launchers(variables: Callable[[int, int], dict[str, str]], tmp_path: Path) -> None:
    """Two processes as the launcher starts them, with its variables and no others."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nfrom triax.grid import Grid\n"
        "grid, x = Grid(pipe=2, timeout=60), torch.ones(1)\ngrid.world.all_reduce(x)\nprint(grid, int(x))\n"
    )
    others = re.compile("RANK|WORLD|LOCAL|MASTER|SLURM|OMPI|PMI")
    clean = {name: value for name, value in os.environ.items() if not others.match(name)}
    clean |= {"OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port())}
    with contextlib.ExitStack() as stack:
        environments = [{**clean, **variables(rank, 2)} for rank in range(2)]
        both = [stack.enter_context(started(sys.executable, script, env=each)) for each in environments]
        said = [process.communicate(timeout=90) for process in both]
    for rank, (out, err) in enumerate(said):
        assert out == f"Grid(pipe=2, data=1, tensor=1; rank {rank} (pipe {rank}, data 0, tensor 0), cpu) 2\n", err


def test_variables_of_mpich_srun_and_mpirun_are_read() -> None:
    many = as_mpich(5, 8) | {"MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "1"}
    with pytest.raises(ValueError, match=r"add -genv MASTER_ADDR <host of rank 0> to mpirun"):
        read_environment(many)
    found = read_environment(many | {"MASTER_ADDR": "worker-1"})
    assert found == Environment(5, 8, 1, "worker-1", 29500, 0, "mpirun")
    here = read_environment(as_srun(1, 2))
    assert here == Environment(1, 2, 1, "localhost", 24711, 0, "srun")  # and not MPICH's, whose PMI it has
    # Two jobs of one host meet at two ports.
    ports = {read_environment(as_mpirun(0, 2) | {"PMIX_NAMESPACE": name}).master_port for name in "abc"}  # type: ignore[union-attr]
    assert len(ports) == 3 and all(20000 <= port < 30000 for port in ports)


LAUNCH_DOCS = DOCS / "launch.md"
TESTS = str(DOCS.parent / "tests")


def as_launchers(folder: Path) -> None:
    """mpirun and srun, as far as a program sees them: processes with their variables."""
    for name, variables in (("mpirun", as_mpirun), ("srun", as_srun)):
        (folder / name).write_text(
            f"#!{sys.executable}\nimport os, subprocess, sys\n"
            f"sys.path.insert(0, {TESTS!r})\n"
            f"from support.processes import {variables.__name__} as variables\n"
            "size = int(sys.argv[2])\n"
            "ranks = [subprocess.Popen(sys.argv[3:], env={**os.environ, **variables(r, size)}) for r in range(size)]\n"
            "sys.exit(max(rank.wait() for rank in ranks))\n"
        )
        (folder / name).chmod(0o755)


@pytest.mark.exhaustive
@pytest.mark.parametrize("block", re.findall(r"```sh\n(.*?)```", LAUNCH_DOCS.read_text(), re.DOTALL))
def test_the_commands_of_the_launch_page_run(block: str, tmp_path: Path) -> None:
    """The commands of the docs run, with this host in place of several hosts."""
    for name in ("train.py", "hosts"):
        (tmp_path / name).write_text(block_of("launch.md", f"# {name}\n"))
    as_launchers(tmp_path)
    block = block.replace("\\\n", " ")
    block = block.replace("--hostfile", f"--launcher '{ELSEWHERE}' --master-addr 127.0.0.1 --hostfile")
    block = block.replace("master-addr worker-1", "master-addr 127.0.0.1")
    folder = str(Path(sys.executable).parent)
    path = os.pathsep.join([str(tmp_path), folder, os.environ["PATH"]])
    options: dict[str, Any] = {"cwd": tmp_path, "env": {**os.environ, "PATH": path}}
    for command in [block] if "&\n" in block else block.strip().splitlines():
        with started("sh", "-ec", f"{command.strip()}\nwait", **options) as process:
            out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        says = "nothing would have failed" if "--dry-run" in command else r"step 2: \d+\.\d{4}"
        assert re.search(says, out), (command, out, err)


@pytest.mark.parametrize(
    ("words", "own"),
    [
        ("schedule 1f1b --stages 4", "--pipe"),
        ("grid --tensor_model_parallel_size=2", "--tensor"),
        ("run --ngpus 2", "--nproc"),
    ],
)
def test_another_librarys_option_is_answered_by_the_one_of_triax(words: str, own: str) -> None:
    code, said = run_triax(*words.split())
    assert code == 2 and said.endswith(f"; did you mean {own}?")
