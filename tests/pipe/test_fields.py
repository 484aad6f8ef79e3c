"""Labels and other fields of microbatches that the first stage's ranks read and send to ranks that do not read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import triax
from triax import Grid, PipelineEngine
from triax.base.errors import AgreedError

from pool import RankFailure
from training import microbatches, text_batches, tiny_gpt

VOCABULARY, SAMPLES, LENGTH, STEPS = 37, 8, 8, 2
SGD = partial(torch.optim.SGD, lr=0.1)


def batches() -> list[tuple[Tensor, Tensor]]:
    return text_batches(VOCABULARY, SAMPLES, LENGTH, STEPS)


def plain() -> list[tuple[float, dict[str, Tensor]]]:
    """Return loss and gradients of each step by plain autograd over the whole batch, with SGD."""
    module = tiny_gpt(Grid())
    names = {parameter: name for name, parameter in module.named_parameters()}
    found = []
    for ids, labels in batches():
        loss = F.cross_entropy(module.run_stage(0, ids).flatten(0, 1), labels.flatten())
        gradients = torch.autograd.grad(loss, list(names))
        with torch.no_grad():
            for parameter, gradient in zip(names, gradients, strict=True):
                parameter.sub_(0.1 * gradient)
        found.append((loss.item(), dict(zip(names.values(), gradients, strict=True))))
    return found


def first_only(grid: Grid, module: triax.PipelineModule, data: Iterator[Any]) -> Iterator[Any] | None:
    """Return the data on the ranks of the first stage, and None on the others."""
    return data if module.is_first else None


def trained(axes: dict[str, Any], schedule: str, stage: Any) -> list[tuple[float, float, dict[str, Tensor]]]:
    """Return evaluation, loss and gradients of each step; only the first stage's ranks have data."""
    grid = Grid(**axes, timeout=60)
    batch = triax.Batch(size=SAMPLES, microbatch=1, labels="sent")
    module = tiny_gpt(grid)
    engine = triax.Engine(module, optimizer=SGD, batch=batch, schedule=schedule, zero=triax.Zero(stage=stage))
    assert isinstance(engine, PipelineEngine)
    data, same = (first_only(grid, module, microbatches(grid, batches())) for _ in range(2))
    found = []
    for _ in range(STEPS):
        evaluated = engine.eval_batch(same).item()
        found.append((evaluated, engine.train_batch(data).item(), engine.gather("gradients")))
    return found


CASES = [
    ({}, "1f1b", 0),
    ({"pipe": 2}, "1f1b", 1),
    ({"pipe": 4}, "zb-h1", 0),
    ({"pipe": 2, "data": 2}, "interleaved", 2),
    ({"pipe": 2, "data": 2}, "zb-v", 3),
    ({"pipe": 2, "tensor": 2}, "1f1b", 3),
    ({"pipe": 2, "context": 2}, "gpipe", 1),
]


@pytest.mark.parametrize(("axes", "schedule", "stage"), CASES)
def test_sent_labels_give_the_gradients_of_one_process(
    ranks: Any, axes: dict[str, int], schedule: str, stage: int
) -> None:
    wanted = plain()
    for steps in ranks(math.prod(axes.values()), trained, axes, schedule, stage):
        for (evaluated, loss, gradients), (own, own_gradients) in zip(steps, wanted, strict=True):
            assert evaluated == loss == pytest.approx(own, rel=1e-10)
            torch.testing.assert_close(gradients, own_gradients, rtol=1e-10, atol=1e-13)


def nested_loss(logits: Tensor, labels: Any) -> Tensor:
    """Return a loss that uses each value of a nest of labels."""
    weights, name, number, (words, some), nothing = (labels[k] for k in ("weights", "name", "number", "pair", "none"))
    assert nothing is None and some.dtype == torch.bool and weights.dtype == torch.float32
    losses = F.cross_entropy(logits.flatten(0, 1), words.flatten(), reduction="none").view_as(words)
    total: Tensor = (losses * some * weights).sum() * number * len(name)
    return total


def nests() -> Iterator[Any]:
    """Yield microbatches of various sizes, with texts and numbers that change."""
    generator = torch.Generator().manual_seed(5)
    for index in range(12):
        size, length = 1 + index % 3, 8 - index % 2
        ids = torch.randint(VOCABULARY, (size, length), generator=generator)
        pair = ids.roll(1, 1), torch.rand(size, length, generator=generator) < 0.5
        weights = torch.rand(size, length, generator=generator)
        yield ids, {"weights": weights, "name": "ab"[: 1 + index % 2], "number": index, "pair": pair, "none": None}


