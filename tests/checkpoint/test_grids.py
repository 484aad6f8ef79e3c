"""Checkpoints between grids: saved on one, loaded on any other, bitwise, and training continues as if nothing had
happened."""

from __future__ import annotations

import itertools
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from triax.checkpoint.format.index import read_index
from triax.pipe.schedules.registry import RECIPES

from support.checkpoint_jobs import (
    Cell,
    Job,
    Trace,
    begin,
    make,
    tensors,
)

BEFORE, AFTER = 2, 2


def resume_train_and_save(cell: Cell, job: Job, steps: int, source: str, target: str, scratch: str) -> Trace:
    engine = make(cell, job, scratch, seed=8)  # other weights than those that were saved
    path, client = engine.load_checkpoint(source)
    assert Path(path) == Path(source) / "there"
    assert engine.save_checkpoint(target, "here")
    losses = [engine.train_batch().item() for _ in range(steps)]
    weights = engine.gather()
    return client["losses"] + losses, weights if engine.grid.rank == 0 else {}


@cache
def undisturbed(job: Job, steps: int) -> Trace:
    return begin(Cell(), job, steps, "", "")


def require_bitwise_resume(
    ranks: Any, folder: Path, a: Cell, b: Cell, job: Job, before: int = BEFORE, after: int = AFTER
) -> None:
    """Save on grid ``a``, load on grid ``b``: the checkpoint is bitwise the same, and training as without a break."""
    source, target = str(folder / "a"), str(folder / "b")
    ranks(a.ranks, begin, a, job, before, source, str(folder), timeout=120)
    losses, weights = ranks(b.ranks, resume_train_and_save, b, job, after, source, target, str(folder), timeout=120)[0]
    saved, again = tensors(folder / "a" / "there"), tensors(folder / "b" / "here")
    assert saved.keys() == again.keys() and len(saved) > 3 * 30
    for name, tensor in saved.items():
        assert torch.equal(tensor, again[name]) and tensor.dtype == again[name].dtype, f"{a} -> {b}: {name}"
    first, second = read_index(folder / "a" / "there").head, read_index(folder / "b" / "here").head
    assert first["numbers"] == second["numbers"] and first["run"] == second["run"]
    wanted_losses, wanted = undisturbed(job, before + after)
    torch.testing.assert_close(losses, wanted_losses, rtol=1e-10, atol=1e-10)
    for name, tensor in wanted.items():
        what = f"{a} -> {b}: {name}: {{}}".format
        torch.testing.assert_close(weights[name], tensor, rtol=1e-10, atol=1e-10, msg=what)


PAIRS = [
    (Cell(), Cell((1, 2, 1), stage=1)),
    (Cell((1, 2, 2), "1f1b", 1, 2), Cell((1, 1, 2), "gpipe", 1, 0, sequence_parallel=True)),
    (Cell((1, 1, 2), stage=3, bucket=300), Cell((2, 2, 1), "zb-v", 2, 3)),
    (Cell((2, 1, 1), "interleaved", 2, 0), Cell((1, 2, 1), stage=3, offload="nvme", sub_group=1000)),
    (Cell((1, 2, 1), stage=2, offload="cpu", sub_group=700), Cell((2, 1, 1), "zb-h1", 1, 1)),
    (Cell((2, 2, 2), "1f1b", 1, 2), Cell((1, 1, 2), "gpipe", 1, 0, sequence_parallel=True)),
    (Cell((2, 1, 1), "interleaved", 2, 0), Cell((1, 4, 1), stage=3, offload="nvme", sub_group=1000)),
    (Cell((1, 1, 4), stage=3, bucket=300), Cell((2, 2, 1), "zb-v", 2, 3)),
    (Cell((1, 2, 1), stage=2, offload="cpu", sub_group=700), Cell((2, 1, 2), "zb-h1", 1, 1)),
]


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=pytest.mark.exhaustive if n > 4 else ()) for n in range(len(PAIRS))]
)
def test_a_checkpoint_loads_bitwise_on_another_grid(ranks: Any, tmp_path: Path, number: int) -> None:
    job = Job(tied=number % 2 == 0, family="llama" if number in (2, 7) else "gpt")
    require_bitwise_resume(ranks, tmp_path, *PAIRS[number], job)


def test_adafactor_state_of_tied_weights_is_saved_once(ranks: Any, tmp_path: Path) -> None:
    """Adafactor's state of a weight that two stages hold is written once."""
    job, source, target = Job(optimizer="Adafactor"), str(tmp_path / "a"), str(tmp_path / "b")
    ranks(2, begin, Cell((2, 1, 1)), job, BEFORE, source, str(tmp_path))
    assert "optimizer/col_var/layers.0.weight" in read_index(tmp_path / "a" / "there").tensors
    wanted_losses, wanted = undisturbed(job, BEFORE + AFTER)
    for cell in (Cell(), Cell((2, 1, 1))):
        losses, weights = ranks(cell.ranks, resume_train_and_save, cell, job, AFTER, source, target, str(tmp_path))[0]
        torch.testing.assert_close(losses, wanted_losses, rtol=1e-10, atol=1e-10)
        for name, tensor in wanted.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-10, atol=1e-10, msg=name)


def cells() -> list[Cell]:
    """Every grid of 1, 2, 4 and 8 ranks, with schedules, chunks and stages of ZeRO."""
    found = []
    sizes = (1, 2, 4, 8)
    for grid in [(p, d, t) for p, d, t in itertools.product(sizes, sizes, sizes) if p * d * t in sizes]:
        for (name, recipe), chunks, stage in itertools.product(RECIPES.items(), (1, 2, 4), range(4)):
            fits = name != "forward" and recipe.accepts(chunks) and grid[0] * chunks <= 8
            cell = Cell(grid, name, chunks, stage)
            if fits and cell.microbatches >= recipe.least(grid[0]):
                found.append(cell)
    return found


def pairs(count: int) -> list[tuple[Cell, Cell, Job]]:
    draw, every = random.Random(20), cells()
    made = []
    for _ in range(count):
        two = []
        for _ in range(2):
            size = draw.choice((1, 2, 4, 8))
            cell = draw.choice([each for each in every if each.ranks == size])
            more = {
                "offload": draw.choice(("none", "none", "cpu", "nvme")),
                "sub_group": draw.choice((None, None, 500)),
                "sequence_parallel": draw.random() < 0.3,
                "bucket": draw.choice((300, 2000, 100_000)),
                "order": tuple(draw.sample(("pipe", "data", "tensor"), 3)),
            }
            two.append(Cell(**{**vars(cell), **more}))
        job = Job(draw.choice(("gpt", "llama")), draw.random() < 0.5, draw.choice(("AdamW", "SGD", "NAdam")))
        made.append((two[0], two[1], job))
    return made


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(20))
def test_200_random_pairs_of_grids_resume_with_equal_numbers(ranks: Any, tmp_path: Path, part: int) -> None:
    for number, (a, b, job) in list(enumerate(pairs(200)))[part::20]:
        (tmp_path / str(number)).mkdir()
        require_bitwise_resume(ranks, tmp_path / str(number), a, b, job, before=10, after=10)
