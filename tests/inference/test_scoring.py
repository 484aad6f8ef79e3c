"""Scores of texts: the log-probabilities of one process in plain PyTorch, on grids, with any loss function."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import triax
from triax.inference.scoring import Score, Scorer
from triax.models.gpt import GPTConfig, gpt_layers

from support.reference import gpt_logits

SHAPE = GPTConfig(vocab_size=61, max_position_embeddings=32, hidden_size=16, num_hidden_layers=3, num_attention_heads=4)
LENGTHS, COUNTS = (5, 9, 33, 2, 7, 12, 3), (2, 8, 30, 1, 3, 4, 2)
GRIDS: list[dict[str, Any]] = [{}, {"pipe": 2, "tensor": 2}, {"data": 2}, {"data": 2, "context": 2}]


def texts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(61, (length,), generator=draw).tolist() for length in LENGTHS]


def scored(sizes: dict[str, Any], loss_fn: Any, zero: int) -> tuple[list[Score], list[Score], dict[str, Any]]:
    """Scores before and after a step of training, and the weights at first."""
    grid = triax.Grid(**sizes)
    loss_fn = loss_fn or triax.NextTokenLoss(grid, vocab_size=61, chunk_tokens=4)
    layers = gpt_layers(SHAPE, sequence_parallel=sizes.get("tensor", 1) > 1)
    module = triax.PipelineModule(layers, grid=grid, loss_fn=loss_fn, dtype=torch.float64)
    for parameter in module.parameters():
        parameter.data *= 5
    options: dict[str, Any] = {"optimizer": torch.optim.SGD, "zero": zero} if zero else {}
    engine: Any = triax.Engine(module, batch=triax.Batch(size=4, microbatch=2), **options)
    scorer, rows, weights = Scorer(engine), texts(), engine.gather()
    first = scorer(rows, COUNTS)
    if zero:
        ids = torch.randint(61, (2, 17), generator=torch.Generator().manual_seed(1))
        engine.train_batch(iter([(ids[:, :-1], ids[:, 1:])] * 4))
    return first, scorer(rows, COUNTS), weights


def test_scores_equal_plain_pytorch(ranks: Any) -> None:
    """An engine in training, ZeRO 3, and a loss function that is a module are included."""
    for sizes in GRIDS:
        count = torch.Size(sizes.values()).numel()
        training = 3 if sizes == {"data": 2} else 0
        loss_fn = torch.nn.CrossEntropyLoss() if count == 1 else None
        for first, again, weights in ranks(count, scored, sizes, loss_fn, training):
            assert (first == again) == (not training)
            for ids, number, found in zip(texts(), COUNTS, first, strict=True):
                logits = gpt_logits(weights, torch.tensor([ids[:-1]]), SHAPE.num_hidden_layers, 4)[0]
                labels = torch.tensor(ids[1:])
                wanted = logits.log_softmax(-1).gather(1, labels[:, None])[-number:, 0]
                torch.testing.assert_close(
                    torch.tensor(found.log_probs, dtype=torch.float64), wanted, atol=1e-10, rtol=0
                )
                assert found.is_likeliest == (logits.argmax(-1) == labels)[-number:].tolist()
            assert 0 < sum(each for found in first for each in found.is_likeliest) < sum(COUNTS)


def test_scoring_refuses_sequences_that_do_not_fit() -> None:
    module = triax.PipelineModule(gpt_layers(SHAPE))
    engine: Any = triax.Engine(module, batch=triax.Batch(size=2, microbatch=2))
    scorer = Scorer(engine)
    for ids, count in (([1], 1), ([1, 2], 2), ([1, 61], 1), ([1] * 34, 1)):
        with pytest.raises(ValueError, match="give 2 to 33 ids below 61"):
            scorer([ids], [count])