def train_nests(pipe: int, labels: Any) -> tuple[list[float], dict[str, Tensor]]:
    grid = Grid(pipe=pipe, timeout=60)
    module = tiny_gpt(grid, loss_fn=nested_loss)
    batch = triax.Batch(size=2, microbatch=1, labels=labels)
    engine = triax.Engine(module, optimizer=partial(torch.optim.SGD, lr=1e-3), batch=batch)
    assert isinstance(engine, PipelineEngine)
    data = nests() if module.is_first or labels == "read" else None
    losses = [engine.train_batch(data).item() for _ in range(3)]
    losses.append(engine.eval_batch(data, num_micro_batches=3).item())
    losses.append(engine.eval_batch(data, num_micro_batches=1).item())
    losses.append(engine.train_batch(data).item())
    with pytest.raises(AgreedError, match="the data ended after 0 of the 2 microbatches"):
        engine.train_batch(data)
    again = nests() if module.is_first or labels == "read" else None
    losses.append(engine.train_batch(again).item())  # training goes on
    return losses, engine.gather("gradients")


def test_nests_of_labels_of_any_shape_and_changing_values(ranks: Any) -> None:
    wanted, gradients = train_nests(1, "read")
    for losses, own in ranks(2, train_nests, 2, "sent"):
        assert losses == pytest.approx(wanted, rel=1e-10)
        torch.testing.assert_close(own, gradients, rtol=1e-10, atol=1e-13)


def sent_bytes(pipe: int, schedule: str, labels: Any) -> tuple[float, float]:
    """Return the bytes that this rank sends over the pipe axis in the second and the third step."""
    grid = Grid(pipe=pipe, timeout=60)
    module = tiny_gpt(grid)
    batch = triax.Batch(size=SAMPLES, microbatch=1, labels=labels)
    engine = triax.Engine(module, optimizer=SGD, batch=batch, schedule=schedule)
    assert isinstance(engine, PipelineEngine)
    data = microbatches(grid, text_batches(VOCABULARY, SAMPLES, LENGTH, 3))
    found = []
    for _ in range(3):
        engine.train_batch(data)
        report = engine.traffic_report()["sent"]
        found.append(report.get("pipe", {}).get("send", {"bytes": 0.0})["bytes"])
    return found[1], found[2]


@pytest.mark.parametrize(("pipe", "schedule"), [(2, "1f1b"), (4, "1f1b"), (2, "zb-v")])
def test_the_first_stage_sends_the_bytes_of_the_labels(ranks: Any, pipe: int, schedule: str) -> None:
    read, sent = (ranks(pipe, sent_bytes, pipe, schedule, labels) for labels in ("read", "sent"))
    extra = [after - before for (_, after), (_, before) in zip(sent, read, strict=True)]
    one = 0.0 if schedule == "zb-v" else SAMPLES * LENGTH * 8.0  # zb-v has the last stage on the first rank
    assert extra == [one, *[0.0] * (pipe - 1)] and all(first == second for first, second in sent)


def unsendable(what: str) -> None:
    grid = Grid(pipe=2, timeout=30)
    module = tiny_gpt(grid)
    batch = triax.Batch(size=2, microbatch=1, labels="sent")
    engine = triax.Engine(module, optimizer=SGD, batch=batch)
    ids = torch.zeros(1, LENGTH, dtype=torch.int64)
    data = iter([(ids, {1: ids} if what == "key" else {ids})] * 2) if module.is_first else None
    engine.train_batch(data)  # type: ignore[union-attr]


@pytest.mark.parametrize("what", ["key", "set"])
def test_labels_that_cannot_be_sent_are_refused_on_every_rank(ranks: Any, what: str) -> None:
    text = r"microbatch 0.*(keys \[1\]: use keys of type str|a set cannot be sent)"
    with pytest.raises(RankFailure, match=text) as failure:
        ranks(2, unsendable, what)
    for rank in range(2):
        assert failure.value[rank].kind == "raised" and re.search(text, failure.value[rank].text)


def test_a_plain_module_refuses_sent_labels() -> None:
    with pytest.raises(triax.ConfigError, match=r"batch.labels is sent, but a Linear has no stages"):
        triax.Engine(torch.nn.Linear(2, 2), optimizer=SGD, batch=triax.Batch(size=2, labels="sent"), grid=Grid())
