"""Losses with named terms and metrics, on every grid, beside plain PyTorch with the whole batch."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

import triax
from triax import Grid, Loss, NextTokenLoss

from support import five_axes
from support.five_axes import Job, Place
from support.module_training import net
from support.rank_checks import assert_every_rank_raises
from support.sweeps import some
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
        sizes = logits.detach().square().sum() * count, count  # each tensor rank has another; the first rank counts
        metrics = {"labels": count, "pairs": (torch.stack([count, 2 * count]), 1.0), "size": sizes}
        return Loss(terms, FACTORS, metrics)

    def weight(self, labels: Tensor) -> dict[str, Tensor]:
        return {name: self.loss.weight(each) for name, each in labels_of(labels).items()}


def means(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return two means, in a dict."""
    return {"square": logits.square().mean(), "next": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def batches() -> list[tuple[Tensor, Tensor]]:
    """Return the batch of each step; in each step one or two microbatches have rare labels."""
    return text_batches(VOCABULARY, SAMPLES, LENGTH, STEPS, seed=10)


@cache
def plain(weighted: bool) -> list[Step]:
    """Train in one process over the whole batch of each step."""

    def weighed(logits: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        terms = {}
        for name, counted in labels_of(labels).items():
            sums = F.cross_entropy(logits.flatten(0, 1), counted.flatten(), ignore_index=-100, reduction="sum")
            terms[name] = sums / (counted != -100).sum()
        return torch.stack([FACTORS.get(name, 1.0) * term for name, term in terms.items()]).sum(), terms

    def meant(logits: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        terms = means(logits, labels)  # microbatches are of one size
        return terms["square"] + terms["next"], terms

    return train_plain(tiny_gpt(Grid()), SGD, [[batch] for batch in batches()], weighed if weighted else meant)


def trained(axes: dict[str, Any], schedule: str, stage: Any, weighted: bool) -> list[Step]:
    grid = Grid(**axes, timeout=60)
    module = tiny_gpt(grid, loss_fn=Terms(grid) if weighted else means)
    engine = pipeline_engine(module, triax.Batch(size=SAMPLES, microbatch=1), stage, schedule=schedule)
    return train(engine, microbatches(grid, batches()), STEPS, microbatches(grid, batches()))


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


@pytest.mark.parametrize(("axes", "schedule", "stage"), some(CASES, (2, 3, 4, 5, 7)))
def test_named_terms_equal_those_of_one_process(ranks: Any, axes: dict[str, int], schedule: str, stage: int) -> None:
    wanted = plain(True)
    parts = SAMPLES * axes.get("context", 1)  # in each of them the metric's weight is 1
    for steps in ranks(math.prod(axes.values()), trained, axes, schedule, stage, True):
        for step in steps:
            assert list(step.metrics) == ["next", "even", "rare", "labels", "pairs", "size"]
            assert step.metrics.pop("labels") == pytest.approx(SAMPLES * LENGTH / parts)
            assert step.metrics.pop("pairs")[1] == 2 * SAMPLES * LENGTH / parts
            del step.metrics["size"]
        assert_steps_equal(steps, wanted)


@pytest.mark.parametrize(("axes", "stage"), [({"pipe": 2}, 0), ({"data": 2}, 3)])
def test_means_in_a_dict_train_without_weights(ranks: Any, axes: dict[str, int], stage: int) -> None:
    for steps in ranks(2, trained, axes, "1f1b", stage, False):
        assert_steps_equal(steps, plain(False))


class Uncertain(nn.Module):
    """Two terms with trained factors, as a module, whose parameters are the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.log_sigma = nn.Parameter(torch.tensor([0.1, -0.2], dtype=torch.float64))

    def forward(self, logits: Tensor, labels: Tensor) -> Loss:
        bare = means(logits, labels)
        terms = {n: m * torch.exp(-s) + s for (n, m), s in zip(bare.items(), self.log_sigma, strict=True)}
        return Loss(terms, metrics={f"bare {name}": mean for name, mean in bare.items()})


def with_a_module(pipe: int, stage: Any) -> tuple[list[float], dict[str, Tensor]]:
    grid = Grid(pipe=pipe, timeout=60)
    engine = pipeline_engine(tiny_gpt(grid, loss_fn=Uncertain()), triax.Batch(size=SAMPLES, microbatch=2), stage)
    data = microbatches(grid, batches(), 2)
    found = []
    for _ in range(STEPS):
        loss = engine.train_batch(data).item()
        assert loss == pytest.approx(engine.metrics["square"] + engine.metrics["next"], rel=1e-12)  # type: ignore[operator]
        found += [loss, engine.metrics["bare next"]]
    return found, engine.gather()  # type: ignore[return-value]


@pytest.mark.parametrize(("pipe", "stage"), [(2, 0), (1, 3)])
def test_a_loss_module_with_parameters_trains_on_each_grid(ranks: Any, pipe: int, stage: int) -> None:
    wanted, weights = with_a_module(1, 0)
    for found, own in ranks(2, with_a_module, pipe, stage):
        assert found == pytest.approx(wanted, rel=1e-10)
        torch.testing.assert_close(own, weights, rtol=1e-10, atol=1e-13)
    assert weights["loss_fn.log_sigma"].tolist() != [0.1, -0.2]


def module_steps(stage: Any, pairs: bool) -> Any:
    """Train a plain module by a dict of terms, and return losses, metrics and gradients."""
    grid = Grid(timeout=60)
    batch = triax.Batch(size=4 * grid.data.size, microbatch=2)
    engine: Any = triax.Engine(net(), optimizer=SGD, batch=batch, grid=grid, zero=triax.Zero(stage=stage))
    x = torch.randn(2, 2, 2, 2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    share = 2 // grid.data.size
    found = []
    for step in x:
        for microbatch in step.view(grid.data.size, 2 * share, 2, 6)[grid.data.rank]:
            y = engine(microbatch)
            square = (y.square().sum(), y.numel()) if pairs else y.square().mean()
            terms = {"square": square, "sum": y.sum()}
            engine.backward(Loss(terms, {"sum": 0.25}, {"largest": (y.detach().max(), 1)}))
            engine.step()
        found.append((engine.metrics, engine.gather("gradients")))
    return found


def plain_module_steps() -> list[tuple[dict[str, float], dict[str, Tensor]]]:
    def loss(y: Tensor, _: None) -> tuple[Tensor, dict[str, Tensor]]:
        square, added = y.square().mean(), y.sum()
        return square + 0.25 * added, {"square": square, "sum": added, "largest": y.max()}

    x = torch.randn(2, 2, 2, 2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    steps = train_plain(net(), SGD, [[(part, None) for part in step.flatten(0, 1)] for step in x], loss)
    return [(step.metrics, step.gradients) for step in steps]


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_plain_module_with_named_terms_trains_as_torch(ranks: Any, stage: int, pairs: bool) -> None:
    for found in ranks(2, module_steps, stage, pairs):
        for (metrics, gradients), (values, own) in zip(found, plain_module_steps(), strict=True):
            assert metrics == pytest.approx(values, rel=1e-10) and list(metrics) == list(values)
            torch.testing.assert_close(gradients, own, rtol=1e-10, atol=1e-13)


RARE = torch.tensor([[0, 0], [1, 0], [1, 1]])  # the tokens of each microbatch that have the term


def rare_inputs() -> Tensor:
    return torch.randn(3, 2, 2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def steps_of_a_rare_term() -> list[Any]:
    """Train a plain module on parts of sequences by a term of weight 0 in the whole, or in a part, of a microbatch."""
    grid = Grid(context=2, timeout=60)
    batch = triax.Batch(microbatch=2, microbatches=3)
    engine: Any = triax.Engine(net(), optimizer=triax.Optimizer("SGD", lr=0.1), batch=batch, grid=grid)
    token = slice(grid.context.rank, grid.context.rank + 1)
    for x, keep in zip(rare_inputs()[:, :, token], RARE[:, token], strict=True):
        y = engine(x)
        with pytest.raises(RuntimeError, match="no label of this microbatch counts"):
            engine.backward({"main": (y.sum(), 0), "rare": (y.sum(), 0)})
        engine.backward({"main": (y.square().sum(), 4), "rare": ((y * keep[:, None]).sum(), 2 * keep.sum())})
        engine.step()
    return [engine.metrics, engine.gather("gradients")]


def test_a_plain_modules_term_may_be_absent_from_microbatches(ranks: Any) -> None:
    model = net()
    outputs = [model(x) for x in rare_inputs()]
    main = sum(y.square().sum() / 8 for y in outputs) / 3
    rare = sum((y * keep[:, None]).sum() / max(2 * keep.sum(), 1) for y, keep in zip(outputs, RARE, strict=True)) / 3
    (main + rare).backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    wanted = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained.items()}
    for metrics, gradients in ranks(2, steps_of_a_rare_term):
        assert metrics == pytest.approx({"main": main.item(), "rare": rare.item()}, rel=1e-10)
        torch.testing.assert_close(gradients, wanted, rtol=1e-10, atol=1e-13)


class Wrong:
    """A loss with a mistake."""

    def __init__(self, grid: Grid, mistake: str) -> None:
        self.grid, self.mistake, self.calls = grid, mistake, 0

    def __call__(self, logits: Tensor, labels: Tensor) -> Any:
        self.calls += 1
        mean, total, count = logits.square().mean(), logits.square().sum(), labels.numel()
        match self.mistake:
            case "empty":
                return {}
            case "vector":
                return {"a": mean, "b": logits}
            case "weight":
                return {"a": (total, logits.sum())}
            case "no weight":
                return {"a": (total, count), "b": mean}
            case "other weight" | "no labels":
                return {"a": (total, count * (self.mistake == "other weight")), "b": (total, 0)}
            case "microbatch":
                return {"a": mean} if self.calls == 1 else {"a": mean, "b": mean}
            case "replica":
                return {"a": mean} if self.grid.data.rank else {"b": mean}
            case "factor":
                return Loss({"a": mean}, {"c": 1.0})
            case "metric":
                return Loss({"a": mean}, metrics={"m": logits.detach()})
            case "graph":
                return {"a": mean.detach()}
        raise AssertionError(self.mistake)

    def weight(self, labels: Tensor) -> dict[str, float]:
        return {"other weight": {"a": 1.0, "b": 0.0}, "no labels": {"a": 0.0, "b": 0.0}}.get(self.mistake, {})


def mistaken(mistake: str) -> None:
    grid = Grid(pipe=1 if mistake == "replica" else 2, timeout=30)
    engine = pipeline_engine(tiny_gpt(grid, loss_fn=Wrong(grid, mistake)), triax.Batch(size=SAMPLES, microbatch=2))
    engine.train_batch(microbatches(grid, batches(), 2))


MISTAKES = {
    "empty": "has no terms: return a dict or triax.Loss of terms",
    "vector": r"for 'b' is a tensor of shape \(2, 8, 37\)",
    "weight": "for 'a' requires a gradient",
    "no weight": r"method weight\(labels\) that returns \{'a': weight\}",
    "other weight": "gave the weight 2 of 'a' .* have the weight 32",
    "no labels": r"all its terms \(a, b\) have the weight 0",
    "microbatch": r"returned the terms a \(a mean\), b \(a mean\), and before the terms a \(a mean\)",
    "replica": r"the terms b \(a mean\) on one replica, and the terms a \(a mean\) on another",
    "factor": "a factor for 'c', but its terms are a",
    "metric": r"metric 'm' that loss_fn returned is a tensor of shape \(2, 8, 37\)",
    "graph": "none of the terms a depends on a parameter",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_named_losses_are_refused_on_every_rank(ranks: Any, mistake: str) -> None:
    assert_every_rank_raises(ranks, 2, MISTAKES[mistake], mistaken, mistake)


def with_experts(named: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Train experts with an auxiliary loss by one pair, without a name or as a term of its own name."""
    grid = Grid(expert=2, timeout=60)
    pair = NextTokenLoss(grid, vocab_size=five_axes.VOCABULARY)
    loss_fn = One(pair) if named else pair
    module = triax.PipelineModule(five_axes.layers(Job(), Place()), grid=grid, loss_fn=loss_fn, dtype=torch.float64)
    engine = pipeline_engine(module, triax.Batch(size=SAMPLES, microbatch=2), 1)
    data = microbatches(grid, text_batches(five_axes.VOCABULARY, SAMPLES, LENGTH, STEPS), 2)
    losses = [engine.train_batch(data).item() for _ in range(STEPS)]
    assert engine.auxiliary_losses()
    return losses, engine.gather("gradients")


class One:
    """One pair as a term."""

    def __init__(self, loss: NextTokenLoss) -> None:
        self.loss = loss

    def __call__(self, logits: Tensor, labels: Tensor) -> dict[str, Any]:
        return {"next": self.loss(logits, labels)}

    def weight(self, labels: Tensor) -> dict[str, Tensor]:
        return {"next": self.loss.weight(labels)}


def test_auxiliary_losses_count_equally_with_named_losses(ranks: Any) -> None:
    for (losses, gradients), (own, wanted) in zip(
        ranks(2, with_experts, True), ranks(2, with_experts, False), strict=True
    ):
        assert losses == pytest.approx(own, rel=1e-10)
        torch.testing.assert_close(gradients, wanted, rtol=1e-10, atol=1e-13)


def test_monitors_write_terms_and_metrics(tmp_path: Path) -> None:
    grid = Grid()
    monitor = triax.Monitoring(json=str(tmp_path / "json"), tensorboard=str(tmp_path / "board"))
    module, batch = tiny_gpt(grid, loss_fn=Terms(grid)), triax.Batch(size=SAMPLES, microbatch=2)
    engine = pipeline_engine(module, batch, monitor=monitor)
    data = microbatches(grid, batches(), 2)
    wanted = []
    for _ in range(STEPS):
        engine.train_batch(data)
        wanted.append(engine.metrics)
    (file,) = (tmp_path / "json").rglob("metrics.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [{name: line[f"Train/Metrics/{name}"] for name in wanted[0]} for line in lines] == wanted
    (folder,) = {each.parent for each in (tmp_path / "board").rglob("events*")}
    reader = EventAccumulator(str(folder)).Reload()
    for name in ("next", "rare", "labels"):
        found = [event.value for event in reader.Scalars(f"Train/Metrics/{name}")]
        assert found == pytest.approx([values[name] for values in wanted], rel=1e-6)
    assert "Train/Metrics/pairs" not in reader.Tags()["scalars"]


def rare(logits: Tensor, labels: Tensor) -> Loss:
    """Return one term of the labels below 2, which is a constant without them, and, in evaluation, a metric."""
    counts = labels < 2
    sums = F.cross_entropy(logits[counts], labels[counts], reduction="sum") if counts.any() else torch.zeros(())
    metrics = {} if torch.is_grad_enabled() else {"labels": (counts.sum(), 1)}
    return Loss({"rare": (sums, counts.sum())}, metrics=metrics)


class Rare:
    """The same with its weight."""

    __call__ = staticmethod(rare)

    def weight(self, labels: Tensor) -> dict[str, Tensor]:
        return {"rare": (labels < 2).sum()}


def test_a_loss_term_may_be_absent_and_evaluation_adds_metrics() -> None:
    grid = Grid()
    (ids, labels), *_ = batches()
    empty = [not (each < 2).any() for each in labels]
    assert any(empty) and not all(empty)
    module = tiny_gpt(grid, loss_fn=Rare())
    wanted = F.cross_entropy(module.run_stage(0, ids)[labels < 2], labels[labels < 2])
    gradients = torch.autograd.grad(wanted, [*module.parameters()], allow_unused=True)
    own = {name: gradient for (name, _), gradient in zip(module.named_parameters(), gradients, strict=True)}
    engine = pipeline_engine(module, triax.Batch(size=SAMPLES, microbatch=1))
    assert engine.eval_batch(microbatches(grid, batches())).item() == pytest.approx(wanted.item(), rel=1e-10)
    assert engine.metrics["labels"] == (labels < 2).sum() / SAMPLES
    assert engine.train_batch(microbatches(grid, batches())).item() == pytest.approx(wanted.item(), rel=1e-10)
    assert list(engine.metrics) == ["rare"]
    torch.testing.assert_close(engine.gather("gradients"), own, rtol=1e-10, atol=1e-13)


def test_losses_of_a_plain_module_must_keep_their_names() -> None:
    engine: Any = triax.Engine(nn.Linear(2, 2), optimizer=SGD, batch=triax.Batch(size=2), grid=Grid())
    for names in (["a"], ["b"]):
        engine.backward(dict.fromkeys(names, engine(torch.ones(2, 2)).square().mean()))
        if names == ["a"]:
            engine.step()
    with pytest.raises(ValueError, match=r"terms b \(a mean\), but in the first batch it was the terms a \(a mean\)"):
        engine.step()


def test_microbatches_of_a_plain_step_have_one_form_unless_discarded() -> None:
    batch = triax.Batch(microbatch=2, microbatches=2)
    engine: Any = triax.Engine(nn.Linear(2, 2), optimizer=triax.Optimizer("SGD", lr=0.1), batch=batch)

    def backward(name: str) -> None:
        engine.backward({name: engine(torch.ones(2, 2)).square().mean()})

    backward("a")
    engine.step()
    with pytest.raises(RuntimeError, match=r"given the terms b .*, in the same step, the terms a"):
        backward("b")
    for discard in (engine.module.zero_grad, engine.optimizer.zero_grad, engine.zero_grad):
        discard()
        backward("b")
        discard()
        backward("a")
    engine.step()
    assert list(engine.metrics) == ["a"]
