"""Law 1: every grid, schedule, ZeRO stage, model and way to train it gives the numbers of one process, to 1e-10 in
float64: tied or not, sequence parallel or not, with grouped queries, dropout, packed documents and recomputation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import triax
from triax.grid import Grid, Topology
from triax.grid.assemble import Shard, assemble_ranks
from triax.models.gpt import GPTConfig, GPTLoss, gpt_layers
from triax.models.llama import LlamaConfig, llama_layers
from triax.pipe.module import PipelineModule
from triax.pipe.schedules.registry import RECIPES

from support.gpt_batches import (
    CLIP,
    ENTRIES,
    HEADS,
    LAYERS,
    LENGTH,
    LR,
    SAMPLES,
    STEPS,
    VOCABULARY,
    assert_close,
    batches,
    microbatches,
)
from support.reference import Step, llama_logits, train_gpt
from support.reference import train as train_plainly

GRIDS = [
    (pipe, data, tensor)
    for pipe, data, tensor in itertools.product((1, 2, 4, 8), repeat=3)
    if pipe * data * tensor in (1, 2, 4, 8)
]
EXHAUSTIVE = pytest.mark.exhaustive
SCHEDULES, STAGES, TIED = ("gpipe", "1f1b"), (0, 1), (True, False)
# The other schedules, each with the chunks it is run in, where the pipe axis and the 8 layers of the list allow.
OTHERS = [
    (name, chunks)
    for name, recipe in RECIPES.items()
    for chunks in (1, 2, 4)
    # (tests/pipe/test_pairs.py has those with pairs, which need more microbatches.)
    if recipe.accepts(chunks) and recipe.pairs is None and name not in (*SCHEDULES, "forward")
]


@dataclass(frozen=True)
class Job:
    """Model and training options of a cell, without the grid and the schedule."""

    tied: bool = True
    family: str = "gpt"
    heads: int = HEADS
    kv_heads: int = 0  # of a llama
    dropout: float = 0.0
    packed: bool = False
    sequence_parallel: bool = False
    recompute: str = "none"

    @property
    def plain(self) -> Job:
        """Job without sequence parallelism and recomputation, for the reference run."""
        return replace(self, sequence_parallel=False, recompute="none")


# Heads that the tensor axis divides and not; as many kv heads as heads, fewer than ranks, and some that straddle ranks.
MODELS = [
    Job(),
    Job(heads=9, tied=False),
    Job(family="llama", kv_heads=8),
    Job(family="llama", kv_heads=2, tied=False),
    Job(family="llama", heads=12, kv_heads=6),
]
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"activation_checkpointing": {"granularity": "full"}},
    "selective": {"activation_checkpointing": {"granularity": "selective"}},
}


def llama_config(job: Job) -> LlamaConfig:
    """Qwen2's biases with few kv heads, Qwen3's norms with many; a hidden width that no axis divides."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        hidden_size=16,
        num_hidden_layers=ENTRIES - 3,
        num_attention_heads=job.heads,
        num_key_value_heads=job.kv_heads,
        head_dim=2,
        intermediate_size=21,
        tie_word_embeddings=job.tied,
        dropout=job.dropout,
        qkv_bias=job.kv_heads == 2,
        qk_norm=job.heads == 12,
    )


def model(grid: Grid, job: Job, chunks: int = 1) -> PipelineModule:
    loss = GPTLoss(grid, vocab_size=VOCABULARY)
    if job.family == "llama":
        layers = llama_layers(llama_config(job), sequence_parallel=job.sequence_parallel)
        return PipelineModule(layers, grid=grid, loss_fn=loss, seed=7, dtype=torch.float64, chunks=chunks)
    config = GPTConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        hidden_size=2 * job.heads,
        num_hidden_layers=LAYERS,
        num_attention_heads=job.heads,
        tie_word_embeddings=job.tied,
        dropout=job.dropout,
    )
    layers = gpt_layers(config, sequence_parallel=job.sequence_parallel)
    return PipelineModule(layers, grid=grid, loss_fn=loss, seed=7, dtype=torch.float64, chunks=chunks)


def replicas_agree(engine: Any) -> bool:
    """True if all replicas, and all stages that hold a tie, have bitwise equal weights."""
    with engine.whole_weights():
        placed = list(engine.module.local_parameters())
        held = [(engine.grid.data, [p.parameter.detach().flatten() for p in placed])]
        for tie in sorted({p.tie for p in placed if p.tie is not None}):  # the same order on every rank
            ties = [p.parameter.detach().flatten() for p in placed if p.tie == tie]
            held.append((engine.module.tie_axes[tie], ties))
        for axis, tensors in held:
            mine = torch.cat(tensors)
            mine = torch.cat([mine, -mine])  # the largest and the smallest of all in one message: there are many cells
            extremes = mine.clone()
            axis.all_reduce(extremes, op="max")
            if not torch.equal(extremes, mine):
                return False
    return True


