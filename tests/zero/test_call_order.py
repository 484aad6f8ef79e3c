"""Stage 3: replicas that run equal units train; replicas that run different units are refused."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, PipelineModule
from triax.grid.agreement import call_order
from triax.testing.pool import RankFailure
from triax.zero import gathered

from support.sharded_loops import sharded_sgd
from support.toys import error_text, replica_inputs
from support.training import SGD, mean_square, module_engine, pipeline_engine, train_plain

WIDTH = 6

# For each step: for each replica, the branches that it runs, in order.
Plan = Sequence[Sequence[Sequence[int]]]


class Branches(nn.Module):
    """A model whose caller says which of its branches run: a head of each task, a tower for images."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, n), nn.Tanh(), nn.Linear(n, WIDTH)) for n in sizes)

    def forward(self, x: Tensor, chosen: Sequence[int]) -> Tensor:
        x = self.enter(x)
        for index in chosen:
            x = x + self.branches[index](x)
        return x


def branches(sizes: Sequence[int]) -> Branches:
    torch.manual_seed(0)
    return Branches(sizes).double()


def plainly(sizes: Sequence[int], plan: Plan) -> dict[str, Tensor]:
    batches = [
        [(replica_inputs(step, i), mine, None) for i, mine in enumerate(chosen)] for step, chosen in enumerate(plan)
    ]
    return train_plain(branches(sizes), SGD, batches, mean_square)[-1].weights


def trained(sizes: Sequence[int], plan: Plan, how: str) -> dict[str, Tensor]:
    """Train by an engine, or in a plain loop; an evaluation of other branches runs before every second step."""
    grid, made = Grid(timeout=600), branches(sizes)
    if how == "plain loop":
        optimizer = sharded_sgd(made, grid)
    else:
        engine = module_engine(made, grid, 4, stage3_keep_gathered=how == "kept")
    for step, chosen in enumerate(plan):
        if step % 2:
            with torch.no_grad():
                made(replica_inputs(step, grid.data.rank), [0, 0, len(sizes) - 1])
        x, mine = replica_inputs(step, grid.data.rank), chosen[grid.data.rank]
        if how == "plain loop":
            optimizer.zero_grad()
            made(x, mine).square().mean().backward()
            optimizer.step()
        else:
            engine.backward(engine(x, mine).square().mean())
            engine.step()
    with gathered(made):
        return {name: parameter.detach().clone() for name, parameter in made.named_parameters()}


@pytest.mark.parametrize(("size", "how"), [(1, "engine"), (2, "engine"), (2, "kept"), (4, "plain loop")])
def test_the_order_of_units_may_change_in_each_step(ranks: Any, size: int, how: str) -> None:
    sizes = [8, 8, 1000, 3]  # parts of small units are sent as messages, of large ones by an all-to-all
    chosen = [[0, 1, 2, 3], [0, 1, 2, 3], [1], [2, 0], [], [3, 3, 1], [0, 1, 2, 3], [2, 2, 2]]
    plan = [[each] * size for each in chosen]
    wanted = plainly(sizes, plan)
    for found in ranks(size, trained, sizes, plan, how):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-13)


def refused(job: Any, *args: Any) -> str:
    return error_text(lambda: job(*args), RuntimeError)


@pytest.mark.parametrize(
    ("sizes", "last", "named"),
    [
        # A head of each task, of one size: a rank computed with the weights of another head.
        ([8, 8], [[0], [1]], ("gathers unit branches.0", "gathers unit branches.1")),
        # Of two sizes: all ranks waited for the grid's time limit.
        ([8, 1000], [[1], [0], [0], [0]], ("gathers unit branches.1", "gathers unit branches.0")),
        # A tower that one replica skips: it was prefetched, and differs in the backward pass.
        ([8, 8, 8], [[0, 1, 2], [0, 2]], ("gathers unit branches.1",)),
        # The last unit, on one replica alone.
        ([8, 8], [[0], [0, 1]], ("gathers unit branches.",)),
        ([8, 8], [[0, 0], [0]], ("gathers unit branches.0", "ends a backward pass")),
    ],
)
def test_replicas_that_run_different_units_are_refused_by_name(
    ranks: Any, sizes: list[int], last: list[list[int]], named: tuple[str, ...]
) -> None:
    everything = [list(range(len(sizes)))] * len(last)
    for plan, how in (([last], "engine"), ([everything, everything, last], "plain loop")):
        for message in ranks(len(last), refused, trained, sizes, plan, how):
            assert all(part in message for part in named), message
            assert "rank 0 (" in message and any(f"rank {rank} (" in message for rank in range(1, len(last)))
            assert "all replicas run the same units" in message


