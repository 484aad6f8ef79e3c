"""Law 1: every grid, schedule, ZeRO stage and tie gives the numbers of one process, to 1e-10 in float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from reference import Step, train_gpt
from torch import Tensor

import triax
from triax.grid import Grid
from triax.models.gpt import GPTConfig, GPTLoss, gpt
from triax.pipe.module import PipelineModule
from triax.pipe.schedules import RECIPES

# 8 entries, so that a pipe axis of 8 has one a stage; 8 heads for a tensor axis of 8; 37 tokens divide by no axis.
LAYERS, HEADS, VOCABULARY, LENGTH = 4, 8, 37, 6
SAMPLES, STEPS, LR, CLIP = 16, 2, 1e-2, 0.5

GRIDS = [
    (pipe, data, tensor)
    for pipe, data, tensor in itertools.product((1, 2, 4, 8), repeat=3)
    if pipe * data * tensor in (1, 2, 4, 8)
]
SCHEDULES, STAGES, TIED = ("gpipe", "1f1b"), (0, 1), (True, False)
# The other schedules, each with the chunks it is run in, where the pipe axis and the 8 layers of the list allow.
OTHERS = [
    (name, chunks)
    for name, recipe in RECIPES.items()
    for chunks in (1, 2, 4)
    if recipe.accepts(chunks) and name not in (*SCHEDULES, "forward")
]


def model(grid: Grid, tied: bool, chunks: int = 1) -> PipelineModule:
    config = GPTConfig(
        vocab_size=VOCABULARY,
        sequence_length=LENGTH,
        width=16,
        layers=LAYERS,
        heads=HEADS,
        tie_embeddings=tied,
    )
    loss = GPTLoss(grid, vocab_size=VOCABULARY)
    return PipelineModule(gpt(config), grid=grid, loss_fn=loss, seed=7, dtype=torch.float64, chunks=chunks)


@cache
def batches() -> list[tuple[Tensor, Tensor]]:
    """Global batches whose samples have unlike numbers of labels that count, one of them none at all."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for _ in range(STEPS):
        text = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
        ids, labels = text[:, :-1], text[:, 1:].clone()
        labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
        labels[5] = -100
        made.append((ids, labels))
    return made


def microbatches(grid: Grid) -> Iterator[tuple[Tensor, Tensor]]:
    share = SAMPLES // grid.data.size
    for ids, labels in batches():
        for sample in range(grid.data.rank * share, (grid.data.rank + 1) * share):
            yield ids[sample : sample + 1], labels[sample : sample + 1]


def replicas_agree(engine: Any) -> bool:
    """Whether every replica, and every stage that holds a tie, has bitwise the same weights."""
    with engine._replicas.whole():
        for placed in engine.module.placed():
            axes = [engine.grid.data, *([engine.module.tie_axes[placed.tie]] if placed.tie is not None else [])]
            for axis in axes:
                low, high = placed.parameter.detach().clone(), placed.parameter.detach().clone()
                axis.all_reduce(low, op="min")
                axis.all_reduce(high, op="max")
                if not torch.equal(low, high):
                    return False
    return True


Cell = tuple[str, int, int, bool]  # schedule, chunks, ZeRO stage, tied


def train(grid: tuple[int, int, int], cells: list[Cell]) -> list[tuple[dict[str, Tensor], list[Step], bool]]:
    """On each rank, for each cell: initial weights, steps, and whether replicas agree."""
    here = triax.Grid(*grid, timeout=60)
    results = []
    for schedule, chunks, stage, tied in cells:
        config = {
            "train_batch_size": SAMPLES,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": CLIP,
            "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1}},
            # Small buckets, so that a stage has several.
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 2000},
            "pipeline": {"schedule": schedule},
            "seed": 11,
        }
        engine, *_ = triax.initialize(model=model(here, tied, chunks), config=config)
        data, initial = microbatches(here), engine.gather()
        steps, agree = [], True
        for _ in range(STEPS):
            loss = engine.train_batch(data).item()
            norm = engine.get_global_grad_norm()
            steps.append(Step(loss, norm or 0.0, engine.gather("gradients"), engine.gather()))
            agree = agree and replicas_agree(engine)
        results.append((initial, steps, agree))
    # Whole tensors are the same on every rank: one copy is enough for the parent.
    return (
        results
        if here.rank == 0
        else [({}, [Step(s.loss, s.norm or 0.0, {}, {}) for s in r[1]], r[2]) for r in results]
    )


