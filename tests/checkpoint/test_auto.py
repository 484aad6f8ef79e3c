"""Asynchronous and automatic checkpoints: runs that are killed, get SIGTERM and resume; and plain modules."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import triax
from triax.checkpoint.auto import AutoSaver
from triax.checkpoint.format.folder import tags
from triax.testing.pool import RankFailure

from support.checkpoint_jobs import Cell, Job, losses, make, tensors
from support.failing_disk import disturbed
from support.module_training import MICRO, microbatch, net
from support.module_training import config as module_config
from support.module_training import groups as module_groups
from support.training import small_config

STEPS = 6  # under fp16 the first five overflow

# ------------------------------------------------------------------------------------------ asynchronous saves


def save_asynchronously(folder: str, cell: Cell, job: Job) -> bool:
    engine = make(cell, job, folder, checkpoint={"async": True})
    same = True
    for step in range(4):
        engine.train_batch()
        assert engine.save_checkpoint(Path(folder) / "behind", f"{step}")
        engine.config = engine.config.changed(checkpoint=engine.config.checkpoint.changed(**{"async": False}))
        assert engine.save_checkpoint(Path(folder) / "before", f"{step}")
        engine.config = engine.config.changed(checkpoint=engine.config.checkpoint.changed(**{"async": True}))
    held = sum(room.numel() * room.element_size() for room in engine.checkpointer.writer.copies.values())
    written = (Path(folder) / "behind" / "3" / f"rank-{engine.grid.rank:05}.safetensors").stat().st_size
    return same and engine.wait_for_checkpoint() is None and held <= written


@pytest.mark.parametrize("cell", [Cell((1, 2, 1), stage=2), Cell((2, 1, 1), "zb-v", 2, 3)])
def test_asynchronous_saves_hold_the_state_at_the_call(ranks: Any, tmp_path: Path, cell: Cell) -> None:
    """Each asynchronous save has the state at its call while training continues; a rank holds one copy."""
    assert all(ranks(2, save_asynchronously, str(tmp_path), cell, Job(), timeout=90))
    for step in range(4):
        one, other = tensors(tmp_path / "behind" / f"{step}"), tensors(tmp_path / "before" / f"{step}")
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def fail_asynchronous_save(folder: str) -> tuple[bool, str | None, float]:
    engine = make(Cell((1, 2, 1), stage=1), Job(), checkpoint={"async": True})
    engine.train_batch()
    blocked = Path(folder) / "file"
    blocked.touch()
    done = engine.save_checkpoint(blocked / "inside")
    loss = engine.train_batch().item()
    return done, engine.wait_for_checkpoint(), loss


def test_a_failed_asynchronous_save_is_reported_on_every_rank(ranks: Any, tmp_path: Path) -> None:
    for done, problem, loss in ranks(2, fail_asynchronous_save, str(tmp_path), timeout=60):
        assert done and loss > 0 and problem is not None and "Not a directory" in problem


def write_on_rank_0_alone(folder: str) -> tuple[str, str | None, float]:
    engine = make(Cell((1, 2, 1), stage=1), Job(), checkpoint={"async": True})
    engine.train_batch()
    engine.save_checkpoint(folder, "good")
    engine.wait_for_checkpoint()
    if engine.grid.rank:
        engine.checkpointer.writer.start = lambda *arguments: None  # this rank never writes
    engine.save_checkpoint(folder, "bad")
    said, start = "", time.monotonic()
    try:
        engine.train_batch(iter(()) if engine.grid.rank else None)  # data end here alone, which the run can survive
    except RuntimeError as error:
        said = str(error)
    try:
        with engine.all_or_none("train_batch"):
            raise ValueError("the run is over")
    except RuntimeError as error:
        said += str(error)
    return said, engine.wait_for_checkpoint(), time.monotonic() - start


def test_asynchronous_writes_stop_when_the_run_fails(ranks: Any, tmp_path: Path) -> None:
    """A writer waits for slow ranks, and not for ranks of a run that failed; earlier checkpoints stay."""
    said, problem, _ = ranks(2, write_on_rank_0_alone, str(tmp_path), timeout=40)[0]
    assert "the run is over" in said and problem is not None and "waited for ranks 1, which" in problem
    assert tags(tmp_path) == ["good"] and (tmp_path / "latest").read_text() == "good"


# ----------------------------------------------------------------------------------------- automatic checkpoints


def settings(folder: str, behind: bool) -> dict[str, Any]:
    return {"dir": folder, "every": 2, "keep": 2, "resume": "auto", "async": behind}


def train_with_one_kill(
    cell: Cell, folder: str, steps: int, kill: tuple[int, float] | None, victim: int, behind: bool
) -> list[float]:
    """Train to the end; ``kill`` = (steps, seconds): the rank ``victim`` dies that long after that many steps.

    The monitor writes each loss before the step is saved.
    """
    curve = {"enabled": True, "output_path": str(Path(folder).parent), "job_name": "curve"}
    engine = make(cell, Job(), checkpoint=settings(folder, behind), json_monitor=curve)
    newest = tags(Path(folder))
    expected = int(newest[-1].removeprefix("global_step")) if newest else 0
    assert engine.global_steps == expected, (engine.global_steps, newest)
    losses: list[float] = []
    while engine.global_steps < steps:
        if kill is not None and len(losses) == kill[0] and engine.grid.rank == victim:
            threading.Timer(kill[1], os.kill, (os.getpid(), signal.SIGKILL)).start()
        losses.append(engine.train_batch().item())
    if kill is not None:  # all is done, and it dies all the same
        if len(losses) <= kill[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(10)
    engine.wait_for_checkpoint()
    return losses


def count_survived_kills(ranks: Any, folder: Path, cells: list[Cell], kills: int, steps: int, seed: int) -> int:
    """Kill a rank repeatedly; the run resumes on a grid of the list, and ends like a run without failures."""
    draw, died = random.Random(seed), 0
    for attempt in range(kills + 1):
        cell = cells[attempt % len(cells)]
        kill = None if attempt == kills else (draw.randrange(6), draw.uniform(0, 0.05))
        try:
            ranks(
                *(cell.ranks, train_with_one_kill, cell, str(folder / "saved"), steps, kill),
                draw.randrange(cell.ranks),
                attempt % 2 == 0,
                timeout=120,
            )
        except RankFailure as failure:
            if kill is None or "SIGKILL" not in str(failure):
                raise
            died += 1
    seen: dict[int, float] = {}
    for line in (folder / "curve" / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert row["step"] <= max(seen, default=0) + 1  # nothing is left out
        seen[row["step"]] = row["Train/Samples/train_loss"]
    assert [seen[step] for step in range(1, steps + 1)] == pytest.approx(losses(steps), rel=1e-10)
    assert tags(folder / "saved") == [f"global_step{steps - 2}", f"global_step{steps}"]
    return died


def test_a_run_resumes_after_one_of_its_ranks_is_killed(ranks: Any, tmp_path: Path) -> None:
    grids = [Cell((1, 2, 1), stage=1), Cell((2, 1, 1))]
    assert count_survived_kills(ranks, tmp_path, grids, kills=1, steps=10, seed=1) == 1


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(4))
def test_four_runs_resume_after_25_kills_each(ranks: Any, tmp_path: Path, seed: int) -> None:
    """25 times in a row, on four runs: a rank, a moment and a grid by chance; every second step begins a save."""
    grids = [Cell((1, 2, 1), stage=2), Cell((2, 2, 1), stage=1), Cell((1, 1, 2), stage=3), Cell((2, 1, 1), "zb-v", 2)]
    assert count_survived_kills(ranks, tmp_path, grids, kills=25, steps=200, seed=seed) == 25


def train_until_sigterm(folder: str, pids: str) -> tuple[int, int]:
    engine = make(Cell((1, 2, 1), stage=1), Job(), checkpoint={"dir": folder, "every": 1000})
    before = signal.getsignal(signal.SIGTERM)
    try:
        while engine.global_steps < 200:
            if engine.global_steps == 3 and engine.grid.rank == 1:  # this rank alone hears of it
                os.kill(os.getpid(), signal.SIGTERM)
            engine.train_batch()
    except SystemExit as end:
        return engine.global_steps, int(end.code or 0)
    finally:
        assert before is not signal.SIG_DFL
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return engine.global_steps, 0


def test_sigterm_saves_a_checkpoint_and_exits_with_143(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, train_until_sigterm, str(tmp_path), "", timeout=60) == [(4, 143)] * 2
    assert tags(tmp_path) == ["global_step4"] and (tmp_path / "latest").read_text() == "global_step4"


def test_a_background_save_that_fails_behind_sigterm_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The process ends nevertheless, with the code of the signal; the disk is full when the tensors are written."""
    engine = make(Cell(), Job(optimizer="SGD"), checkpoint={"dir": str(tmp_path), "every": 1000, "async": True})
    engine.train_batch()

    def no_room() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.kill(os.getpid(), signal.SIGTERM)
    try:
        with disturbed(8, no_room), pytest.raises(SystemExit) as end:
            engine.train_batch()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert end.value.code == 143 and tags(tmp_path) == []
    assert caplog.text.count("the checkpoint 'global_step2' was not written, because") == 1


