"""GPT and Llama on the context axis: loss, gradients, norm and stepped weights are those of one process."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import triax
from triax.context import attention, shard
from triax.grid.comm.axis import Axis
from triax.models.gpt import GPTConfig, GPTLoss
from triax.models.huggingface.pipeline_layers import CausalLMLoss
from triax.models.llama import LlamaConfig
from triax.testing.pool import RankFailure

from support.decoder_runs import ROWS, VOCABULARY, Job, Place, assert_equal_to_one_process, batch

GPT = GPTConfig(VOCABULARY, 24, 16, 2, 4, dropout=0.1, tie_word_embeddings=True)
LLAMA = LlamaConfig(VOCABULARY, 24, 16, 2, 4, intermediate_size=24, num_key_value_heads=2, dropout=0.1)
WINDOW = replace(LLAMA, sliding_window=5)


CELLS = [
    (Job(LLAMA, packed=True), Place((1, 1, 2, 1), "gather", stage=2)),
    (Job(LLAMA, length=15), Place((1, 1, 2, 1), "ulysses", stage=3)),
    (Job(GPT, length=11), Place((1, 1, 2, 1), stage=3, recompute="full")),
    (Job(GPT, length=13, packed=True, cut=True), Place((1, 1, 2, 1), stage=1)),
    (Job(GPT, length=13, packed=True), Place((2, 1, 2, 1), schedule="zb-h1", stage=1, recompute="selective")),
    (Job(WINDOW), Place((1, 1, 2, 2), sequence_parallel=True)),
]
MORE = [
    (Job(GPT), Place((1, 1, 2, 1))),
    (Job(GPT, length=13, packed=True), Place((2, 1, 2, 1), schedule="zb-h1", stage=1)),
    (Job(GPT, length=11), Place((1, 2, 2, 1), "gather", stage=3, recompute="full")),
    (Job(LLAMA, length=15), Place((2, 1, 2, 1), recompute="selective")),
]


@pytest.mark.parametrize("cells", [CELLS, pytest.param(MORE, marks=pytest.mark.exhaustive)], ids=len)
def test_models_on_the_context_axis_equal_one_process(ranks: Any, cells: list[tuple[Job, Place]]) -> None:
    assert_equal_to_one_process(ranks, cells)


def test_loss_weights_of_context_ranks_sum_to_the_label_count() -> None:
    labels = batch(Job(GPT, length=13), 0)[1]
    for count, of in ((GPTLoss, labels), (CausalLMLoss, labels[:, 1:])):
        parts = []
        for rank in range(3):
            grid: Any = SimpleNamespace(context=Axis("context", range(3), rank, None))
            loss = GPTLoss(grid, VOCABULARY) if count is GPTLoss else CausalLMLoss(grid=grid)
            parts.append(int(loss.weight(labels)))
        assert sum(parts) == int((of != -100).sum()) and all(parts)


GRIDS = [(1, 1, 2, 1), (1, 1, 3, 1), (1, 1, 4, 1), (2, 1, 2, 1), (1, 2, 2, 1), (1, 1, 2, 2), (2, 2, 2, 1), (2, 1, 2, 2)]
JOBS = [
    *(Job(GPT), Job(GPT, length=13), Job(GPT, packed=True), Job(LLAMA), Job(LLAMA, length=11, packed=True)),
    *(Job(WINDOW), Job(replace(GPT, sliding_window=4), length=15, packed=True)),
]


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks_wanted", [2, 3, 4, 8])
def test_every_grid_with_a_context_axis_equals_one_process(ranks: Any, ranks_wanted: int) -> None:
    cells = []
    for i, (grid, job, kind) in enumerate(product(GRIDS, JOBS, ("ring", "ulysses", "gather"))):
        if kind == "ulysses" and grid[2] == 3 and job.config is GPT:
            continue  # 4 heads
        schedule = ("1f1b", "zb-h1", "gpipe")[i % 3]
        recompute = ("", "full", "selective")[i % 3 if i % 2 else 0]
        cells.append((job, Place(grid, kind, grid[3] > 1 and i % 2 > 0, schedule, i % 4, recompute)))
    assert_equal_to_one_process(ranks, [cell for cell in cells if cell[1].ranks == ranks_wanted])


class Plain(torch.nn.Module):
    """A module of the user's own: one attention over the context axis, and a loss per token."""

    def __init__(self, grid: triax.Grid) -> None:
        super().__init__()
        self.grid = grid
        torch.manual_seed(5)
        self.embed, self.mix = torch.nn.Embedding(VOCABULARY, 8), torch.nn.Linear(8, 24)
        self.head = torch.nn.Linear(8, VOCABULARY)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        axis = self.grid.context
        x = self.embed(shard(ids, axis))
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.mix(x).chunk(3, dim=-1))
        x = x + attention(q, k, v, grid=self.grid).transpose(1, 2).flatten(2)
        mine = shard(labels, axis, fill=-100)
        total = torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), mine.flatten(), reduction="sum")
        return total, (mine != -100).sum()


def plain_module(context: int, data: int, stage: int, wrong: str = "") -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    try:
        grid = triax.Grid(data=data, context=context)
        settings = {
            "train_batch_size": ROWS,
            "gradient_accumulation_steps": ROWS // data,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": stage},
        }
        engine, *_ = triax.initialize(model=Plain(grid), grid=grid, config=settings)
        ids, labels = batch(Job(GPT, length=16), 0)
        for i in range(grid.data.rank * ROWS // data, (grid.data.rank + 1) * ROWS // data):
            total, count = engine(ids[i : i + 1], labels[i : i + 1])
            if wrong == "mean":
                engine.backward(total / count)
            elif wrong == "plain":
                (total / count).backward()
            else:
                engine.backward((total, count))
            engine.step()
        return {**engine.gather("gradients"), "norm": torch.tensor(engine.get_global_grad_norm())}
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_users_module_on_the_context_axis_equals_one_process(ranks: Any) -> None:
    alone = plain_module(1, 1, 0)
    for context, data, stage in ((2, 1, 3), (2, 2, 1)):
        found = ranks(context * data, plain_module, context, data, stage)[0]
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=f"{name} {context} {data}")


@pytest.mark.parametrize("wrong", ["mean", "plain"])
def test_a_mean_loss_over_a_part_of_a_sequence_is_refused(ranks: Any, wrong: str) -> None:
    with pytest.raises(
        RankFailure, match=r"context=2.*call engine.backward\(\(sum of the losses, number of labels\)\)"
    ):
        ranks(2, plain_module, 2, 1, 0, wrong)
