"""Processes that a launcher's variables promise and that are not there: never started, or ended before the others."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import triax
from triax.grid import Grid
from triax.grid.environment import read_environment
from triax.grid.launcher.launch import launch

from support.paths import ROOT
from support.processes import as_mpich, as_mpirun, as_srun, free_port, started

_LAUNCHERS = re.compile("RANK|WORLD|LOCAL|MASTER|SLURM|OMPI|PMI|TORCHELASTIC")


def without_launcher() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not _LAUNCHERS.match(name)}


def as_torchrun(rank: int, size: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        (as_srun(0, 4), ("SLURM_PROCID=0", "SLURM_STEP_NUM_TASKS=4")),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, ("SLURM_PROCID=0", "SLURM_NTASKS=4")),
        (as_torchrun(0, 4), ("RANK=0", "WORLD_SIZE=4")),
        (as_torchrun(3, 4), ("RANK=3", "WORLD_SIZE=4")),
        (as_mpirun(0, 4), ("OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE=4")),
        (as_mpich(0, 4), ("PMI_RANK=0", "PMI_SIZE=4")),
    ],
)
def test_a_grid_of_processes_never_started_names_the_variables(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], names: tuple[str, str]
) -> None:
    """Such as plain python in an allocation of 4 tasks, where no other process joins."""
    for name in set(os.environ) - set(without_launcher()):
        monkeypatch.delenv(name)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # which a grid sets
        monkeypatch.setenv(name, "lo")
    for name, value in {**variables, "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError) as caught:
        Grid(timeout=1.0)
    text, (rank, size) = str(caught.value), names
    number = rank.partition("=")[2]
    assert f"{rank} and {size} say that this is process {number} of 4, which meet at " in text
    assert "srun python train.py, torchrun --nproc-per-node 4 train.py, or triax run --nproc 4 train.py" in text
    assert f"type unset {rank.partition('=')[0]} {size.partition('=')[0]} to run one process" in text


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"WORLD_SIZE": "4"}, r"WORLD_SIZE=4 is set, but RANK is not, so that this process would run alone: .*unset"),
        ({"RANK": "2"}, "RANK=2 is set, but WORLD_SIZE is not"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK=4 and WORLD_SIZE=4 are set, but ranks go from 0"),
        ({"RANK": "0", "WORLD_SIZE": "four"}, "WORLD_SIZE='four' is no whole number"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": ""}, "MASTER_PORT='' is no whole number"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_RANK=1 is set, but OMPI_COMM_WORLD_SIZE is not"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE=4 is set, but OMPI_COMM_WORLD_RANK is not"),
        (
            as_mpirun(0, 4) | {"OMPI_COMM_WORLD_LOCAL_SIZE": "two"},
            "OMPI_COMM_WORLD_LOCAL_SIZE='two' is no whole number",
        ),
        (as_srun(0, 4) | {"SLURM_JOB_ID": "abc"}, "SLURM_JOB_ID='abc' is no whole number"),
        (as_srun(0, 4) | {"SLURM_RESTART_COUNT": "q"}, "SLURM_RESTART_COUNT='q' is no whole number"),
        ({"RANK": "0", "WORLD_SIZE": "1" + 21 * "0"}, "WORLD_SIZE=10+ is set, but it must be from 0 to 2147483647"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "99999"}, "MASTER_PORT=99999 is set, but .* 0 to 65535"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "-1"}, "LOCAL_RANK=-1 is set, but it must be from 0"),
        # Of launchers that are not supported: 4 processes trained alone, each the whole batch, in silence.
        ({"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "4"}, r"sh -c 'RANK=\$FLUX_TASK_RANK WORLD_SIZE=\$FLUX_JOB_SIZE "),
        ({"PMI_RANK": "0", "PMI_SIZE": "4"}, r"PMI_RANK=0 and PMI_SIZE=4 are set, .* LOCAL_RANK=\$PMI_LOCAL_RANK"),
        ({"MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "4"}, "each process would run alone: let it start"),
    ],
)
def test_contradicting_launcher_variables_are_refused(variables: dict[str, str], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        read_environment(variables)


def test_launcher_variables_of_one_process_mean_no_launcher() -> None:
    assert read_environment({"WORLD_SIZE": "1"}) is None
    assert read_environment({"RANK": "0"}) is None
    assert read_environment({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1"}) is None


def unlike_steps(early: int) -> str:
    """One rank takes 2 steps and ends its program; the others go on, and stop with an error."""
    grid = Grid(timeout=60.0)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = triax.initialize(model=nn.Linear(2, 2), config=config, grid=grid)
    try:
        for _ in range(2 if grid.rank == early else 5):
            engine.backward(engine(torch.ones(1, 2)).sum())
            engine.step()
    except RuntimeError as error:
        return str(error)
    grid.end()
    return ""


@pytest.mark.parametrize("early", [0, 2])
def test_a_rank_that_ended_before_the_other_ranks_is_named(ranks: Any, early: int) -> None:
    """The other ranks name it, in place of gloo's "Connection closed by peer"."""
    for rank, text in enumerate(ranks(3, unlike_steps, early)):
        if rank == early:
            assert text == ""
            continue
        assert f"because rank {early} (pipe 0, data {early}, tensor 0) has ended its program, after 2 x forward" in text
        assert "2 x step; rank" in text and "still waits for it, after 3 x forward" in text
        assert text.endswith("let every rank take the same number of steps")


SCRIPT = """
import sys
import torch
import triax
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
engine, *_ = triax.initialize(model=torch.nn.Linear(2, 2), config=config)
for _ in range(2 if engine.grid.rank == int(sys.argv[1]) else 5):
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
"""
PROGRAM = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(ROOT / "tests")!r}]
from test_absent import unlike_steps
text = unlike_steps(int(sys.argv[1]))
if text:
    raise SystemExit(text)
"""


@pytest.mark.parametrize(("early", "end"), [(0, ""), (1, "sys.exit()\n")])
def test_a_rank_of_the_launcher_that_ended_early_is_named(
    ranks: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], early: int, end: str
) -> None:
    (tmp_path / "program.py").write_text(SCRIPT + end)
    assert launch(tmp_path / "program.py", early, ranks=2, logs=tmp_path) == 1
    line = capfd.readouterr().err.strip().splitlines()[-1]
    assert f"because rank {early} (pipe 0, data {early}, tensor 0) has ended its program, after 2 x forward" in line


@pytest.mark.exhaustive
@pytest.mark.parametrize("early", [0, 1])
def test_a_rank_that_ended_early_is_named_without_a_launcher_store(tmp_path: Path, early: int) -> None:
    """Also if the rank that ended served the store."""
    (tmp_path / "program.py").write_text(PROGRAM.replace("grid.end()", ""))
    shared = without_launcher() | {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        words = (sys.executable, tmp_path / "program.py", early)
        both = [stack.enter_context(started(*words, env={**shared, **as_torchrun(rank, 2)})) for rank in range(2)]
        said = [process.communicate(timeout=120) for process in both]
    assert both[early].returncode == 0, said[early]
    assert both[1 - early].returncode == 1
    assert (
        f"rank {early} (pipe 0, data {early}, tensor 0) has ended its program, after 2 x forward" in said[1 - early][1]
    )