def test_resuming_skips_damaged_checkpoints(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    first = make(Cell(), Job(optimizer="SGD"), checkpoint={"dir": str(tmp_path), "every": 1})
    first.client_state = {"epoch": 2}
    for _ in range(4):
        first.train_batch()
    (tmp_path / ".global_step9.part").mkdir()
    (tmp_path / "global_step4" / "index.json").write_bytes(b"half of")
    with (tmp_path / "global_step3" / "rank-00000.safetensors").open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"\xff\xfe\xfd")
    again = make(Cell(), Job(optimizer="SGD"), checkpoint={"dir": str(tmp_path), "resume": "auto"})
    assert again.global_steps == 2 and again.resumed == (str(tmp_path / "global_step2"), {"epoch": 2})
    for tag, why in (
        (".global_step9.part", "never finished"),
        ("global_step4", "damaged"),
        ("global_step3", "damaged"),
    ):
        assert any(tag in line and "is not used" in line and why in line for line in caplog.messages), tag
    shutil.rmtree(tmp_path / "global_step2")
    shutil.rmtree(tmp_path / "global_step1")
    fresh = make(Cell(), Job(optimizer="SGD"), checkpoint={"dir": str(tmp_path), "resume": "auto"})
    assert fresh.global_steps == 0 and fresh.resumed == (None, None) and "nothing is loaded" in caplog.text