@cache
def reference(tied: bool) -> tuple[dict[str, Tensor], list[Step]]:
    initial = {p.layout.name: p.parameter.detach().clone() for p in model(Grid(), tied).placed()}
    return initial, train_gpt(initial, batches(), LAYERS, HEADS, LR, CLIP)


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], what: str) -> None:
    assert found.keys() == wanted.keys(), what
    for name, tensor in wanted.items():
        message = f"{what} {name}: {{}}".format
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-12, msg=message)


def check(ranks: Any, grid: tuple[int, int, int], cells: list[Cell], cells_checked: list[Any]) -> None:
    results = ranks(grid[0] * grid[1] * grid[2], train, grid, cells, timeout=240)
    for i, cell in enumerate(cells):
        wanted_initial, wanted = reference(cell[-1])
        initial, steps, _ = results[0][i]
        for name, tensor in wanted_initial.items():
            assert torch.equal(initial[name], tensor), f"{cell}: {name} starts otherwise than on one process"
        for step, want in zip(steps, wanted, strict=True):
            assert step.loss == pytest.approx(want.loss, rel=1e-10, abs=0), cell
            assert step.norm == pytest.approx(want.norm, rel=1e-10, abs=0), cell
            assert_close(step.gradients, want.gradients, f"{cell} gradient")
            assert_close(step.weights, want.weights, f"{cell} weight")
        for result in results:
            assert [(s.loss, s.norm) for s in result[i][1]] == [(s.loss, s.norm) for s in steps], "ranks disagree"
            assert result[i][2], f"{cell}: replicas or ties have drifted apart"
        cells_checked.append((grid, *cell))


def name(grid: tuple[int, int, int]) -> str:
    return "x".join(map(str, grid))


@pytest.mark.parametrize("grid", GRIDS, ids=name)
def test_invariance(ranks: Any, grid: tuple[int, int, int], cells_checked: list[Any]) -> None:
    cells = [(schedule, 1, stage, tied) for schedule, stage, tied in itertools.product(SCHEDULES, STAGES, TIED)]
    check(ranks, grid, cells, cells_checked)


@pytest.mark.parametrize("grid", [(2, 1, 1), (2, 2, 1), (2, 2, 2)], ids=name)
def test_invariance_of_every_schedule(ranks: Any, grid: tuple[int, int, int], cells_checked: list[Any]) -> None:
    """A part of the next test: each schedule once a grid, with ZeRO and ties in turn."""
    fits = [(schedule, chunks) for schedule, chunks in OTHERS if grid[0] * chunks <= 8]
    turns = itertools.cycle([(1, True), (3, False), (2, True), (0, False), (3, True), (2, False), (0, True)])
    check(ranks, grid, [(*schedule, *turn) for schedule, turn in zip(fits, turns, strict=False)], cells_checked)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)  # 8 ranks that share 2 cores take 2 s a cell
@pytest.mark.parametrize("grid", GRIDS, ids=name)
def test_invariance_of_everything(ranks: Any, grid: tuple[int, int, int], cells_checked: list[Any]) -> None:
    names = [*((name, 1) for name in SCHEDULES), *OTHERS]
    for schedule in [(name, chunks) for name, chunks in names if grid[0] * chunks <= 8]:
        check(ranks, grid, [(*schedule, s, t) for s, t in itertools.product(range(4), TIED)], cells_checked)
