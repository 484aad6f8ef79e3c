"""Executor: messages and layers of all kinds; gradients equal those of plain autograd on one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, PipelineModule, TiedLayerSpec, make_schedule, simulate
from triax.base.deferred import Deferred
from triax.pipe.backward import SplitBackward, deferring

from support.toys import summed_loss
from support.training import (
    SGD,
    Step,
    assert_steps_equal,
    pipeline_engine,
    small_config,
    train,
    train_plain,
)

WIDTH, MICROBATCHES = 6, 4
Pair = tuple[Any, Tensor]


class Split(nn.Module):
    """A tensor -> a nest with an integer, a boolean and a float tensor that need no gradient among it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        mask = x > 0
        index = torch.arange(x.shape[0]) % 2
        return {"pair": (self.a(x), [self.b(x)]), "mask": mask, "index": index, "scale": x.detach() * 2, "name": "x"}


class Nested(nn.Module):
    """The nest -> the nest, each part of it used; one float tensor passes through untouched."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(2, WIDTH)

    def forward(self, x: Any) -> Any:
        first, (second,) = x["pair"]
        assert x["name"] == "x" and x["mask"].dtype == torch.bool and x["index"].dtype == torch.int64
        first = torch.where(x["mask"], self.c(first), first) + self.table(x["index"])[:, None]
        return {**x, "pair": (first, [second])}


class Join(nn.Module):
    """The nest -> a tensor."""

    def forward(self, x: Any) -> Tensor:
        first, (second,) = x["pair"]
        return torch.tanh(first * second + x["scale"])


class InPlace(nn.Module):
    """Changes what it is given: allowed in a model that is not cut."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2.0).add_(1.0)


class InPlaceBehindLinears(nn.Module):
    """Changes what linears return, in each way that models do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH, bias=bias) for bias in (True, True, False))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.a(x), inplace=True)
        y = self.b(h)
        y += x
        y[..., 0] = 0.5
        z: Tensor = self.c(y)
        return z.add_(x).tanh_()


class Frozen(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.requires_grad_(False)


class Unused(nn.Module):
    """Returns a second tensor that wants a gradient and never gets one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.a(x), self.b(x)


class Convolutions(nn.Module):
    """Each kind of convolution, with strides, groups and paddings, between linears and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, padding_idx=1)
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.one = nn.Conv1d(4, 8, 3, padding=1, groups=2)
        self.two = nn.Conv2d(1, 2, (3, 2), stride=(1, 2), bias=False)
        self.back = nn.ConvTranspose2d(2, 1, (3, 2), stride=(1, 2))
        self.same = nn.Conv1d(8, 4, 3, padding="same")
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Parameter(torch.linspace(0, 1, WIDTH * WIDTH).view(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) + self.table(x.detach().abs().long() % 5).sum(-2)
        y = self.one(y)
        y = self.back(self.two(y[:, None]))[:, 0]
        return self.norm(self.same(y)) @ self.mix + F.linear(x, self.mix)


class Pool(nn.Module):
    """Averages over the sequence, whose length changes from microbatch to microbatch."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True).expand_as(x) + x