# ---------------------------------------------------------------------------------------------------- any module


def module_steps(engine: Any, first: int, last: int, replicas: int) -> None:
    """Global batches of two microbatches, of however many replicas."""
    for step in range(first, last):
        for index in range(engine.gradient_accumulation_steps()):
            rows = [microbatch(step, number, 0) for number in range(2)]  # all of them
            x, y = (torch.cat(parts) for parts in zip(*rows, strict=True))
            share = len(x) // engine.gradient_accumulation_steps() // replicas
            at = (index * replicas + engine.grid.data.rank) * share
            loss = (engine(x[at : at + share], times=0.9) - y[at : at + share]).square().mean()
            engine.backward(loss)
            engine.step()


def module_run(stage: int, kind: str, source: str, target: str, first: int, last: int, more: Any) -> dict[str, Tensor]:
    grid = triax.Grid(timeout=60)
    model = net(seed=grid.rank + 3 * (source != ""))
    if source:
        model.get_buffer("shift").zero_()  # a buffer, which the checkpoint has
    sizes = {"train_batch_size": 2 * MICRO, "train_micro_batch_size_per_gpu": 2}
    settings = module_config(kind, 1, stage, **more) | sizes
    del settings["gradient_accumulation_steps"]
    engine = triax.initialize(model=model, model_parameters=module_groups(model), config=settings, grid=grid)[0]
    if source:
        engine.load_checkpoint(source)
        assert engine.global_steps == first
    module_steps(engine, first, last, grid.size)
    if target:
        assert engine.save_checkpoint(target)
    found = {**engine.module_state_dict(), **engine.gather()}
    return found if grid.rank == 0 else {}