def alone(does: str, folder: str) -> None:
    """Run the module on the first rank alone, while the others go on."""
    grid, made = Grid(timeout=600), branches([8, 8])
    engine = module_engine(made, grid, 4)

    def step(number: int) -> None:
        engine.backward(engine(replica_inputs(number, grid.data.rank), [0, 1]).square().mean())
        engine.step()

    step(0)
    if grid.rank == 0:
        with torch.no_grad():
            for _ in range(4):
                made(replica_inputs(0, 0), [0, 1])
    if does == "saves":
        engine.save_checkpoint(folder)
    step(1)


@pytest.mark.parametrize("does", ["trains", "saves"])
def test_a_rank_that_runs_the_module_alone_is_named(ranks: Any, tmp_path: Path, does: str) -> None:
    for message in ranks(2, refused, alone, does, str(tmp_path)):
        assert "rank 0 (pipe 0, data 0, tensor 0) gathers" in message
        assert ("calls save_checkpoint" if does == "saves" else "(pipe 0, data 1, tensor 0) gathers") in message
        assert "within triax.zero.gathered(module), which every rank enters" in message


def evaluates_alone() -> None:
    grid = Grid(pipe=2, data=2, timeout=600)
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(4)]
    module = PipelineModule(layers, grid=grid, loss_fn=nn.MSELoss())
    engine = pipeline_engine(module.double(), triax.Batch(microbatch=4, microbatches=2), 3)
    data = iter(lambda: (replica_inputs(0, grid.data.rank), replica_inputs(1, grid.data.rank)), None)
    engine.train_batch(data)
    if grid.data.rank == 1:
        engine.eval_batch(data)
    engine.train_batch(data)


def test_a_replica_that_evaluates_a_pipeline_alone_is_named(ranks: Any) -> None:
    for message in ranks(4, refused, evaluates_alone):
        assert "data 0" in message and "data 1" in message
        assert "calls train_batch of 2 microbatches" in message and "calls eval_batch of 2 microbatches" in message


class Printed(io.StringIO):
    """What a rank prints. A file appears once there is something."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def write(self, text: str) -> int:
        written = super().write(text)
        self.file.touch()
        return written


def late(file: Path) -> str:
    """Run the module on the first rank, while the other is still elsewhere; return what it prints."""
    grid, made = Grid(timeout=600), branches([8, 8])
    engine = module_engine(made, grid, 4)
    call_order._LONG, usual = 0.5, call_order._LONG
    try:
        with contextlib.redirect_stderr(Printed(file)) as printed, torch.no_grad():
            for turn in range(2):  # the second time the call is the expected one, and asks nobody by itself
                deadline = time.monotonic() + 40
                while turn and grid.rank and not file.exists() and time.monotonic() < deadline:
                    time.sleep(0.02)
                engine.module(replica_inputs(0, grid.data.rank), [0, 1])
    finally:
        call_order._LONG = usual
    return printed.getvalue()


def test_a_rank_that_waits_long_names_the_other_rank(ranks: Any, tmp_path: Path) -> None:
    first, _ = ranks(2, late, tmp_path / "said")
    assert "rank 0 (pipe 0, data 0, tensor 0) gathers " in first and " s for rank 1 (pipe 0, data 1, tensor 0)" in first
    assert "which is between two calls of the engine, in test_call_order.py:" in first


def stopped() -> None:
    """Run the module on the first rank, while the system has stopped the other one, whose threads answer nothing."""
    grid, made = Grid(timeout=3), branches([8, 8])
    engine = module_engine(made, grid, 4)
    if grid.rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    engine.module(replica_inputs(0, grid.data.rank), [0, 1])


def test_a_stopped_rank_is_named_at_the_time_limit(ranks: Any) -> None:
    """The fuzz of faults found it: the other replica was dead, and the message named nobody."""
    with pytest.raises(RankFailure, match=r"waited for the time limit of 3 s for rank 1 \(pipe 0, data 1.*not answer"):
        ranks(2, stopped)
