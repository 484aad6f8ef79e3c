"""Values that a loss function returns: a mean, or a pair (sum, weight); all else is refused on every rank."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, PipelineModule

from support.toys import error_text, same
from support.training import small_config, train_plain

CONFIG: dict[str, Any] = small_config(micro=3, accumulation=4)


def engine_of(grid: Grid | None = None, loss: Any = None) -> triax.PipelineEngine:
    layers = [LayerSpec(nn.Linear, 6, 6) for _ in range(2)]
    module = PipelineModule(layers, grid=grid, loss_fn=loss, dtype=torch.float64, partition="uniform")
    return triax.initialize(model=module, config=CONFIG)[0]


def plain_engine() -> triax.ModuleEngine:
    config = {**CONFIG, "gradient_accumulation_steps": 1}
    return triax.initialize(model=nn.Linear(6, 6).double(), config=config, grid=Grid())[0]


def signed() -> Iterator[tuple[Tensor, Tensor]]:
    """Microbatches whose labels are positive and negative in turns."""
    x = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for sign in itertools.cycle([1.0, -1.0]):
        yield x, x.abs() * sign


def as_two(outputs: Tensor, labels: Tensor) -> Any:
    """Two losses, not a sum and its weight."""
    return (outputs - labels).square().mean(), outputs.abs().mean()


def odd_pairs(outputs: Tensor, labels: Tensor) -> Any:
    """A pair for every second microbatch, a mean for the others."""
    total = (outputs - labels).square()
    return (total.sum(), total.numel()) if labels[0, 0, 0] > 0 else total.mean()


def of_weight(weight: Any) -> Any:
    return lambda outputs, labels: (outputs.sum(), weight)


BAD_PAIRS = [
    (as_two, "two losses would be trained as their quotient: return one loss"),
    (lambda outputs, labels: [*as_two(outputs, labels)], "two losses would be trained as their quotient"),
    (lambda outputs, labels: (*as_two(outputs, labels), 1.0), "is a tuple of 3: return a mean"),
    (lambda outputs, labels: {1, 2}, "is a set: return a mean"),
    (lambda outputs, labels: (outputs.sum(dim=(0, 1)), 3), r"is a tensor of shape \(6,\): return a mean"),
    (of_weight(-2), "is -2, but it must be a count, finite and not negative"),
    (of_weight(torch.tensor(float("nan"))), "is nan, but it must be a count"),
    (of_weight(None), "the weight that loss_fn returned is a NoneType, not a number"),
    (odd_pairs, "a mean for one microbatch of the batch.*return the same form"),
]


def two_losses_refused(sizes: tuple[int, int, int]) -> str:
    return error_text(lambda: engine_of(Grid(*sizes, timeout=60), loss=as_two).train_batch(signed()), RuntimeError)


def refused_backward() -> None:
    x, y = next(signed())
    engine = plain_engine()
    for loss, words in (
        (as_two(engine(x), y), "two losses would be trained as their quotient: pass one loss"),
        ((*as_two(engine(x), y), 1.0), "is a tuple of 3: pass a mean"),
        ((engine(x).sum(), -1), "is -1, but it must be a count"),
        ((engine(x), 1), r"is a tensor of shape"),
    ):
        with pytest.raises(ValueError, match=words):
            engine.backward(loss)
    weight = engine.module.weight
    pair: Any = [engine(x).square().sum(), torch.tensor(x.numel())]  # a list
    engine.backward(pair)
    torch.testing.assert_close(weight.grad, torch.autograd.grad(engine.module(x).square().mean(), weight)[0])


def unlike_replicas() -> str:
    grid = Grid(data=2, timeout=60)
    mine = (pair for index, pair in enumerate(signed()) if index % 2 == grid.data.rank)
    engine = engine_of(grid, loss=odd_pairs)
    with pytest.raises(RuntimeError) as error:  # noqa: PT012 (the replica of the pairs may stop in the next step)
        for _ in range(2):
            engine.train_batch(mine)
    return str(error.value)


def test_loss_functions_that_return_two_losses_are_refused(ranks: Any) -> None:
    """The quotient of the two losses was trained, without an error."""
    for loss, words in BAD_PAIRS:
        with pytest.raises(RuntimeError, match=words):
            engine_of(loss=loss).train_batch(signed())
    refused_backward()
    for sizes in ((2, 1, 1), (1, 2, 1)):
        assert all("trained as their quotient" in message for message in ranks(2, two_losses_refused, sizes))
    for message in ranks(2, unlike_replicas):
        assert "return the same form for every microbatch" in message


# ------------------------------------------------------------------------------------------- losses with parameters


class Balanced(nn.Module):
    """Two losses with trained weights (Kendall et al. 2018), class centers in a linear layer, and a running mean."""

    seen: Tensor
    centers: nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.log_sigma = nn.Parameter(torch.tensor([0.3, -0.2]))
        self.centers = nn.Linear(6, 5)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        if self.training:
            self.seen += 1
        first, second = (outputs - labels).square().sum(), self.centers(outputs).tanh().sum()
        a, b = (-self.log_sigma).exp()
        return first * a + second * b + self.log_sigma.sum() * labels.numel(), labels.numel()


def balanced(seed: int = 3) -> Balanced:
    torch.manual_seed(seed)
    return Balanced().double()


def batches(steps: int = 3, micro: int = 4) -> list[list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(steps, micro, 2, 3, 6, generator=generator, dtype=torch.float64)
    return [[(pair[0], pair[1]) for pair in step] for step in x]


def config(stage: int, replicas: int = 1) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return small_config("AdamW", 0.05, micro=3, accumulation=4 // replicas, zero=zero, clip=0.5)


def with_loss(
    grid: Grid, stage: int, schedule: str, loss: Any, layers: list[Any] | None = None, **more: Any
) -> triax.PipelineEngine:
    layers = layers or [LayerSpec(nn.Linear, 6, 6) for _ in range(4)]
    module = PipelineModule(layers, grid=grid, loss_fn=loss, dtype=torch.float64)
    return triax.initialize(model=module, config=config(stage, grid.data.size) | more, schedule=schedule)[0]


def train_balanced(
    sizes: tuple[int, int, int], cases: list[tuple[int, str]], folder: Path
) -> list[tuple[list[float], dict[str, Tensor], dict[str, Tensor]]]:
    """Losses, gradients and weights after three steps, between which a checkpoint is loaded into a new engine."""
    grid, found = Grid(*sizes, timeout=60), []
    for stage, schedule in cases:
        # Each process builds its own loss: rank 0's is the model's.
        engine = with_loss(grid, stage, schedule, balanced(seed=3 + grid.rank))
        losses = [take(engine, step) for step in batches()[:2]]
        path = folder / f"{stage}-{schedule}"
        engine.save_checkpoint(path)
        engine = with_loss(grid, stage, schedule, balanced(seed=9))
        engine.load_checkpoint(path)
        losses.append(take(engine, batches()[2]))
        if grid.data.is_first and engine.module.is_last:
            assert engine.module.loss_fn.seen == 12 // grid.data.size
        found.append((losses, engine.gather("gradients"), engine.gather()))
    return found


def take(engine: triax.PipelineEngine, step: list[tuple[Tensor, Tensor]]) -> float:
    data = engine.grid.data
    return engine.train_batch(iter(step[data.rank :: data.size])).item()


def plain_balanced(
    loss_fn: nn.Module, layers: list[nn.Module], groups: list[dict[str, Any]] | None = None
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    model = nn.ModuleDict({"layers": nn.ModuleList(layers), "loss_fn": loss_fn})

    def loss(outputs: list[Tensor], labels: list[Tensor]) -> Tensor:
        pairs = [loss_fn(*pair) for pair in zip(outputs, labels, strict=True)]
        return sum(total for total, _ in pairs) / sum(weight for _, weight in pairs)

    whole = [[tuple(zip(*step, strict=True))] for step in batches()]
    adamw, stack = functools.partial(torch.optim.AdamW, lr=0.05), nn.Sequential(*layers)
    forward = functools.partial(map, stack)
    steps = train_plain(model, adamw, whole, loss, 0.5, groups, forward)
    return [step.loss for step in steps], steps[-1].gradients, steps[-1].weights


def initial_layers() -> list[nn.Module]:
    engine = with_loss(Grid(), 0, "1f1b", None, [LayerSpec(nn.Linear, 6, 6) for _ in range(4)])
    return [*copy.deepcopy(engine.module.layers).values()]


STAGES = [(stage, "1f1b") for stage in range(4)]
CASES = [
    ((1, 1, 1), [*STAGES, (3, "zb-h1")]),
    ((2, 1, 1), [(3, "1f1b"), (0, "zb-h1"), (2, "zb-v"), (1, "interleaved")]),
    ((1, 2, 1), [(0, "1f1b"), (2, "1f1b")]),
    ((2, 2, 1), [(1, "1f1b"), (3, "zb-h1")]),
]
MORE = [
    ((2, 1, 1), [(0, "1f1b"), (3, "zb-v")]),
    ((1, 2, 1), [(1, "1f1b"), (3, "1f1b")]),
    ((2, 2, 1), [(0, "zb-h1"), (2, "zb-v")]),
    ((2, 1, 2), [(1, "zb-h1")]),
]


@pytest.mark.parametrize(
    ("sizes", "cases"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in MORE)],
    ids=str,
)
def test_parameters_of_a_loss_are_trained(ranks: Any, tmp_path: Path, sizes: Any, cases: Any) -> None:
    """The parameters of a loss module were listed and never trained."""
    wanted = plain_balanced(balanced(), initial_layers())
    for rank in ranks(math.prod(sizes), train_balanced, sizes, cases, tmp_path):
        for found in rank:
            same(found, wanted)


def late_and_shared() -> list[Any]:
    """A loss that is assigned later, with the first layer's weight among its own, on two stages."""
    found = []
    for stage, schedule in ((0, "1f1b"), (3, "zb-h1")):
        layers = tied_layers()
        module = PipelineModule(layers, grid=Grid(pipe=2, timeout=60), dtype=torch.float64, partition="uniform")
        module.loss_fn = balanced()
        module.loss_fn.centers = layers[0]
        log_sigma = module.loss_fn.log_sigma
        rest = [parameter for parameter in module.parameters() if parameter is not log_sigma]
        given = [{"params": rest}, {"params": [log_sigma], "lr": 0.01}]
        engine = triax.initialize(
            model=module,
            config=config(stage),
            model_parameters=given,
            schedule=schedule,
        )[0]
        losses = [take(engine, step) for step in batches()]
        found.append((losses, engine.gather()))
        module.loss_fn = balanced()
        with pytest.raises(RuntimeError, match=r"loss_fn\.log_sigma was added after its engine"):
            take(engine, batches()[0])
    return found


def tied_layers() -> list[nn.Module]:
    torch.manual_seed(5)
    return [nn.Linear(6, 6).double() for _ in range(4)]


def test_a_loss_may_be_assigned_and_share_a_weight_with_a_layer(ranks: Any) -> None:
    layers, loss_fn = tied_layers(), balanced()
    loss_fn.centers = layers[0]
    listed = [*nn.ModuleList(layers).parameters()]
    groups: list[dict[str, Any]] = [{"params": listed}, {"params": [loss_fn.log_sigma], "lr": 0.01}]
    wanted, _, weights = plain_balanced(loss_fn, layers, groups)
    for rank in ranks(2, late_and_shared):
        for losses, found in rank:
            same(losses, wanted)
            same(found, weights)


def test_parameters_that_a_plain_function_hides_are_named(caplog: pytest.LogCaptureFixture) -> None:
    hidden = balanced()
    for loss in (hidden.forward, lambda outputs, labels: hidden(outputs, labels), functools.partial(hidden)):
        caplog.clear()
        with_loss(Grid(), 0, "1f1b", loss)
        assert "loss_fn uses parameters of a Balanced that this engine does not train" in caplog.text