@pytest.mark.parametrize(
    ("kind", "a", "b", "more"),
    [
        ("AdamW", (1, 0), (2, 3), {}),
        pytest.param("AdamW", (4, 3), (1, 2), {}, marks=pytest.mark.exhaustive),
        ("SGD", (2, 2), (4, 1), {"zero": {"sub_group_size": 100}}),
    ],
)
def test_a_plain_module_resumes_on_other_replicas_and_stages(
    ranks: Any, tmp_path: Path, kind: str, a: Any, b: Any, more: Any
) -> None:
    """Frozen parameters, parameter groups, buffers, tied uses: on another number of replicas, in another stage."""
    saved = str(tmp_path)
    (replicas, stage), (other_replicas, other_stage) = a, b
    ranks(replicas, module_run, stage, kind, source="", target=saved, first=0, last=STEPS, more=more, timeout=60)
    half: dict[str, Any] = {"source": saved, "target": "", "first": STEPS, "last": 2 * STEPS, "more": more}
    found = ranks(other_replicas, module_run, other_stage, kind, **half, timeout=60)[0]
    whole: dict[str, Any] = {"source": "", "target": "", "first": 0, "last": 2 * STEPS, "more": {}}
    wanted = ranks(1, module_run, 0, kind, **whole, timeout=60)[0]
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-10, msg=name)