Cell = tuple[str, int, int, Job]  # schedule, chunks, ZeRO stage, what is trained


@dataclass
class Found:
    """Values that a rank saw in one cell, with only its own parts of whole tensors."""

    initial: dict[str, Shard]
    steps: list[tuple[float, float, dict[str, Shard], dict[str, Shard]]]  # loss, norm, gradients, weights
    agree: bool  # replicas, and the stages that hold a tie


def train(grid: tuple[int, int, int], cells: list[Cell], microbatch: int = 1) -> list[Found]:
    """Train every cell, on each rank."""
    here = triax.Grid(*grid, timeout=60)
    results = []
    for schedule, chunks, stage, job in cells:
        config = {
            "train_batch_size": SAMPLES,
            "train_micro_batch_size_per_gpu": microbatch,
            "gradient_clipping": CLIP,
            "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1}},
            # Small buckets, so that a stage has several.
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 2000},
            "pipeline": {"schedule": schedule},
            "seed": 11,
            **RECOMPUTE[job.recompute],
        }
        engine, *_ = triax.initialize(model=model(here, job, chunks), config=config)
        data, found = microbatches(here, microbatch, job.packed), Found(held(engine, "weights"), [], True)
        for _ in range(STEPS):
            loss = engine.train_batch(data).item()
            norm = engine.get_global_grad_norm() or 0.0
            found.steps.append((loss, norm, held(engine, "gradients"), held(engine, "weights")))
            found.agree = found.agree and replicas_agree(engine)
        results.append(found)
    return results


def held(engine: Any, what: str) -> dict[str, Shard]:
    """Parts of this rank, from the first replica only, as the others are compared with it. The reader joins them:
    there are thousands of cells, and a gather among eight processes costs more than their two steps."""
    parts = engine.shards(what)
    return {k: (layout, part.clone()) for k, (layout, part) in parts.items()} if engine.grid.data.is_first else {}


def whole(grid: tuple[int, int, int], everyone: Sequence[Found]) -> tuple[dict[str, Tensor], list[Step]]:
    """Whole tensors, from what each rank found in one cell."""
    topology = Topology(**dict(zip(("pipe", "data", "tensor"), grid)))
    steps = []
    for i, (loss, norm, _, _) in enumerate(everyone[0].steps):
        gradients = assemble_ranks(topology, [found.steps[i][2] for found in everyone])
        steps.append(Step(loss, norm, gradients, assemble_ranks(topology, [found.steps[i][3] for found in everyone])))
    return assemble_ranks(topology, [found.initial for found in everyone]), steps


@cache
def reference(job: Job) -> tuple[dict[str, Tensor], list[Step]]:
    """Plain PyTorch, or, with dropout, whose masks are ours, this engine in one process."""
    initial = {p.layout.name: p.parameter.detach().clone() for p in model(Grid(), job).local_parameters()}
    if job.dropout:
        _, steps = whole((1, 1, 1), train((1, 1, 1), [("gpipe", 1, 0, job)]))
        assert abs(steps[0].loss - reference(replace(job, dropout=0.0))[1][0].loss) > 1e-6  # something was dropped
        return initial, steps
    data = batches(job.packed)
    if job.family == "llama":
        config = llama_config(job)
        return initial, train_plainly(initial, data, lambda w, ids, d: llama_logits(w, ids, config, d), LR, CLIP)
    return initial, train_gpt(initial, data, LAYERS, job.heads, LR, CLIP)


