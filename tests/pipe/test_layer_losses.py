"""Losses that layers at several stages return, on every grid, beside plain PyTorch with the whole batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, Loss, WithLoss

from support.rank_checks import assert_every_rank_raises
from support.sweeps import some
from support.training import SGD, Step, assert_steps_equal, pipeline_engine, train, train_plain

VOCABULARY, WIDTH, SAMPLES, LENGTH, STEPS = 11, 6, 4, 6, 2


def mean_square(x: Tensor) -> Tensor:
    return x.square().mean()


def total(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the losses of the labels that count."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


class Block(nn.Module):
    """A residual layer without a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + torch.tanh(self.linear(x))
        return y


class Exit(Block):
    """A layer with an early exit: a head of its own, whose loss is a pair, and a metric."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.head, self.number = nn.Linear(WIDTH, VOCABULARY), number

    def forward(self, x: Tensor, labels: Tensor) -> WithLoss:  # type: ignore[override]
        y, name = super().forward(x), f"exit {self.number}"
        logits, count = self.head(y), (labels != -100).sum()
        hits = (logits.argmax(-1) == labels).sum()
        loss = Loss({name: (total(logits, labels), count)}, {name: 0.3}, {f"accuracy {self.number}": (hits, count)})
        return WithLoss(y, loss)

    def loss_weight(self, labels: Tensor) -> dict[str, Tensor]:
        return {f"exit {self.number}": (labels != -100).sum()}


class Small(Block):
    """A layer with a mean as a loss of its own."""

    def forward(self, x: Tensor) -> WithLoss:  # type: ignore[override]
        y = super().forward(x)
        return WithLoss(y, {"size": mean_square(y)})


class Main:
    """The last loss, as a pair with a name."""

    def __call__(self, logits: Tensor, labels: Tensor) -> dict[str, Any]:
        return {"main": (total(logits, labels), (labels != -100).sum())}

    def weight(self, labels: Tensor) -> dict[str, Tensor]:
        return {"main": (labels != -100).sum()}


def listed(small: bool = True) -> list[Any]:
    return [
        LayerSpec(nn.Embedding, VOCABULARY, WIDTH),
        LayerSpec(Exit, 1, takes="labels"),
        LayerSpec(Block),
        LayerSpec(Small if small else Block),
        LayerSpec(Exit, 2, takes="labels"),
        LayerSpec(Block),
        LayerSpec(Exit, 3, takes="labels"),
        LayerSpec(nn.Linear, WIDTH, VOCABULARY),
    ]


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Yield one batch for each step. The number of labels varies, and one sample has none."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(STEPS):
        ids = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator)
        labels = torch.where(torch.rand(SAMPLES, LENGTH, generator=generator) < 0.6, ids.roll(-1, 1), -100)
        labels[1] = -100
        yield ids, labels


def microbatches(grid: Grid) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this replica's microbatches: of a sequence, the part of this context rank."""
    part = LENGTH // grid.context.size
    tokens = slice(grid.context.rank * part, (grid.context.rank + 1) * part)
    for ids, labels in batches():
        share = SAMPLES // grid.data.size
        for sample in range(grid.data.rank * share, (grid.data.rank + 1) * share):
            yield ids[sample : sample + 1, tokens], labels[sample : sample + 1, tokens]