def train_sharded_module(folder: str, tensor: int, first: int, last: int) -> dict[str, Tensor]:
    grid = triax.Grid(tensor=tensor, timeout=60)
    torch.manual_seed(first)
    model = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6), nn.LayerNorm(6)).double()
    triax.parallelize(model, grid, {"0": "column", "2": "row"})
    config = module_config("AdamW", 1, 1) | {"train_micro_batch_size_per_gpu": MICRO // grid.data.size}
    engine = triax.initialize(model=model, config=config, grid=grid)[0]
    if first:
        engine.load_checkpoint(folder)
    for step in range(first, last):
        share = slice(grid.data.rank * MICRO // grid.data.size, (grid.data.rank + 1) * MICRO // grid.data.size)
        x, y = (part[share] for part in microbatch(step, 0, 0))
        engine.backward((engine(x) - y).square().mean())
        engine.step()
    if not first:
        assert engine.save_checkpoint(folder)
        engine.save_16bit_model(folder)
    weights = engine.gather()
    return weights if grid.rank == 0 else {}


def test_a_sharded_module_resumes_with_another_tensor_size(ranks: Any, tmp_path: Path) -> None:
    ranks(2, train_sharded_module, str(tmp_path), tensor=2, first=0, last=2, timeout=60)
    found = ranks(2, train_sharded_module, str(tmp_path), tensor=1, first=2, last=4, timeout=60)[0]
    wanted = ranks(1, train_sharded_module, str(tmp_path / "other"), tensor=1, first=0, last=4, timeout=60)[0]
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-10, msg=name)


def test_a_save_between_microbatches_stores_the_previous_step(tmp_path: Path) -> None:
    """A checkpoint between two microbatches has no part of the unfinished step, which runs again."""
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    settings = module_config("AdamW", 2, 1) | {"train_micro_batch_size_per_gpu": 2, "seed": 3}

    def started(seed: int) -> Any:
        return triax.initialize(model=net(seed), config=settings, training_data=TensorDataset(x, x.flip(1)))[0]

    def train(engine: Any, microbatches: int) -> list[float]:
        losses: list[float] = []
        batches: Iterator[Any] = iter(())
        while len(losses) < microbatches:
            batch = next(batches, None)
            if batch is None:
                batches = iter(engine.training_dataloader)
                continue
            loss = (engine(batch[0]) - batch[1]).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    whole = train(started(0), 12)
    one, other = started(0), started(1)
    train(one, 7)
    assert one.save_checkpoint(tmp_path) and one.global_steps == 3
    train(other, 3)  # it was in the middle of something too
    other.load_checkpoint(tmp_path)
    assert train(other, 6) == pytest.approx(whole[6:], rel=1e-12)


@pytest.mark.parametrize("every", [1, 2])
def test_steps_repeated_after_a_load_are_saved_again(tmp_path: Path, every: int) -> None:
    """A run that goes back to an earlier step replaces the checkpoint of step 2 by its own."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def started(**options: Any) -> Any:
        torch.manual_seed(3)
        model = nn.Linear(6, 1).double()
        return triax.Engine(model, optimizer=lambda p: torch.optim.AdamW(p, lr=0.1), batch=4, **options)

    engine = started(checkpoint=triax.Checkpoints(folder=f"{tmp_path}/run", every=every, resume=False))
    for factor in (1.0, 2.0, None, 5.0):
        if factor is None:
            engine.load_checkpoint(tmp_path, "best")
            continue
        engine.backward(engine(x * factor).square().mean())
        engine.step()
        if factor == 1.0:
            engine.save_checkpoint(tmp_path, "best")
    torch.manual_seed(3)
    plain = nn.Linear(6, 1).double()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for factor in (1.0, 5.0):
        optimizer.zero_grad()
        plain(x * factor).square().mean().backward()
        optimizer.step()
    resumed = started()
    resumed.load_checkpoint(tmp_path / "run")  # the latest one
    assert resumed.global_steps == 2
    torch.testing.assert_close(resumed.module.state_dict(), plain.state_dict(), rtol=0, atol=1e-10)


def resumes_bitwise(cell: Cell, job: Job, folder: str) -> bool:
    """A run that resumes on the grid that saved it continues bitwise like a run without an interruption."""
    one = make(cell, job)
    for _ in range(STEPS):
        one.train_batch()
    assert one.save_checkpoint(folder)
    scale = (one.loss_scale(), one.skipped_steps)
    random_before = torch.rand(3), random.random()
    expected = [one.train_batch().item() for _ in range(3)]
    other = make(cell, job, seed=9)
    other.load_checkpoint(folder)
    assert (other.loss_scale(), other.skipped_steps) == scale
    again = torch.rand(3), random.random()
    assert torch.equal(random_before[0], again[0]) and random_before[1] == again[1]
    found = [other.train_batch().item() for _ in range(3)]
    a, b = one.gather(), other.gather()
    return found == expected and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("cell", "job"),
    [
        (Cell((1, 2, 1), stage=2), Job(half="bf16")),
        (Cell((2, 1, 1), "zb-v", 2, 1), Job(half="fp16")),
        (Cell(), Job(optimizer="Adafactor")),
    ],
)
def test_a_resume_on_the_same_grid_continues_bitwise(ranks: Any, tmp_path: Path, cell: Cell, job: Job) -> None:
    assert all(ranks(cell.ranks, resumes_bitwise, cell, job, str(tmp_path), timeout=60))
    kinds = {name.rpartition("/")[0] for name in tensors(tmp_path / f"global_step{STEPS}")}
    state = {"AdamW": {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}, "Adafactor": {"row_var", "col_var", "variance"}}
    assert kinds == {"weights", *(f"optimizer/{key}" for key in state[job.optimizer])}


def exit_code_after_sigterm(case: str) -> int:
    """Exit code of a child that receives SIGTERM when it will not save a checkpoint."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        hear(case)
    finally:
        os._exit(3)


def hear(case: str) -> None:
    saver = AutoSaver(Namespace(device="cpu"), None, 1, None, True, 0, None, None)  # type: ignore[arg-type]
    if case == "fork":
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(code != -signal.SIGTERM or saver.signalled)
    if case == "gone":
        del saver
    else:
        os.kill(os.getpid(), signal.SIGTERM)
        assert saver.signalled
    os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_ends_a_process_that_will_not_save(ranks: Any) -> None:
    """The process is a forked child, or its engine is gone, or it receives SIGTERM for the second time."""
    ends = {"fork": 0, "gone": -signal.SIGTERM, "twice": -signal.SIGTERM}
    assert {case: ranks(1, exit_code_after_sigterm, case)[0] for case in ends} == ends


def users_numbers() -> list[float]:
    """Numbers of every generator that a user's program may draw from."""
    drawn = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.standard_normal()]  # noqa: NPY002
    return [*map(float, drawn), float(torch.rand(()))]


def test_generators_of_a_users_program_resume_in_the_middle(tmp_path: Path) -> None:
    """Both draw normal numbers in pairs: the second of a pair, which is kept, is the next one after a checkpoint."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    engine = triax.initialize(model=nn.Linear(2, 2), config=small_config(micro=2))[0]
    users_numbers()
    of_numpy: Any = np.random.get_state()  # noqa: NPY002
    assert random.getstate()[2] is not None and of_numpy[3]  # a second number is kept
    engine.save_checkpoint(tmp_path)
    wanted = [users_numbers() for _ in range(3)]
    users_numbers()
    engine.load_checkpoint(tmp_path)
    assert [users_numbers() for _ in range(3)] == wanted
