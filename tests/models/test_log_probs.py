"""Losses of the labels' log-probabilities in chunks, beside plain PyTorch with whole logits."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import triax
from triax import Grid, LogProbsLoss
from triax.engine.monitor.profiler.memory_meter import MemoryMeter
from triax.pipe.chunked_loss import LastLayer

from support.sweeps import some
from support.toys import same
from support.training import tiny_gpt

VOCABULARY, PAIRS, LENGTH, CHUNK = 37, 4, 8, 3


def pairs() -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Return microbatches: a preferred row, a rejected one, and the reference's log-probabilities of both."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(PAIRS):
        ids, labels = (torch.randint(VOCABULARY, (2, LENGTH), generator=generator) for _ in range(2))
        labels[:, :2] = -100
        reference = -30 + torch.randn(2, dtype=torch.float64, generator=generator)
        found.append((ids, {"labels": labels, "reference": reference}))
    return found


def temperature_of(features: dict[str, Any]) -> float:
    return 0.7 if "final_logit_softcapping" in features else 1.0


def preference(log_probs: Tensor, labels: Any) -> triax.Loss:
    """Return DPO's loss (Rafailov et al. 2023, arXiv:2305.18290, equation 7), and its accuracy."""
    better, worse = 0.1 * (log_probs.sum(1) - labels["reference"])
    return triax.Loss({"dpo": F.softplus(worse - better)}, metrics={"right": (better > worse).double()})


def trained(axes: dict[str, Any], schedule: str, stage: Any, features: dict[str, Any]) -> tuple[Any, ...]:
    grid = Grid(**axes, timeout=60)
    loss_fn = LogProbsLoss(grid, VOCABULARY, preference, chunk_tokens=CHUNK, temperature=temperature_of(features))
    module = tiny_gpt(grid, loss_fn=loss_fn, **features)
    if module.is_last:
        assert module.loss_takes_head
    engine = triax.Engine(
        module,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        batch=triax.Batch(size=2 * PAIRS, microbatch=2),
        schedule=schedule,
        zero=triax.Zero(stage=stage),
    )
    assert isinstance(engine, triax.PipelineEngine)
    mine = pairs()[grid.data.rank :: grid.data.size]
    evaluated = engine.eval_batch(iter(mine)).item()
    loss = engine.train_batch(iter(mine)).item()
    return evaluated, loss, engine.metrics, engine.gather("gradients")


def plain(features: dict[str, Any]) -> tuple[float, float, dict[str, Tensor]]:
    """Return loss, accuracy and gradients by whole logits in plain PyTorch."""
    features = {name: value for name, value in features.items() if name != "sequence_parallel"}
    module = tiny_gpt(Grid(), loss_fn=None, **features)
    names = {parameter: name for name, parameter in module.named_parameters()}
    losses, right = [], []
    for ids, labels in pairs():
        chances = (module(ids) / temperature_of(features)).log_softmax(-1)
        found = chances.gather(-1, labels["labels"].clamp(min=0)[..., None])[..., 0]
        found = found * (labels["labels"] >= 0)
        rewards = 0.1 * (found.sum(1) - labels["reference"])
        losses.append(-F.logsigmoid(rewards[0] - rewards[1]))
        right.append(float(rewards[0] > rewards[1]))
    loss = torch.stack(losses).mean()
    gradients = torch.autograd.grad(loss, list(names))
    return loss.item(), sum(right) / PAIRS, dict(zip(names.values(), gradients, strict=True))


CASES: list[tuple[dict[str, int], str, int, dict[str, Any]]] = [
    ({}, "1f1b", 0, {}),
    ({"pipe": 2}, "zb-v", 2, {"final_logit_softcapping": 2.0}),
    ({"pipe": 2, "data": 2}, "zb-h1", 3, {"tie_word_embeddings": False}),
    ({"pipe": 2, "tensor": 2}, "1f1b", 1, {"sequence_parallel": True}),
]


@pytest.mark.parametrize(("axes", "schedule", "stage", "features"), some(CASES, (1, 3)))
def test_chunked_log_prob_loss_equals_whole_logits(
    ranks: Any, axes: dict[str, int], schedule: str, stage: int, features: dict[str, Any]
) -> None:
    wanted, right, own = plain(features)
    for evaluated, loss, metrics, gradients in ranks(
        math.prod(axes.values()), trained, axes, schedule, stage, features
    ):
        assert loss == pytest.approx(wanted, rel=1e-12) == evaluated
        assert metrics == pytest.approx({"dpo": wanted, "right": right}, rel=1e-12)
        assert gradients.keys() == own.keys()
        for name, gradient in own.items():
            same(gradients[name], gradient, atol=1e-13)


def test_log_prob_loss_holds_at_most_two_chunks_of_logits() -> None:
    tokens, width, vocabulary, chunk = 4096, 8, 1000, 128
    head = nn.Linear(width, vocabulary, bias=False, dtype=torch.float64)
    x = torch.randn(2, tokens // 2, width, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(vocabulary, (2, tokens // 2))
    peaks = []
    for each in (chunk, 2 * chunk):
        loss = LogProbsLoss(Grid(), vocabulary, lambda found, _: found.sum(1).sigmoid().mean(), chunk_tokens=each)
        with MemoryMeter(lambda: 0) as meter:
            loss.of_head(LastLayer(head, head), x, labels).backward()
        peaks.append(meter.peak)
        x.grad = head.weight.grad = None
    gradients, block = 8 * (tokens * width + width * vocabulary), 8 * 2**18 + 8 * vocabulary
    for peak, each in zip(peaks, (chunk, 2 * chunk), strict=True):
        logits = 8 * each * vocabulary
        assert logits < peak - gradients <= 2 * logits + block + 100 * each + 40 * tokens, each


def test_log_probs_loss_refuses_labels_that_are_no_tensor() -> None:
    loss = LogProbsLoss(Grid(), VOCABULARY, preference)
    with pytest.raises(TypeError, match="a tuple as labels: give a tensor of integers"):
        loss(torch.zeros(1, 2, VOCABULARY), (1, 2))