@cache
def plain(small: bool = True) -> list[Step]:
    """Train layer by layer in one process over the whole batch of each step."""
    module = triax.PipelineModule(listed(small), grid=Grid(), dtype=torch.float64, seed=4)

    def losses(ids: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x, terms, metrics, count = ids, dict[str, Tensor](), dict[str, Tensor](), (labels != -100).sum()
        for layer in module.layers.values():
            x = Block.forward(layer, x) if isinstance(layer, Block) else layer(x)
            if isinstance(layer, Exit):
                logits = layer.head(x)
                terms[f"exit {layer.number}"] = total(logits, labels) / count
                metrics[f"accuracy {layer.number}"] = (logits.argmax(-1) == labels).sum() / count.double()
            elif isinstance(layer, Small):
                terms["size"] = mean_square(x)
        terms["main"] = total(x, labels) / count
        loss = torch.stack([(0.3 if name.startswith("exit") else 1.0) * term for name, term in terms.items()]).sum()
        return loss, terms | metrics

    whole = [[(ids, labels, labels)] for ids, labels in batches()]
    return train_plain(module, SGD, whole, lambda losses, labels: losses, forward=losses)


def trained(
    axes: dict[str, Any], schedule: str, stage: Any, interval: int, labels: Any, small: bool = True, **options: Any
) -> list[Step]:
    grid = Grid(**axes, timeout=60)
    dtype = torch.float32 if "precision" in options else torch.float64
    module = triax.PipelineModule(listed(small), grid=grid, loss_fn=Main(), dtype=dtype, seed=4, partition="uniform")
    batch, recompute = triax.Batch(size=SAMPLES, microbatch=1, labels=labels), {"interval": interval}
    engine = pipeline_engine(module, batch, stage, schedule=schedule, recompute=recompute, **options)
    evaluated = microbatches(grid) if dtype == torch.float64 and "compile" not in options else ()
    return train(engine, microbatches(grid), STEPS, evaluated)


CASES = [
    ({}, "1f1b", 0, 0, "read"),
    ({}, "1f1b", 3, 1, "read"),
    ({"pipe": 2}, "1f1b", 1, 2, "sent"),
    ({"pipe": 4}, "zb-h1", 0, 0, "read"),
    ({"pipe": 2}, "dualpipe-v", 2, 1, "sent"),
    ({"pipe": 4}, "gpipe", 3, 0, "sent"),
    ({"data": 2}, "1f1b", 3, 1, "read"),
    ({"pipe": 2, "data": 2}, "interleaved", 2, 0, "read"),
    ({"pipe": 2, "data": 2}, "zb-v", 3, 1, "sent"),
    ({"pipe": 2, "tensor": 2}, "1f1b", 1, 0, "sent"),
    ({"pipe": 2, "context": 2}, "zb-v", 3, 0, "sent"),
]


@pytest.mark.parametrize(("axes", "schedule", "stage", "interval", "labels"), some(CASES, (1, 2, 4, 6, 8, 10)))
def test_losses_of_layers_train_as_on_one_process(
    ranks: Any, axes: dict[str, int], schedule: str, stage: int, interval: int, labels: str
) -> None:
    small = "context" not in axes  # a mean of a part of a sequence is refused
    wanted = plain(small)
    for steps in ranks(math.prod(axes.values()), trained, axes, schedule, stage, interval, labels, small):
        assert_steps_equal(steps, wanted)


def test_compiled_layers_with_losses_train_as_on_one_process(ranks: Any) -> None:
    steps = ranks(2, trained, {"pipe": 2}, "zb-h1", 2, 1, "sent", compile={"backend": "aot_eager"}, timeout=200)
    assert_steps_equal(steps[0], plain())


def test_the_loss_scale_of_float16_reaches_losses_of_layers(ranks: Any) -> None:
    wanted, *_ = plain()
    precision = {"weights": "fp16", "loss_scale": 512.0}
    for steps in ranks(2, trained, {"pipe": 2}, "1f1b", 1, 0, "read", precision=precision):
        assert steps[0].metrics == pytest.approx(wanted.metrics, rel=5e-3, abs=0.05)
        for name, gradient in wanted.gradients.items():
            error = (steps[0].gradients[name].double() - gradient).norm() / gradient.norm()
            assert error < 0.02, name


class Cut(Block):
    """A layer that stops the gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


def detached(pipe: int) -> dict[str, Tensor]:
    """Train with a decay of weights, an exit in the second stage and a detach in the fourth; return the weights."""
    grid = Grid(pipe=pipe, timeout=60)
    layers = [LayerSpec(nn.Embedding, VOCABULARY, WIDTH), LayerSpec(Exit, 1, takes="labels"), LayerSpec(Block)]
    layers += [LayerSpec(Cut), LayerSpec(nn.Linear, WIDTH, VOCABULARY)]
    partition = [0, 1, 2, 3, 5] if pipe == 4 else "uniform"
    module = triax.PipelineModule(layers, grid=grid, loss_fn=Main(), dtype=torch.float64, seed=4, partition=partition)
    optimizer = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    engine = pipeline_engine(module, triax.Batch(size=SAMPLES, microbatch=1), optimizer=optimizer)
    data, before = microbatches(grid), engine.gather()["layers.2.linear.weight"].clone()
    for _ in range(STEPS):
        engine.train_batch(data)
    weights = engine.gather()
    assert torch.equal(weights["layers.2.linear.weight"], before)  # it has no gradient, and does not decay
    return weights


def test_a_stage_before_a_detach_is_trained_by_its_own_loss(ranks: Any) -> None:
    (wanted,) = ranks(1, detached, 1)
    for weights in ranks(4, detached, 4):
        torch.testing.assert_close(weights, wanted, rtol=1e-8, atol=1e-10)


FROZEN = {  # layers that are frozen after the first step
    "a loss of a frozen layer": {"layers.0.weight", "layers.1.linear.weight", "layers.1.linear.bias"},
    "the last loss": {"layers.0.weight", "layers.1.linear.weight", "layers.1.linear.bias", "layers.3.weight"},
}


def short_list(case: str) -> list[Any]:
    layer = LayerSpec(Small) if case == "a loss of a frozen layer" else LayerSpec(Exit, 1, takes="labels")
    words = LayerSpec(nn.Embedding, VOCABULARY, WIDTH)
    return [words, layer, torch.tanh, LayerSpec(nn.Linear, WIDTH, VOCABULARY, bias=False)]


def partly_frozen(case: str, pipe: int) -> dict[str, Tensor]:
    grid = Grid(pipe=pipe, timeout=60)
    module = triax.PipelineModule(
        short_list(case), grid=grid, loss_fn=Main(), dtype=torch.float64, seed=4, partition="uniform"
    )
    engine: Any = triax.Engine(module, optimizer=SGD, batch=triax.Batch(size=SAMPLES, microbatch=1))
    data = microbatches(grid)
    engine.train_batch(data)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in FROZEN[case])
    engine.train_batch(data)
    return engine.gather()


@pytest.mark.parametrize(("case", "pipe"), [*((case, 1) for case in FROZEN), ("a loss of a frozen layer", 2)])
def test_a_loss_without_a_gradient_beside_others_is_a_constant(ranks: Any, case: str, pipe: int) -> None:
    module = triax.PipelineModule(short_list(case), grid=Grid(), dtype=torch.float64, seed=4)
    weights = dict(module.named_parameters())
    words, layer, head = module.layers.values()
    for ids, labels in batches():
        value, loss = layer(words(ids), labels) if isinstance(layer, Exit) else layer(words(ids))
        (term,) = (loss.terms if isinstance(loss, Loss) else loss).values()
        term = 0.3 * term[0] / term[1] if isinstance(term, tuple) else term
        total_loss = term + total(head(torch.tanh(value)), labels) / (labels != -100).sum()
        trained_here = [p for p in weights.values() if p.requires_grad]
        with torch.no_grad():
            for parameter, gradient in zip(trained_here, torch.autograd.grad(total_loss, trained_here), strict=True):
                parameter.sub_(0.1 * gradient)
        for name in FROZEN[case]:
            weights[name].requires_grad_(False)
    for own in ranks(pipe, partly_frozen, case, pipe):
        torch.testing.assert_close(own, {n: p.detach() for n, p in weights.items()}, rtol=1e-10, atol=1e-12)


class Silent(Main):
    """The last loss with the factor 0."""

    def __call__(self, logits: Tensor, labels: Tensor) -> Loss:  # type: ignore[override]
        return Loss(super().__call__(logits, labels), {"main": 0.0})


def test_a_chunked_loss_of_factor_0_is_reported_beside_a_layers_loss() -> None:
    ids, labels = next(batches())
    module = triax.PipelineModule(
        short_list("a loss of a frozen layer"), loss_fn=triax.chunked(Silent(), tokens=2), dtype=torch.float64, seed=4
    )
    words, layer, head = module.layers.values()
    value, loss = layer(words(ids))
    terms = {
        "size": loss["size"].item(),
        "main": total(head(value.tanh()), labels).item() / int((labels != -100).sum()),
    }
    trained_here = {n: p for n, p in module.named_parameters() if n != "layers.3.weight"}
    gradients = torch.autograd.grad(loss["size"], [*trained_here.values()])
    engine: Any = triax.Engine(module, optimizer=SGD, batch=triax.Batch(size=SAMPLES, microbatch=SAMPLES))
    assert engine.train_batch(iter([(ids, labels)])).item() == pytest.approx(terms["size"], rel=1e-10)
    assert engine.metrics == pytest.approx(terms, rel=1e-10)
    found = engine.gather("gradients")
    torch.testing.assert_close([found[n] for n in trained_here], [*gradients], rtol=1e-10, atol=1e-12)


class Wrong(Block):
    """A layer with a mistake."""

    def __init__(self, mistake: str) -> None:
        super().__init__()
        self.mistake, self.calls = mistake, 0

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        self.calls += 1
        match self.mistake:
            case "no dict":
                return WithLoss(y, mean_square(y))
            case "no weight":
                return WithLoss(y, {"a": (y.square().sum(), y.numel())})
            case "graph":
                return WithLoss(y, {"a": mean_square(y.detach())})
            case "name of loss_fn":
                return WithLoss(y, {"main": mean_square(y)})
            case "later":
                return y if self.calls == 1 else WithLoss(y, {"a": mean_square(y)})
            case "other weight":
                return WithLoss(y, {"a": (y.square().sum(), y.numel())})
        return WithLoss(y, {"a": mean_square(y)})

    def loss_weight(self) -> dict[str, float]:
        return {"a": 1.0} if self.mistake == "other weight" else {}


def means(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def mistaken(mistake: str, pipe: int) -> None:
    grid = Grid(pipe=pipe, timeout=30)
    again = [LayerSpec(Wrong, mistake)] if mistake == "same name" else []
    layers = [LayerSpec(nn.Embedding, VOCABULARY, WIDTH), LayerSpec(Wrong, mistake), LayerSpec(Block), *again]
    loss_fn: Any = means if mistake == "unnamed" else Main()
    module = triax.PipelineModule(
        [*layers, LayerSpec(nn.Linear, WIDTH, VOCABULARY)],
        grid=grid,
        loss_fn=loss_fn,
        dtype=torch.float64,
        partition="uniform",
    )
    pipeline_engine(module, triax.Batch(size=SAMPLES, microbatch=1)).train_batch(microbatches(grid))


MISTAKES = {
    "no dict": r"layer 1 \(Wrong\) returned WithLoss\(value, loss\) with a Tensor as loss: return a dict",
    "no weight": r"method loss_weight\(...\) that returns \{'a': weight\}",
    "graph": "none of the terms a depends on a parameter",
    "name of loss_fn": "a layer and loss_fn, returned a term or metric of the name 'main': give each its own name",
    "same name": "two layers, .* returned a term or metric of the name 'a': give each its own name, such as 'a 1'",
    "later": r"returned the terms a \(a mean\).*, and before (a loss without names|the terms main)",
    "other weight": "gave the weight 4 of 'a' .* have the weight 144",
    "unnamed": r"layers of the model return terms .* let loss_fn return a dict of terms, as \{'main': loss\}",
}


@pytest.mark.parametrize("pipe", [1, 2])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_losses_of_layers_are_refused_on_every_rank(ranks: Any, mistake: str, pipe: int) -> None:
    assert_every_rank_raises(ranks, pipe, MISTAKES[mistake], mistaken, mistake, pipe)
