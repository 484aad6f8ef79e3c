"""Checkpoints between grids: what is saved on one loads on any other, bitwise, and training goes on as if nothing had
happened."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import triax
from triax.engine.checkpoint_folder import verify
from triax.engine.checkpoint_index import read_index
from triax.engine.checkpoint_read import Reader
from triax.models.gpt import GPTConfig, GPTLoss, gpt
from triax.models.llama import LlamaConfig, llama
from triax.pipe.schedules import RECIPES

# 8 entries, as long as the longest pipe axis; 8 heads for the widest tensor axis; 37 tokens divide by no axis.
VOCABULARY, LENGTH, BATCH, SAMPLES = 37, 8, 8, 24  # an epoch of 3 steps
BEFORE, AFTER = 2, 2
SIZES = GPTConfig(VOCABULARY, LENGTH, 16, 4, 8, dropout=0.1)


@dataclass(frozen=True)
class Cell:
    """One way to train the one model."""

    grid: tuple[int, int, int] = (1, 1, 1)
    schedule: str = "1f1b"
    chunks: int = 1
    stage: int = 0
    offload: str = "none"
    sub_group: int | None = None
    sequence_parallel: bool = False
    bucket: int = 2000
    order: tuple[str, ...] = ("pipe", "data", "tensor")

    @property
    def ranks(self) -> int:
        pipe, data, tensor = self.grid
        return pipe * data * tensor


@dataclass(frozen=True)
class Job:
    """What is trained."""

    family: str = "gpt"
    tied: bool = True
    optimizer: str = "AdamW"
    half: str = ""


PARAMS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True},
    "SGD": {"lr": 1e-1, "momentum": 0.9},
    "NAdam": {"lr": 1e-2},
    "Adafactor": {"lr": 1e-2},
}


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
    return TensorDataset(text[:, :-1], text[:, 1:])


def make(cell: Cell, job: Job, folder: str = "", seed: int = 7, **more: Any) -> Any:
    grid = triax.Grid(*cell.grid, order=cell.order, timeout=60)
    if job.family == "gpt":
        layers = gpt(replace(SIZES, tie_embeddings=job.tied), sequence_parallel=cell.sequence_parallel)
    else:
        layers = llama(
            LlamaConfig(VOCABULARY, LENGTH, 16, 5, 8, kv_heads=2, head_dim=2, hidden=21, qkv_bias=True, dropout=0.1),
            sequence_parallel=cell.sequence_parallel,
        )
    dtype = torch.float32 if job.half else torch.float64
    model = triax.PipelineModule(
        layers, grid=grid, loss_fn=GPTLoss(grid, vocab_size=VOCABULARY), seed=seed, dtype=dtype, chunks=cell.chunks
    )
    place = {"device": cell.offload, **({"nvme_path": folder} if cell.offload == "nvme" else {})}
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.5,
        "optimizer": {"type": job.optimizer, "params": PARAMS[job.optimizer]},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 4, "total_num_steps": 25}},
        "zero_optimization": {
            "stage": cell.stage,
            "reduce_bucket_size": cell.bucket,
            "offload_optimizer": place,
            **({"offload_param": place} if cell.stage == 3 else {}),
            **({"sub_group_size": cell.sub_group} if cell.sub_group else {}),
        },
        "pipeline": {"schedule": cell.schedule},
        "seed": 11,
        **({job.half: {"enabled": True}} if job.half else {}),
        **more,
    }
    return triax.initialize(model=model, config=config, training_data=dataset())[0]


Trace = tuple[list[float], dict[str, Tensor]]  # the losses, and the weights at the end; of rank 0


def begin(cell: Cell, job: Job, steps: int, folder: str, scratch: str) -> Trace:
    engine = make(cell, job, scratch)
    losses = [engine.train_batch().item() for _ in range(steps)]
    if folder:
        assert engine.save_checkpoint(folder, "there", client_state={"losses": losses})
    weights = engine.gather()
    return losses, weights if engine.grid.rank == 0 else {}


def go_on(cell: Cell, job: Job, steps: int, source: str, target: str, scratch: str) -> Trace:
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


def tensors(folder: Path) -> dict[str, Tensor]:
    index = read_index(folder)
    assert not [*verify(folder, index)]
    reader = Reader(folder, index)
    return {name: reader.whole(name) for name in index.tensors if name.partition("/")[0] not in ("random", "client")}


def check(ranks: Any, folder: Path, a: Cell, b: Cell, job: Job, before: int = BEFORE, after: int = AFTER) -> None:
    source, target = str(folder / "a"), str(folder / "b")
    ranks(a.ranks, begin, a, job, before, source, str(folder), timeout=120)
    losses, weights = ranks(b.ranks, go_on, b, job, after, source, target, str(folder), timeout=120)[0]
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
    (Cell((2, 2, 2), "1f1b", 1, 2), Cell((1, 1, 2), "gpipe", 1, 0, sequence_parallel=True)),
    (Cell((1, 1, 4), stage=3, bucket=300), Cell((2, 2, 1), "zb-v", 2, 3)),
    (Cell((2, 1, 1), "interleaved", 2, 0), Cell((1, 4, 1), stage=3, offload="nvme", sub_group=1000)),
    (Cell((1, 2, 1), stage=2, offload="cpu", sub_group=700), Cell((2, 1, 2), "zb-h1", 1, 1)),
]


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_a_checkpoint_knows_no_grid(ranks: Any, tmp_path: Path, number: int) -> None:
    check(ranks, tmp_path, *PAIRS[number], Job(tied=number % 2 == 0, family="llama" if number == 2 else "gpt"))


def test_rows_and_columns_of_a_tie(ranks: Any, tmp_path: Path) -> None:
    """Adafactor's state of a weight that two stages hold is written once."""
    job, source, target = Job(optimizer="Adafactor"), str(tmp_path / "a"), str(tmp_path / "b")
    ranks(2, begin, Cell((2, 1, 1)), job, BEFORE, source, str(tmp_path))
    assert "optimizer/col_var/layers.0.weight" in read_index(tmp_path / "a" / "there").tensors
    wanted_losses, wanted = undisturbed(job, BEFORE + AFTER)
    for cell in (Cell(), Cell((2, 1, 1))):
        losses, weights = ranks(cell.ranks, go_on, cell, job, AFTER, source, target, str(tmp_path))[0]
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
            if fits and BATCH // grid[1] >= recipe.least(grid[0]):
                found.append(Cell(grid, name, chunks, stage))
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
def test_two_hundred_pairs(ranks: Any, tmp_path: Path, part: int) -> None:
    for number, (a, b, job) in list(enumerate(pairs(200)))[part::20]:
        (tmp_path / str(number)).mkdir()
        check(ranks, tmp_path / str(number), a, b, job, before=10, after=10)