class Scaled(nn.Linear):
    """A linear with a parameter of its own."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


def first(x: Any) -> Tensor:
    return x[0]


def linear() -> LayerSpec:
    return LayerSpec(nn.Linear, WIDTH, WIDTH)


def attend(layer: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight) + layer.bias.sum()


def three_classes() -> list[Any]:
    """A tie over three classes, of which two are on one rank that is not the first; one of them is listed twice."""
    return [
        TiedLayerSpec("t", nn.Embedding, WIDTH, WIDTH, forward_fn=lambda e, x: x @ e.weight),
        linear(),
        TiedLayerSpec("t", nn.Linear, WIDTH, WIDTH),
        TiedLayerSpec("t", Scaled, WIDTH, WIDTH),
        linear(),
        TiedLayerSpec("t", Scaled, WIDTH, WIDTH),
        linear(),
        linear(),
    ]


def factories() -> list[Any]:
    """A tie of functions that make the layers: each lambda is a class of its own, equal partials are one class."""
    return [
        TiedLayerSpec("t", lambda: nn.Linear(WIDTH, WIDTH)),
        linear(),
        TiedLayerSpec("t", lambda: nn.Linear(WIDTH, WIDTH)),
        TiedLayerSpec("t", lambda: nn.Linear(WIDTH, WIDTH), tied_weight_attr=("weight", "bias")),
        TiedLayerSpec("t", partial(nn.Linear, WIDTH), WIDTH),
        TiedLayerSpec("t", partial(nn.Linear, WIDTH), WIDTH, forward_fn=attend),
    ]


def shared_modules() -> list[Any]:
    """A module listed twice, and two modules that share a parameter."""
    twice, one, other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    other.weight = one.weight
    return [twice, one, torch.tanh, twice, LayerSpec(nn.LayerNorm, WIDTH), other]


MODELS: dict[str, Callable[[], list[Any]]] = {
    "plain": lambda: [linear(), torch.tanh, linear(), linear(), linear()],
    "nests": lambda: [LayerSpec(Split), LayerSpec(Nested), LayerSpec(Nested), LayerSpec(Join)],
    "in place": lambda: [linear(), LayerSpec(InPlace), LayerSpec(InPlace), linear()],
    "in place behind linears": lambda: [LayerSpec(InPlaceBehindLinears) for _ in range(4)],
    "stage without parameters": lambda: [linear(), torch.tanh, torch.sin, linear()],
    "frozen stages": lambda: [LayerSpec(Frozen), LayerSpec(Frozen), linear(), LayerSpec(Frozen)],
    "frozen in the middle": lambda: [linear(), LayerSpec(Frozen), LayerSpec(Frozen), linear()],
    "unused output": lambda: [linear(), LayerSpec(Unused), first, linear()],
    "convolutions": lambda: [linear(), LayerSpec(Convolutions), LayerSpec(Convolutions), linear()],
    "sequences": lambda: [linear(), LayerSpec(Pool), linear(), linear()],
    "tied whole": lambda: [
        TiedLayerSpec("t", nn.Linear, WIDTH, WIDTH),
        linear(),
        TiedLayerSpec("t", nn.Linear, WIDTH, WIDTH),
        TiedLayerSpec("t", nn.Linear, WIDTH, WIDTH, forward_fn=attend),
    ],
    "tied classes": lambda: [
        linear(),
        TiedLayerSpec("t", nn.Embedding, WIDTH, WIDTH, forward_fn=lambda e, x: x @ e.weight),
        linear(),
        TiedLayerSpec("t", nn.Linear, WIDTH, WIDTH),
    ],
    "tied three classes": three_classes,
    "tied factories": factories,
    "modules": shared_modules,
}


def data(ragged: bool) -> list[Pair]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for i in range(2 * MICROBATCHES):
        shape = (2 + i % 3, 3 + i % 2, WIDTH) if ragged else (3, 4, WIDTH)
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        made.append((x, torch.randn(shape, generator=generator, dtype=torch.float64)))
    return made


def module(name: str, grid: Grid, **kwargs: Any) -> PipelineModule:
    torch.manual_seed(5)
    options = {"partition": "uniform", "loss_fn": summed_loss, "dtype": torch.float64, **kwargs}
    return PipelineModule(MODELS[name](), grid=grid, **options)


def pipelined(name: str, pipe: int, schedule: str, ragged: bool, stage: int, **kwargs: Any) -> tuple[list[Step], int]:
    """Return the steps, and the most activations that this rank held."""
    batch = triax.Batch(microbatch=1, microbatches=MICROBATCHES)
    engine = pipeline_engine(module(name, Grid(pipe=pipe, timeout=60), **kwargs), batch, stage, schedule=schedule)
    return train(engine, iter(data(ragged)), 2), engine.executor.last_run.peak


def plain(name: str, ragged: bool) -> list[Step]:
    """Train the same model as a chain of calls, with autograd and SGD of torch."""
    model, pairs = module(name, Grid()), data(ragged)
    named = {p.layout.name: p.parameter for p in model.local_parameters()}

    def loss(outputs: list[Tensor], labels: list[Tensor]) -> Tensor:
        terms = [summed_loss(*pair) for pair in zip(outputs, labels, strict=True)]
        return torch.stack([total for total, _ in terms]).sum() / sum(weight for _, weight in terms)

    steps = [pairs[:MICROBATCHES], pairs[MICROBATCHES:]]
    batches = [[([x for x, _ in step], [y for _, y in step])] for step in steps]
    return train_plain(model, SGD, batches, loss, forward=lambda xs: [model(x.clone()) for x in xs], named=named)


def assert_same(results: list[Any], wanted: list[Step]) -> None:
    for steps, _ in results:
        assert_steps_equal(steps, wanted, atol=1e-13)


def each(schedules: list[str], always: str, some: dict[str, list[str]]) -> list[Any]:
    """Every model with every schedule: by default in one of them, and these models in others too."""
    return [
        pytest.param(
            name, schedule, marks=() if schedule == always or name in some.get(schedule, ()) else pytest.mark.exhaustive
        )
        for name in MODELS
        for schedule in schedules
    ]


# zb-h1 sends and waits in the order of 1f1b, and computes the gradients of weights apart.
FORWARD_FIRST = {"1f1b": ["nests", "unused output", "tied factories", "modules"], "gpipe": ["sequences"]}


@pytest.mark.parametrize(("name", "schedule"), each(["gpipe", "1f1b", "zb-h1"], "zb-h1", FORWARD_FIRST))
def test_each_kind_of_model_trains_as_plain_autograd(ranks: Any, name: str, schedule: str) -> None:
    ragged = name not in ("in place", "convolutions")
    assert_same(ranks(4, pipelined, name, 4, schedule, ragged, 0), plain(name, ragged))


ROUND = {"interleaved": ["nests", "tied whole", "tied three classes", "modules"], "dualpipe-v": ["nests", "tied whole"]}


@pytest.mark.parametrize(("name", "schedule"), each(["interleaved", "zb-v", "dualpipe-v"], "zb-v", ROUND))
def test_each_kind_of_model_in_chunks_trains_as_plain_autograd(ranks: Any, name: str, schedule: str) -> None:
    """Two stages a rank: in a V the first and the last stage, and a tie between them, are on one rank."""
    ragged = name not in ("in place", "convolutions")
    chunks = None if schedule == "zb-v" else 2  # None: they follow from the schedule, which cuts the model anew
    assert_same(ranks(2, pipelined, name, 2, schedule, ragged, 1, chunks=chunks), plain(name, ragged))


def test_a_tied_layer_moves_to_a_rank_that_holds_the_weight(ranks: Any) -> None:
    """The embedding's stage moves to the rank that keeps a layer tied to it: one weight there, not two."""
    name = "tied three classes"
    where: dict[str, Any] = {"pipe": 2, "schedule": "interleaved", "chunks": 2, "placement": [1, 0, 0, 1]}
    found = ranks(2, pipelined, name, ragged=True, stage=1, **where)
    assert_same(found, plain(name, True))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_outputs_of_split_linears_may_change_in_place(schedule: str) -> None:
    """A split linear's output may be changed as ``F.linear``'s may: 3-D inputs and a bias made it a function's view."""
    name = "in place behind linears"
    assert_same([pipelined(name, 1, schedule, True, 0)], plain(name, True))