def require_equal_to_one_process(ranks: Any, grid: tuple[int, int, int], cells: list[Cell], least: int = 4) -> None:
    """Twice as many microbatches as stages, and at least ``least``, where a replica has as many samples."""
    pipe, data, _ = grid
    microbatch = max(1, SAMPLES // data // max(least, 2 * pipe))
    results = ranks(grid[0] * grid[1] * grid[2], train, grid, cells, microbatch, timeout=240)
    for cell, everyone in zip(cells, zip(*results)):
        wanted_initial, wanted = reference(cell[-1].plain)
        initial, steps = whole(grid, everyone)
        for name, tensor in wanted_initial.items():
            assert torch.equal(initial[name], tensor), f"{cell}: {name} starts otherwise than on one process"
        for step, want in zip(steps, wanted, strict=True):
            assert step.loss == pytest.approx(want.loss, rel=1e-10, abs=0), cell
            assert step.norm == pytest.approx(want.norm, rel=1e-10, abs=0), cell
            assert_close(step.gradients, want.gradients, f"{cell} gradient")
            assert_close(step.weights, want.weights, f"{cell} weight")
        for found in everyone:
            assert [s[:2] for s in found.steps] == [(s.loss, s.norm) for s in steps], "ranks disagree"
            assert found.agree, f"{cell}: replicas or ties have drifted apart"


def name(grid: tuple[int, int, int]) -> str:
    return "x".join(map(str, grid))


# Eight ranks on one axis, and two on each: the sweep has those of two axes too.
FEW_GRIDS = [grid for grid in GRIDS if math.prod(grid) < 8 or 8 in grid or 1 not in grid]


@pytest.mark.parametrize(
    "grid", [*FEW_GRIDS, *(pytest.param(grid, marks=EXHAUSTIVE) for grid in GRIDS if grid not in FEW_GRIDS)], ids=name
)
def test_some_schedules_and_stages_equal_one_process(ranks: Any, grid: tuple[int, int, int]) -> None:
    """A part of ``test_every_schedule_stage_and_grid_equals_one_process``."""
    cells = [(schedule, 1, stage, Job(tied)) for schedule, stage, tied in itertools.product(SCHEDULES, STAGES, TIED)]
    # 8 ranks take up to 3 s a cell on 2 cores, and 4 ranks 1.5 s: one cell a grid there, two on 2 ranks, four on one.
    size = math.prod(grid)
    number = [other for other in GRIDS if math.prod(other) == size].index(grid)
    every = {8: 8, 4: 8, 2: 4}.get(size, 2)
    require_equal_to_one_process(ranks, grid, cells[number % every :: every], least=2)


@pytest.mark.parametrize(
    "grid", [(2, 2, 1), *(pytest.param(grid, marks=EXHAUSTIVE) for grid in [(2, 1, 1), (2, 2, 2)])], ids=name
)
def test_every_schedule_equals_one_process(ranks: Any, grid: tuple[int, int, int]) -> None:
    """A part of the next test: each schedule once a grid, with ZeRO and ties in turn."""
    fits = [(schedule, chunks) for schedule, chunks in OTHERS if grid[0] * chunks <= 8]
    turns = itertools.cycle([(1, True), (3, False), (2, True), (0, False), (3, True), (2, False), (0, True)])
    cells = [(*schedule, stage, Job(tied)) for schedule, (stage, tied) in zip(fits, turns, strict=False)]
    require_equal_to_one_process(ranks, grid, cells)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)  # 8 ranks that share 2 cores take 1 s a cell, or more where the tensor axis has them all
@pytest.mark.parametrize("grid", GRIDS, ids=name)
def test_every_schedule_stage_and_grid_equals_one_process(ranks: Any, grid: tuple[int, int, int]) -> None:
    names = [*((name, 1) for name in SCHEDULES), *OTHERS]
    for schedule in [(name, chunks) for name, chunks in names if grid[0] * chunks <= 8]:
        require_equal_to_one_process(
            ranks, grid, [(*schedule, s, Job(t)) for s, t in itertools.product(range(4), TIED)]
        )


# ------------------------------------------------------------------------------- models, and ways to train them

WAYS = [("1f1b", 1), ("zb-v", 2), ("gpipe", 1), ("interleaved", 2), ("zb-h1", 1)]


def jobs() -> list[Job]:
    """Every model with sequence parallelism on and off, dropout, packed documents, and recomputation."""
    options = itertools.product(MODELS, (True, False), (0.1, 0.0), (True, False), RECOMPUTE)
    return [
        replace(job, sequence_parallel=sharded, dropout=dropout, packed=packed, recompute=recompute)
        for job, sharded, dropout, packed, recompute in options
    ]


def in_turn(grid: tuple[int, int, int], chosen: list[Job]) -> list[Cell]:
    """Each job once, schedules and ZeRO stages in turn."""
    ways = itertools.cycle((name, chunks) for name, chunks in WAYS if grid[0] * chunks <= ENTRIES)
    return [(*way, i % 4, job) for i, (way, job) in enumerate(zip(ways, chosen, strict=False))]


SOME = [(1, 1, 2), (2, 1, 2), (1, 1, 4), (2, 2, 2)]


@pytest.mark.parametrize(
    "grid", [SOME[1], *(pytest.param(grid, marks=EXHAUSTIVE) for grid in SOME if grid != SOME[1])], ids=name
)
def test_some_models_and_options_equal_one_process(ranks: Any, grid: tuple[int, int, int]) -> None:
    """A part of the next test: every model on every grid, with options that differ from one grid to the next."""
    require_equal_to_one_process(ranks, grid, in_turn(grid, jobs()[SOME.index(grid) :: 23]), least=2)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("which", range(len(MODELS)))
@pytest.mark.parametrize("grid", GRIDS, ids=name)
def test_all_models_and_options_equal_one_process(ranks: Any, grid: tuple[int, int, int], which: int) -> None:
    each = len(jobs()) // len(MODELS)
    require_equal_to_one_process(ranks, grid, in_turn(grid, jobs())[which * each : (which + 1) * each])
