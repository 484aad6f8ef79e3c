"""Pairs of passes: STP's formulas, pairs of any schedule, what verify accepts, and training with two lanes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import triax
from triax import Costs, Grid, PipelineModule, make_schedule
from triax.models.gpt import GPTConfig, GPTLoss, gpt_layers
from triax.pipe.program.pairs import pair_pass
from triax.pipe.program.schedule import Schedule

VOCABULARY, LENGTH, SAMPLES = 37, 8, 16
Cell = tuple[str, int, dict[str, Any], bool]  # schedule, ZeRO stage, recompute, sequence parallelism


def paired(name: str, pipe: int, microbatches: int) -> Schedule:
    """Return a schedule with pairs."""
    made = make_schedule(name, pipe, microbatches)
    found = made if made.pairs else pair_pass(made, Costs(AR=1.0))
    assert found.pairs
    return found


def train(sizes: dict[str, int], cells: list[Cell]) -> list[Any]:
    """Return loss, gradients, pairs and turns of each cell: a GPT with dropout and a tied head, in float64."""
    here, found = Grid(**sizes, timeout=60), []
    rows = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    shape = GPTConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=4,
        dropout=0.1,
        tie_word_embeddings=True,
    )
    for name, stage, recompute, sequence_parallel in cells:
        layers = gpt_layers(shape, sequence_parallel=sequence_parallel)
        loss_fn = GPTLoss(here, vocab_size=VOCABULARY)
        count = SAMPLES // here.data.size
        value = None if here.size == 1 else paired(name, here.pipe.size, count)
        engine = triax.Engine(
            PipelineModule(layers, grid=here, loss_fn=loss_fn, seed=7, dtype=torch.float64),
            optimizer=torch.optim.AdamW,
            batch=triax.Batch(size=SAMPLES, microbatch=1),
            schedule=triax.ScheduleOptions(name=name, value=value),
            zero=triax.Zero.of({"stage": stage}),
            recompute=recompute,
        )
        turns = []
        lanes = engine.executor._lanes
        passes = lanes._pass
        lanes._pass = lambda: turns.append(lanes.active) or passes()  # type: ignore[method-assign, func-returns-value]
        mine = rows[here.data.rank * count : (here.data.rank + 1) * count]
        for _ in range(2):
            loss = engine.train_batch(iter([(row[None, :-1], row[None, 1:]) for row in mine])).item()
        found.append((loss, engine.gather("gradients"), sum(turns)))
    return found


CELLS: list[Cell] = [
    ("stp", 0, {}, False),
    ("dualpipe-v", 1, {}, True),
    ("eager-1f1b", 2, {}, False),
    ("zb-v", 2, {"enabled": True}, False),
]


def test_training_with_pairs_equals_one_process(ranks: Any) -> None:
    loss, gradients, _ = train({}, [("1f1b", 0, {}, False)])[0]
    for size, sizes in ((2, {"tensor": 2}), (4, {"pipe": 2, "tensor": 2})):
        cells = CELLS if size == 4 else [("gpipe", 0, {}, False)]
        for rank in ranks(size, train, sizes, cells, timeout=120):
            for value, own, turns in rank:
                assert turns > 20
                assert value == pytest.approx(loss, rel=1e-10)
                torch.testing.assert_close(own, gradients, rtol=1e-10, atol=1e-12)