def test_inputs_of_a_split_linear_may_change_after_its_call() -> None:
    """Also if the rows of the input cannot be viewed: the layer then keeps a copy, as ``F.linear`` does."""
    layer, deferred = nn.Linear(4, 4, dtype=torch.float64), Deferred()
    base = torch.arange(24.0, dtype=torch.float64).view(2, 4, 3).requires_grad_()

    def gradients(split: bool) -> list[Tensor]:
        parameters = (*layer.parameters(), base)
        for parameter in parameters:
            parameter.grad = None
        x = base.transpose(1, 2) * 1.0
        assert not x.is_contiguous()
        with SplitBackward(deferred) if split else nullcontext():
            y = layer(x)
        x.mul_(2.0)
        with deferring(deferred):
            (y.sum() + x.sum()).backward()
        deferred.run(lambda parameter: None, lambda parameter: None)
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    for found, wanted in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


def test_two_stages_with_replicas_train_as_plain_autograd(ranks: Any) -> None:
    """Every replica reads the same data here: the whole batch is twice the microbatches, its mean the same."""
    for name in ("nests", "tied whole", "modules", "frozen in the middle"):
        assert_same(ranks(4, pipelined, name, 2, "1f1b", True, 1), plain(name, True))


def test_held_activations_equal_those_of_the_simulator(ranks: Any) -> None:
    for schedule, chunks in (("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("zb-v", 2)):
        wanted = simulate(make_schedule(schedule, 2, MICROBATCHES, chunks)).peak_activations
        found = ranks(2, pipelined, "plain", 2, schedule, False, 0, chunks=chunks)
        assert [peak / chunks for _, peak in found] == list(wanted), schedule


class Changing(nn.Module):
    """Layer whose output shape does not follow from its input shape."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x[: 1 + self.calls % 2]


class Bad(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Any:
        if self.what == "raise" and x.shape[0] == 4:
            raise ArithmeticError("boom")
        return {1: x} if self.what == "keys" else {x} if self.what == "set" else x


def failing(kind: str) -> str:
    layer: Any = {"changing": LayerSpec(Changing)}.get(kind) or LayerSpec(Bad, kind)
    model = PipelineModule(
        [linear(), layer, linear(), linear()],
        grid=Grid(pipe=4, timeout=60),
        loss_fn=lambda outputs, labels: outputs.square().mean(),
        partition="uniform",
    )
    config = small_config(micro=1, accumulation=MICROBATCHES)
    engine, *_ = triax.initialize(model=model, config=config)
    with pytest.raises(RuntimeError) as error:
        engine.train_batch((x.float(), y.float()) for x, y in data(kind == "raise"))
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("raise", "rank 1 (pipe 1, data 0, tensor 0) failed at 1F2: ArithmeticError: boom"),
        ("changing", "changed from (float32[2, 4, 6]) to (float32[1, 4, 6]) while the inputs kept their shape"),
        ("keys", "a dict that is sent between stages has the keys [1]"),
        ("set", "a set cannot be sent between stages"),
    ],
)
def test_a_failing_rank_names_itself_and_stops_the_others(ranks: Any, kind: str, words: str) -> None:
    messages = ranks(4, failing, kind, timeout=30)
    assert words in messages[1]
    for rank in (0, 2, 3):
        assert f"rank {rank} (pipe {rank}" in messages[rank], messages[rank]
        assert "rank 1 (pipe 1, data 0, tensor 0) failed at" in messages[rank], messages[rank]


class TakesTwo(nn.Module):
    """A layer that takes two arguments, of which a pipeline gives it one."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * mask


class Inside(nn.Module):
    """A layer that takes its argument, and fails inside."""

    def forward(self, x: Any) -> Any:
        return x + "text"


def wrong_arity() -> list[str]:
    found = []
    x = torch.ones(2, WIDTH)
    pair: Any = lambda x: (x, [x > 0])  # noqa: E731
    cases: list[tuple[list[Any], Any]] = [
        ([nn.Linear(WIDTH, WIDTH), pair, TakesTwo()], summed_loss),
        ([nn.Linear(WIDTH, WIDTH), lambda: 3], summed_loss),
        ([nn.Linear(WIDTH, WIDTH), Inside()], summed_loss),
        ([nn.Linear(WIDTH, WIDTH)], lambda output: output.sum()),
    ]
    for layers, loss_fn in cases:
        model = PipelineModule(layers, grid=Grid(), loss_fn=loss_fn)
        config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        engine, *_ = triax.initialize(model=model, config=config)
        with pytest.raises((TypeError, RuntimeError)) as caught:
            engine.train_batch(iter([(x, x)]))
        found.append(str(caught.value))
    return found


def test_a_layer_with_wrong_arguments_is_named_with_its_inputs() -> None:
    two, none, inside, loss = wrong_arity()
    assert "layer 2 (TakesTwo) of stage 0 was called with one argument, a tuple of 2 (a float32 tensor of shape" in two
    assert "a list of 1 (a bool tensor of shape [2, 6])), but: missing a required argument: 'mask'" in two
    assert "write forward(self, x), and take x apart there" in two
    assert "layer 1 (" in none and "too many positional arguments" in none
    assert "was called with" not in inside and "unsupported operand" in inside
    assert "loss_fn was called with 2 arguments, a float32 tensor of shape [2, 6]" in loss
    assert "write loss_fn(outputs, labels)" in loss


def test_tied_layers_with_different_arguments_are_refused() -> None:
    layers = [TiedLayerSpec("t", nn.Linear, 4, 4), TiedLayerSpec("t", nn.Linear, 4, 4, bias=False)]
    with pytest.raises(ValueError, match="layers 0 and 1 have the key 't' and are one layer"):
        PipelineModule(layers)
