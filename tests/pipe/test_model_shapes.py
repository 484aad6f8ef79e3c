"""The models of the guides, each beside its plain PyTorch form: several heads, an encoder-decoder, a U-Net."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import triax
from triax import Grid

from support.paths import DOCS
from support.readme_blocks import programs
from support.training import pipeline_engine

SAMPLES = 16


def program(page: str, name: str) -> dict[str, Any]:
    """Return what a guide's program defines, without its run."""
    # The name of no module: `triax check heads.py:build` imports one on some ranks of the pool.
    found: dict[str, Any] = {"__name__": f"{name} of the guide"}
    exec(programs((DOCS / "guides" / page).read_text())[f"{name}.py"], found)
    return found


class Tasks(nn.Module):
    """tasks.py in plain PyTorch."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 32)
        self.mixes = nn.ModuleList(nn.GRU(32, 32, batch_first=True) for _ in range(depth))
        self.next, self.topic = nn.Linear(32, 64), nn.Linear(32, 4)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.words(ids)
        for mix in self.mixes:
            x = x + mix(x)[0]
        return self.next(x), self.topic(x.mean(1))

    def terms(self, ids: Tensor, labels: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        (logits, topics), (words, topic) = self(ids), labels
        word, kind = F.cross_entropy(logits.flatten(0, 1), words.flatten()), F.cross_entropy(topics, topic)
        hits = (logits.argmax(-1) == words).double().mean()
        return word + 0.5 * kind, {"next": word, "topic": kind, "accuracy": hits}


class Tagger(nn.Module):
    """heads.py in plain PyTorch."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 16)
        self.early = nn.ModuleList(nn.GRU(16, 16, batch_first=True) for _ in range(depth))
        self.tags = nn.Linear(16, 4)
        self.late = nn.ModuleList(nn.GRU(16, 16, batch_first=True) for _ in range(depth))
        self.next = nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.words(ids)
        for mix in self.early:
            x = x + mix(x)[0]
        tags = self.tags(x)
        for mix in self.late:
            x = x + mix(x)[0]
        return tags, self.next(x)

    def terms(self, ids: Tensor, labels: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        tags, words = self(ids)
        tag = F.cross_entropy(tags.flatten(0, 1), labels["tags"].flatten())
        word = F.cross_entropy(words.flatten(0, 1), labels["words"].flatten())
        return tag + word, {"tags": tag, "words": word}


class Translator(nn.Module):
    """translate.py in plain PyTorch: torch's stacks of encoder and decoder layers around one embedding."""

    def __init__(self, depth: int, sizes: dict[str, Any]) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(32, 32), nn.Embedding(12, 32)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**sizes), depth)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**sizes), depth)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        states, y = (self.words(ids) + self.positions(torch.arange(ids.shape[1])) for ids in (source, target))
        states = self.encoder(states, src_key_padding_mask=source == 0)
        later = torch.ones(y.shape[1], y.shape[1], dtype=torch.bool).triu(1)
        y = self.decoder(y, states, tgt_mask=later, memory_key_padding_mask=source == 0)
        return F.linear(y, self.words.weight) / math.sqrt(32)

    def terms(self, ids: tuple[Tensor, Tensor], labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        logits, counts = self(*ids), labels != 0
        loss = F.cross_entropy(logits[counts], labels[counts])
        return loss, {"words": loss, "accuracy": (logits.argmax(-1) == labels)[counts].double().mean()}


class Unet(nn.Module):
    """unet.py in plain PyTorch, step by step."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(1, 8), (8, 16), (16, 32), (32, 32), (64, 16), (32, 8), (16, 8)]
        self.mixes = nn.ModuleList(nn.Conv2d(inputs, outputs, 3, padding=1) for inputs, outputs in sizes)
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for width in (8, 16, 32, 16, 8, 8))
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        first = F.silu(self.norms[0](self.mixes[0](image)))
        second = F.silu(self.norms[1](self.mixes[1](F.avg_pool2d(first, 2))))
        third = F.silu(self.norms[2](self.mixes[2](F.avg_pool2d(second, 2))))
        x = F.avg_pool2d(third, 2)
        x = x + F.silu(self.mixes[3](x))
        for skip, mix, norm in zip((third, second, first), self.mixes[4:], self.norms[3:], strict=True):
            x = F.silu(norm(mix(torch.cat([F.interpolate(x, scale_factor=2), skip], dim=1))))
        return self.head(x)

    def terms(self, image: Tensor, clean: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return F.mse_loss(self(image), clean), {}


def in_plain_order(model: str, names: list[str]) -> list[str]:
    """Sort the pipeline's names as the plain model's: by layers, and U-Net's convolutions before its norms."""
    names = sorted(names, key=lambda name: int(name.split(".")[1]))  # stable: a layer's names stay in their order
    return sorted(names[:-2], key=lambda name: ".norm." in name) + names[-2:] if model == "unet" else names


MODELS: dict[str, tuple[str, Any, Any]] = {  # page, arguments of layers(), the plain model
    "tasks": ("losses.md", (6,), lambda program: Tasks(6)),
    "translate": ("model-shapes.md", (3,), lambda program: Translator(3, program["SIZES"])),
    "unet": ("model-shapes.md", (), lambda program: Unet()),
    "heads": ("model-shapes.md", (3,), lambda program: Tagger(3)),
}
LOSSES: dict[str, Any] = {  # of a program
    "tasks": lambda program: program["Tasks"](),
    "translate": lambda program: program["TranslationLoss"](),
    "unet": lambda program: F.mse_loss,
    "heads": lambda program: program["loss_fn"],
}


def microbatches(given: dict[str, Any], replica: int, replicas: int) -> Any:
    """Return an iterator over a replica's microbatches of a program."""
    if "microbatches" in given:
        return given["microbatches"](replica, replicas)
    return iter(given["batches"]()[0][replica::replicas])


def in_float64(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def trained(model: str, axes: dict[str, Any], schedule: str, stage: Any) -> Any:
    """Return the initial weights, the loss, the metrics and the gradients of one step on a grid."""
    page, arguments, _ = MODELS[model]
    given, grid = program(page, model), Grid(**axes, timeout=60)
    loss_fn = LOSSES[model](given)
    layers = given["layers"](*arguments)
    module = triax.PipelineModule(layers, grid=grid, loss_fn=loss_fn, partition="uniform", dtype=torch.float64)
    engine = pipeline_engine(module, triax.Batch(size=SAMPLES, microbatch=2), stage, schedule=schedule)
    weights = {name: weight.clone() for name, weight in engine.gather().items()}
    data = microbatches(given, grid.data.rank, grid.data.size)
    loss = engine.train_batch((in_float64(inputs), in_float64(labels)) for inputs, labels in data).item()
    return weights, loss, engine.metrics, engine.gather("gradients")


def plain(model: str, weights: dict[str, Tensor]) -> Any:
    """Return the loss, the metrics and the gradients of the whole batch by plain autograd, by the pipeline's names."""
    page, _, make = MODELS[model]
    given = program(page, model)
    module = make(given).double()
    names = in_plain_order(model, list(weights))
    own = list(module.parameters())
    assert [weights[name].shape for name in names] == [parameter.shape for parameter in own]
    with torch.no_grad():
        for name, parameter in zip(names, own, strict=True):
            parameter.copy_(weights[name])
    data = microbatches(given, 0, 1)
    parts = [next(data) for _ in range(SAMPLES // 2)]
    inputs, labels = (joined([part[i] for part in parts]) for i in range(2))
    loss, metrics = module.terms(inputs, labels)
    gradients = torch.autograd.grad(loss, own)
    return loss.item(), {n: m.item() for n, m in metrics.items()}, dict(zip(names, gradients, strict=True))


def joined(parts: list[Any]) -> Any:
    """Join microbatches to a batch."""
    if isinstance(parts[0], tuple):
        return tuple(joined([part[i] for part in parts]) for i in range(len(parts[0])))
    if isinstance(parts[0], dict):
        return {name: joined([part[name] for part in parts]) for name in parts[0]}
    return in_float64(torch.cat(parts))


CASES: list[tuple[dict[str, int], str, int]] = [
    ({"pipe": 2}, "1f1b", 0),
    ({"pipe": 2}, "interleaved", 1),
    ({"pipe": 2}, "zb-h1", 0),
    ({"pipe": 2, "tensor": 2}, "zb-v", 2),
    ({"pipe": 4, "data": 2}, "1f1b", 2),
    ({"pipe": 4, "data": 2}, "interleaved", 0),
    ({"pipe": 4, "data": 2}, "zb-h1", 2),
]


def few() -> list[Any]:
    """Every model on the first grid, and some in turn on the others; `make test-all` has all of them."""
    found = []
    for number, case in enumerate(CASES):
        for turn, model in enumerate(MODELS):
            kept = number == 0 or (number + turn) % 3 == 0 or (number == len(CASES) - 1 and model == "unet")
            found.append(pytest.param(*case, model, marks=() if kept else pytest.mark.exhaustive))
    return found


@pytest.mark.parametrize(("axes", "schedule", "stage", "model"), few())
def test_models_of_the_guides_train_as_their_plain_forms(
    ranks: Any, axes: dict[str, int], schedule: str, stage: int, model: str
) -> None:
    results = ranks(math.prod(axes.values()), trained, model, axes, schedule, stage)
    wanted_loss, wanted_metrics, wanted = plain(model, results[0][0])
    for _, loss, metrics, gradients in results:
        assert loss == pytest.approx(wanted_loss, rel=1e-10)
        assert metrics == pytest.approx(wanted_metrics, rel=1e-10)
        torch.testing.assert_close(gradients, wanted, rtol=1e-10, atol=1e-12)
