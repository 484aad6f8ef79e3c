"""Labels and other fields of microbatches that the first stage's ranks read and send to ranks that do not read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, TiedLayerSpec
from triax.base.errors import AgreedError

from support.rank_checks import assert_every_rank_raises
from support.training import (
    SGD,
    Step,
    assert_steps_equal,
    microbatches,
    pipeline_engine,
    text_batches,
    tiny_gpt,
    train,
    train_plain,
)

VOCABULARY, SAMPLES, LENGTH, STEPS = 37, 4, 8, 2


def batches() -> list[tuple[Tensor, Tensor]]:
    return text_batches(VOCABULARY, SAMPLES, LENGTH, STEPS)


def plain() -> list[Step]:
    """Train in one process over the whole batch of each step."""
    return train_plain(tiny_gpt(Grid()), SGD, [[batch] for batch in batches()], mean_of_tokens)


def mean_of_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def trained(axes: dict[str, Any], schedule: str, stage: Any) -> list[Step]:
    """Train where only the first stage's ranks have data."""
    grid = Grid(**axes, timeout=60)
    module = tiny_gpt(grid)
    engine = pipeline_engine(module, triax.Batch(size=SAMPLES, microbatch=1, labels="sent"), stage, schedule=schedule)
    data, again = (microbatches(grid, batches()) if module.is_first else None for _ in range(2))
    return train(engine, data, STEPS, again)


CASES = [
    ({}, "1f1b", 0),
    ({"pipe": 2}, "1f1b", 1),
    ({"pipe": 4}, "zb-h1", 0),
    ({"pipe": 2, "data": 2}, "zb-v", 3),
    ({"pipe": 2, "context": 2}, "gpipe", 1),
]
MORE = [
    ({"pipe": 2, "data": 2}, "interleaved", 2),
    ({"pipe": 2, "tensor": 2}, "1f1b", 3),
    ({"pipe": 2, "data": 2, "expert": 2}, "1f1b", 2),
]


@pytest.mark.parametrize(
    ("axes", "schedule", "stage"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in MORE)],
)
def test_sent_labels_give_the_gradients_of_one_process(
    ranks: Any, axes: dict[str, int], schedule: str, stage: int
) -> None:
    wanted = plain()
    for steps in ranks(
        math.prod(size for axis, size in axes.items() if axis != "expert"), trained, axes, schedule, stage
    ):
        assert_steps_equal(steps, wanted)


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
    engine = pipeline_engine(module, batch, optimizer=partial(torch.optim.SGD, lr=1e-3))
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


def test_sent_nests_of_labels_train_as_on_one_process(ranks: Any) -> None:
    wanted, gradients = train_nests(1, "read")
    for losses, own in ranks(2, train_nests, 2, "sent"):
        assert losses == pytest.approx(wanted, rel=1e-10)
        torch.testing.assert_close(own, gradients, rtol=1e-10, atol=1e-13)


def sent_bytes(pipe: int, schedule: str, labels: Any) -> tuple[float, float]:
    """Return the bytes that this rank sends over the pipe axis in the second and the third step."""
    grid = Grid(pipe=pipe, timeout=60)
    batch = triax.Batch(size=SAMPLES, microbatch=1, labels=labels)
    engine = pipeline_engine(tiny_gpt(grid), batch, schedule=schedule)
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
    engine = pipeline_engine(module, triax.Batch(size=2, microbatch=1, labels="sent"))
    ids = torch.zeros(1, LENGTH, dtype=torch.int64)
    data = iter([(ids, {1: ids} if what == "key" else {ids})] * 2) if module.is_first else None
    engine.train_batch(data)


@pytest.mark.parametrize("what", ["key", "set"])
def test_labels_that_cannot_be_sent_are_refused_on_every_rank(ranks: Any, what: str) -> None:
    words = r"microbatch 0.*(keys \[1\]: use keys of type str|a set cannot be sent)"
    assert_every_rank_raises(ranks, 2, words, unsendable, what)


