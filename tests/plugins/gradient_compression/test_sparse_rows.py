"""Rows of embeddings that are sent sparsely, and weights that stages tie."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, PipelineModule
from triax.base.errors import ConfigError
from triax.models.gpt import GPTConfig, GPTLoss, gpt_layers
from triax.plugins.gradient_compression.compressor import message_bytes
from triax.tensor_parallel import VocabParallelEmbedding

from support.compression_references import (
    LR,
    POWER,
    SAMPLES,
    TOPK,
    WIDTH,
    Part,
    assert_same,
    loss_fn,
)
from support.sweeps import some


class Words(nn.Module):
    """An embedding, sharded over the tensor axis if there is one."""

    def __init__(self, *, grid: Grid) -> None:
        super().__init__()
        self.embedding = VocabParallelEmbedding(VOCABULARY, WIDTH, grid=grid)

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.embedding(ids)
        return y


VOCABULARY, LENGTH = 64, 3


def looked_up(shape: tuple[int, int, int], stage: int, sparse: bool, few: bool) -> Any:
    grid = Grid(*shape, timeout=60)
    layers = [LayerSpec(Words), LayerSpec(Part), LayerSpec(Part)]
    model = PipelineModule(layers, grid=grid, loss_fn=loss_fn, dtype=torch.float64, partition="uniform")
    config = {
        "train_batch_size": SAMPLES,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": LR, "momentum": 0.9}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 400},
        "sparse_gradients": sparse,
    }
    made, *_ = triax.initialize(model=model, config=config)
    generator, trace, counts = torch.Generator().manual_seed(5), [], []
    for _ in range(3):
        ids = torch.randint(12 if few else VOCABULARY, (SAMPLES, LENGTH), generator=generator)
        y = torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
        weight = torch.randint(1, 9, (SAMPLES, 1, 1), generator=generator).double()
        share = SAMPLES // grid.data.size
        mine = slice(grid.data.rank * share, (grid.data.rank + 1) * share)
        parts = zip(ids[mine].split(2), zip(y[mine].split(2), weight[mine].split(2), strict=True), strict=True)
        made.train_batch(iter(list(parts)))
        trace.append((made.gather("gradients"), made.gather()))
        every = [ids[r * share : (r + 1) * share] for r in range(grid.data.size)]
        counts.append(max(part.unique().numel() for part in every))
    return trace, made.traffic_report(), counts


@pytest.mark.parametrize(
    ("shape", "stage"), some([((1, 2, 1), 0), ((1, 4, 1), 1), ((2, 2, 1), 1), ((1, 2, 2), 0)], (0, 2))
)
def test_sparse_embedding_rows_sum_as_the_dense_gradient(ranks: Any, shape: tuple[int, int, int], stage: int) -> None:
    size = math.prod(shape)
    wanted = ranks(size, looked_up, shape, stage, False, True)
    found = ranks(size, looked_up, shape, stage, True, True)
    for (trace, report, _), (want, plainly, _) in zip(found, wanted, strict=True):
        assert_same(trace, want)
        assert report["uncompressed"] == plainly["uncompressed"] == plainly["formula"]
        sent = sum(entry["bytes"] for entry in report["sent"]["data"].values())
        assert sent == pytest.approx(report["formula"]["data"])
    first, plainly = found[0], wanted[0]
    if shape == (1, 2, 1):
        # The replicas exchange rows, with 4 bytes for each index, instead of the table; and the number of rows.
        kinds = first[1]["sent"]["data"]
        assert kinds["all_gather"]["bytes"] == message_bytes(first[2][-1], first[2][-1] * WIDTH, torch.float64)
        assert first[2][-1] * (8 * WIDTH + 4) <= kinds["all_gather"]["bytes"] <= first[2][-1] * (8 * WIDTH + 4) + 8
        reduced = plainly[1]["sent"]["data"]["all_reduce"]["bytes"] - VOCABULARY * WIDTH * 8
        assert kinds["all_reduce"]["bytes"] == reduced + 8


def test_many_embedding_rows_are_sent_as_a_dense_gradient(ranks: Any) -> None:
    wanted = ranks(2, looked_up, (1, 2, 1), 0, False, False)
    (trace, report, counts), _ = ranks(2, looked_up, (1, 2, 1), 0, True, False)
    assert_same(trace, wanted[0][0])
    small = counts[-1] * (8 * WIDTH + 4) < VOCABULARY * WIDTH * 8
    assert ("all_gather" in report["sent"]["data"]) == small


def beside_much(options: dict[str, Any]) -> float:
    """Bytes of a step in stage 1, with an embedding that shares a bucket with many other parameters."""
    layers = [LayerSpec(Words), LayerSpec(nn.Linear, WIDTH, 200), LayerSpec(nn.Linear, 200, WIDTH)]
    model = PipelineModule(layers, grid=Grid(timeout=60), loss_fn=loss_fn, dtype=torch.float64, partition="uniform")
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_optimization": {"stage": 1},
        **options,
    }
    made, *_ = triax.initialize(model=model, config=config)
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) % 3
    made.train_batch(iter([(ids, (torch.ones(2, LENGTH, WIDTH).double(), torch.ones(2, 1, 1).double()))]))
    return float(sum(entry["bytes"] for entry in made.traffic_report()["sent"]["data"].values()))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_sparse_embedding_rows_never_send_more_than_the_dense_sum(ranks: Any, dtype: str) -> None:
    """The other parameters of an embedding's bucket are all-reduced in stage 1, not reduce-scattered."""
    options = {"communication_data_type": dtype}
    plain, sparse = ranks(2, beside_much, options), ranks(2, beside_much, {**options, "sparse_gradients": True})
    for sent, whole in zip(sparse, plain, strict=True):
        assert whole <= sent <= whole + 8  # and how many rows there are


