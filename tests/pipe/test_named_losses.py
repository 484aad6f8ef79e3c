"""Losses with named terms and metrics, on every grid, beside plain PyTorch with the whole batch."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import triax
from triax import Grid, Loss, NextTokenLoss

from module_training import net
from pool import RankFailure
from training import microbatches, text_batches, tiny_gpt

VOCABULARY, SAMPLES, LENGTH, STEPS = 37, 8, 8, 2
FACTORS = {"even": 0.5, "rare": 2.0}


def labels_of(labels: Tensor) -> dict[str, Tensor]:
    """Return the labels that each term counts. Most microbatches have none of the rare ones."""
    return {
        "next": labels,
        "even": torch.where(labels % 2 == 0, labels, -100),
        "rare": torch.where(labels == 5, labels, -100),
    }


class Terms:
    """Three terms of one GPT, of different weights, and two metrics."""

    def __init__(self, grid: Grid) -> None:
        self.loss = NextTokenLoss(grid, vocab_size=VOCABULARY)

    def __call__(self, logits: Tensor, labels: Tensor) -> Loss:
        terms = {name: self.loss(logits, each) for name, each in labels_of(labels).items()}
        count = terms["next"][1]
        sizes = logits.detach().square().sum() * count, count  # a tensor rank's own, of which the first one counts
        metrics = {"labels": count, "pairs": (torch.stack([count, 2 * count]), 1.0), "size": sizes}
        return Loss(terms, FACTORS, metrics)

    def weight(self, labels: Tensor) -> dict[str, Tensor]:
        return {name: self.loss.weight(each) for name, each in labels_of(labels).items()}


class Means:
    """Two means, in a dict."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def __call__(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"square": logits.square().mean(), "next": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def batches() -> list[tuple[Tensor, Tensor]]:
    return text_batches(VOCABULARY, SAMPLES, LENGTH, STEPS)


def plain(loss_fn: Any) -> list[tuple[float, dict[str, float], dict[str, Tensor]]]:
    """Return loss, terms and gradients of each step by plain autograd over the whole batch, with SGD."""
    grid = Grid()
    module = tiny_gpt(grid)
    names = {parameter: name for name, parameter in module.named_parameters()}
    found = []
    for ids, labels in batches():
        logits = module.run_stage(0, ids)
        if loss_fn is Terms:
            terms = {}
            for name, counted in labels_of(labels).items():
                total = F.cross_entropy(logits.flatten(0, 1), counted.flatten(), ignore_index=-100, reduction="sum")
                terms[name] = total / (counted != -100).sum()
            loss = sum(FACTORS.get(name, 1.0) * term for name, term in terms.items())
        else:
            terms = Means(grid)(logits, labels)  # microbatches are of one size
            loss = terms["square"] + terms["next"]
        assert isinstance(loss, Tensor)
        gradients = torch.autograd.grad(loss, list(names))
        with torch.no_grad():
            for parameter, gradient in zip(names, gradients, strict=True):
                parameter -= 0.1 * gradient
        own = dict(zip(names.values(), gradients, strict=True))
        found.append((loss.item(), {name: term.item() for name, term in terms.items()}, own))
    return found


def trained(
    axes: dict[str, int], schedule: str, stage: Any, loss_fn: Any, **options: Any
) -> list[tuple[float, Any, Any, dict[str, Tensor]]]:
    """Return for each step the loss, the metrics, the evaluation of the batch before it, and the gradients."""
    grid = Grid(**axes, timeout=60)
    module = tiny_gpt(grid, loss_fn=loss_fn(grid))
    engine = triax.Engine(
        module,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        batch=triax.Batch(size=SAMPLES, microbatch=1),
        schedule=schedule,
        zero=triax.Zero(stage=stage),
        **options,
    )
    assert isinstance(engine, triax.PipelineEngine)
    data, same = microbatches(grid, batches()), microbatches(grid, batches())
    found = []
    for _ in range(STEPS):
        assert (before := engine.eval_batch(same)) is not None
        evaluated = before.item(), engine.metrics
        loss = engine.train_batch(data).item()
        found.append((loss, engine.metrics, evaluated, engine.gather("gradients")))
    return found


CASES = [
    ({}, "1f1b", 0),
    ({"pipe": 2}, "1f1b", 1),
    ({"pipe": 2}, "zb-h1", 0),
    ({"data": 2}, "1f1b", 3),
    ({"tensor": 2}, "1f1b", 2),
    ({"context": 2}, "1f1b", 1),
    ({"pipe": 2, "data": 2}, "interleaved", 2),
    ({"pipe": 2, "data": 2}, "zb-v", 3),
    ({"pipe": 2, "tensor": 2}, "dualpipe-v", 1),
    ({"data": 2, "context": 2}, "1f1b", 3),
]


@pytest.mark.parametrize(("axes", "schedule", "stage"), CASES)
def test_terms_are_those_of_one_process(ranks: Any, axes: dict[str, int], schedule: str, stage: int) -> None:
    wanted = plain(Terms)
    for steps in ranks(math.prod(axes.values()), trained, axes, schedule, stage, Terms):
        for (loss, metrics, evaluated, gradients), (own, terms, own_gradients) in zip(steps, wanted, strict=True):
            assert loss == pytest.approx(own, rel=1e-10) == evaluated[0]
            assert {name: metrics[name] for name in terms} == pytest.approx(terms, rel=1e-10)
            assert {name: evaluated[1][name] for name in terms} == pytest.approx(terms, rel=1e-10)
            count = SAMPLES * LENGTH
            parts = SAMPLES * axes.get("context", 1)  # as the metric's weight is 1 in each of them
            assert metrics["labels"] == pytest.approx(count / parts) and metrics["pairs"][1] == 2 * count / parts
            assert list(metrics) == ["next", "even", "rare", "labels", "pairs", "size"]
            torch.testing.assert_close(gradients, own_gradients, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(("axes", "stage"), [({"pipe": 2}, 0), ({"data": 2}, 3)])
def test_means_in_a_dict_need_no_weight(ranks: Any, axes: dict[str, int], stage: int) -> None:
    wanted = plain(Means)
    for steps in ranks(2, trained, axes, "1f1b", stage, Means):
        for (loss, metrics, evaluated, gradients), (own, terms, own_gradients) in zip(steps, wanted, strict=True):
            assert loss == pytest.approx(own, rel=1e-10) == evaluated[0]
            assert metrics == pytest.approx(terms, rel=1e-10) == evaluated[1]
            torch.testing.assert_close(gradients, own_gradients, rtol=1e-10, atol=1e-13)