def test_a_plain_module_refuses_sent_labels() -> None:
    with pytest.raises(triax.ConfigError, match=r"batch.labels is sent, but a Linear has no stages"):
        triax.Engine(torch.nn.Linear(2, 2), optimizer=SGD, batch=triax.Batch(size=2, labels="sent"), grid=Grid())


WIDTH = 8


class Block(nn.Module):
    """A residual layer, masked where the batch is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(x))) * attention_mask[..., None]
        return y


class Mix(nn.Module):
    """A layer that mixes in the embedding of the next word, and counts labels, as multi-token prediction does."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, input_ids: Tensor, labels: Tensor) -> Tensor:
        y: Tensor = self.mix(torch.cat([x, self.words(input_ids.roll(-1, 1))], -1)) * (labels >= 0).double().mean()
        return y


def head(words: Any, x: Tensor, attention_mask: Tensor) -> Tensor:
    y: Tensor = x @ words.weight.T * attention_mask[..., None]
    return y


def listed() -> list[Any]:
    return [
        TiedLayerSpec("words", nn.Embedding, VOCABULARY, WIDTH),
        *[LayerSpec(Block, takes="attention_mask") for _ in range(4)],
        LayerSpec(Mix, takes=("input_ids", "labels")),
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("words", nn.Embedding, VOCABULARY, WIDTH, forward_fn=head, takes=("attention_mask",)),
    ]