def tied_ends(section: dict[str, Any]) -> Tensor:
    """A tied weight of the first and the last stage, each with other parameters, on four replicas."""
    grid = Grid(2, 4, 1, timeout=60)
    sizes = GPTConfig(
        vocab_size=33,
        max_position_embeddings=4,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    model = PipelineModule(gpt_layers(sizes), grid=grid, loss_fn=GPTLoss(grid, vocab_size=33), seed=2)
    config = {
        "train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "gradient_compression": section,
    }
    made, *_ = triax.initialize(model=model, config=config)
    generator = torch.Generator().manual_seed(grid.data.rank)
    for _ in range(8):
        ids = torch.randint(33, (4, 5), generator=generator)
        made.train_batch(iter([*zip(ids[:, :-1].split(2), ids[:, 1:].split(2), strict=True)]))
    tie = next(bucket for bucket in made.data_axis.buckets if bucket.tie is not None)
    return tie.weights.clone()


@pytest.mark.parametrize("section", [{**POWER, "rank": 2}, {**TOPK, "ratio": 0.9}], ids=["powersgd", "topk, dense"])
def test_sparse_rows_keep_tied_weights_equal(ranks: Any, section: dict[str, Any]) -> None:
    """Bit by bit: the order of a ring's sums depends on the rest of the message, which differs between stages."""
    first, *others = ranks(8, tied_ends, section)
    for weight in others:
        assert torch.equal(weight, first)


class Tied(nn.Module):
    """A head tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.head(self.embedding(ids))
        return y


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Tied, "embedding.weight is tied to another layer"),
        (lambda: nn.Linear(2, 2), "it has no nn.Embedding"),
    ],
)
def test_models_without_sparse_rows_are_refused(model: Callable[[], nn.Module], words: str) -> None:
    config = {"train_batch_size": 1, "sparse_gradients": True, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
    with pytest.raises(ConfigError, match=words):
        triax.initialize(model=model(), config=config)