class CountedLoss:
    """A loss of labels that are the ids' successors, with -100 for padding."""

    def __call__(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return total, (labels != -100).sum()


def padded(step: int) -> dict[str, Tensor]:
    """Return one step's batch as a collator does, with padding on the right."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (SAMPLES, 1), generator=generator)
    mask = (torch.arange(LENGTH) < lengths).long()
    labels = torch.where(mask.bool(), ids.roll(-1, 1), -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def parts(grid: Grid, size: int) -> Iterator[dict[str, Tensor]]:
    for step in range(STEPS):
        share = SAMPLES // grid.data.size
        for first in range(grid.data.rank * share, (grid.data.rank + 1) * share, size):
            yield {name: value[first : first + size] for name, value in padded(step).items()}


def masked_model(grid: Grid) -> triax.PipelineModule:
    return triax.PipelineModule(
        listed(), grid=grid, loss_fn=CountedLoss(), dtype=torch.float64, seed=3, partition="uniform"
    )


def plain_dicts() -> list[Step]:
    """Train layer by layer in one process over the whole batch of each step."""
    module = masked_model(Grid())
    first, *blocks, mix, norm = module.layers.values()

    def forward(ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        x = first(ids)
        for block in blocks:
            x = block(x, mask)
        return head(first, norm(mix(x, ids, labels)), mask)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        total, count = CountedLoss()(logits, labels)
        return total / count

    # A sample at a time, as Mix averages over its labels.
    def each(ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        return torch.cat([forward(*row) for row in zip(ids.split(1), mask.split(1), labels.split(1), strict=True)])

    batches = [(b["input_ids"], b["attention_mask"], b["labels"], b["labels"]) for b in map(padded, range(STEPS))]
    return train_plain(module, SGD, [[batch] for batch in batches], loss, forward=each)


def train_dicts(axes: dict[str, Any], schedule: str, stage: Any, labels: Any, interval: int) -> list[Step]:
    grid = Grid(**axes, timeout=60)
    module, batch = masked_model(grid), triax.Batch(size=SAMPLES, microbatch=1, labels=labels)
    engine = pipeline_engine(module, batch, stage, schedule=schedule, recompute={"interval": interval})
    reads = module.is_first or (labels == "read" and module.is_last)
    data, again = (parts(grid, 1) if reads else None for _ in range(2))
    return train(engine, data, STEPS, again)


DICTS = [
    ({}, "1f1b", 0, "read", 1),
    ({"pipe": 2}, "zb-h1", 1, "read", 0),
    ({"pipe": 4}, "1f1b", 0, "sent", 2),
    ({"pipe": 2, "data": 2}, "zb-v", 3, "sent", 1),
    ({"pipe": 2, "data": 2}, "interleaved", 3, "read", 0),
    ({"pipe": 2}, "dualpipe-v", 3, "sent", 1),
]


@pytest.mark.parametrize(("axes", "schedule", "stage", "labels", "interval"), DICTS)
def test_layers_that_take_batch_fields_train_as_one_process(
    ranks: Any, axes: dict[str, int], schedule: str, stage: int, labels: str, interval: int
) -> None:
    wanted = plain_dicts()
    for steps in ranks(math.prod(axes.values()), train_dicts, axes, schedule, stage, labels, interval):
        assert_steps_equal(steps, wanted)


def field_bytes() -> float:
    """Return the bytes of the messages that this rank sends in a step whose layers take fields."""
    grid = Grid(pipe=4, timeout=60)
    engine = pipeline_engine(masked_model(grid), triax.Batch(size=SAMPLES, microbatch=1))
    data = parts(grid, 1)
    for _ in range(STEPS):  # the first step sends schemas too
        engine.train_batch(data)
    sent: float = engine.traffic_report()["sent"]["pipe"]["send"]["bytes"]
    return sent


def test_fields_are_sent_to_the_ranks_of_the_layers_that_take_them(ranks: Any) -> None:
    hidden, one = SAMPLES * LENGTH * WIDTH * 8.0, SAMPLES * LENGTH * 8.0
    # Of rank 0: the mask to ranks 1, 2 and 3, and ids and labels to rank 2 alone.
    assert ranks(4, field_bytes) == [hidden + 5 * one, 2 * hidden, 2 * hidden, hidden]


def test_a_whole_model_takes_fields_as_arguments() -> None:
    module, batch = masked_model(Grid()), padded(0)
    with pytest.raises(ValueError, match=r"layer 1 \(Block\) takes the field 'attention_mask' .* model\(x, attention"):
        module(batch["input_ids"])
    assert module(batch["input_ids"], **batch).shape == (SAMPLES, LENGTH, VOCABULARY)


def shifted(pipe: int, dicts: bool) -> tuple[float, dict[str, Tensor]]:
    """Train by labels that are the ids, which the loss shifts, in dicts or in pairs."""
    grid = Grid(pipe=pipe, timeout=60)
    module = tiny_gpt(grid, loss_fn=triax.CausalLMLoss(grid=grid))
    engine = pipeline_engine(module, triax.Batch(size=SAMPLES, microbatch=2))
    pairs = microbatches(grid, [(ids, ids) for ids, _ in batches()], 2)
    data = ({"input_ids": ids, "labels": labels} for ids, labels in pairs) if dicts else pairs
    return engine.train_batch(data).item(), engine.gather("gradients")


def test_a_dict_of_ids_and_labels_trains_as_a_pair(ranks: Any) -> None:
    (loss, gradients), *_ = ranks(1, shifted, 1, False)
    for found, own in ranks(2, shifted, 2, True):
        assert found == pytest.approx(loss, rel=1e-10)
        torch.testing.assert_close(own, gradients, rtol=1e-10, atol=1e-13)


def wrong(mistake: str) -> None:
    grid = Grid(pipe=2, timeout=30)
    module = tiny_gpt(grid) if mistake == "next tokens" else masked_model(grid)
    engine = pipeline_engine(module, triax.Batch(size=2, microbatch=1))
    batch: Any = {name: value[:1] for name, value in padded(0).items()}
    match mistake:
        case "no labels":
            del batch["labels"]
        case "no mask":
            del batch["attention_mask"]
        case "pair":
            batch = batch["input_ids"], batch["labels"]
    engine.train_batch(iter([batch] * 2))


WRONG = {
    "no labels": r"microbatch 0 is a dict of input_ids, attention_mask, without 'labels'",
    "no mask": r"microbatch 0 .* has no field 'attention_mask', but input_ids, inputs, labels",
    "pair": r"microbatch 0 .* has no field 'attention_mask', but inputs, labels",
    "next tokens": r"is a dict, .* NextTokenLoss needs .* use loss_fn=triax.CausalLMLoss",
}


@pytest.mark.parametrize("mistake", WRONG)
def test_batches_without_a_needed_field_are_refused_on_every_rank(ranks: Any, mistake: str) -> None:
    assert_every_rank_raises(ranks, 2, WRONG[mistake], wrong, mistake)
