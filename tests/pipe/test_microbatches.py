"""Steps after an ``AgreedError``: all ranks read on from the same sample, and know which parameters are trained."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import triax
from triax import Grid, LayerSpec, PipelineEngine, PipelineModule
from triax.base.errors import AgreedError
from triax.data.dataloader import BatchOrder

from support.toys import error_text, mean_loss, random_pair, same

WIDTH, MICRO, COUNT = 4, 2, 2


class Masked(nn.Module):
    """A linear layer that takes a field."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * mask
        return y


def sample(index: int) -> tuple[Tensor, Tensor]:
    return random_pair(index, WIDTH)


def microbatch(number: int) -> tuple[Tensor, Tensor]:
    x, y = zip(*(sample(number * MICRO + row) for row in range(MICRO)), strict=True)
    return torch.stack(x), torch.stack(y)


def made(grid: Grid, masked: bool = False, data: Any = None) -> PipelineEngine:
    linear = LayerSpec(nn.Linear, WIDTH, WIDTH, dtype=torch.float64)
    layers = [linear, LayerSpec(Masked, takes="mask") if masked else linear]
    module = PipelineModule(layers, loss_fn=mean_loss, grid=grid, partition="uniform")
    if data == "frozen":
        module.requires_grad_(grid.pipe.rank == 0)
    engine = triax.Engine(
        module,
        optimizer=partial(torch.optim.SGD, lr=0.0),
        batch=triax.Batch(microbatch=MICRO, microbatches=COUNT),
        training_data=data if isinstance(data, Dataset) else None,
    )
    assert isinstance(engine, PipelineEngine)
    return engine


def require_gradients(engine: PipelineEngine, batch: list[tuple[Tensor, Tensor]], trained: slice = slice(4)) -> None:
    """Compare the last step's gradients with those of plain PyTorch."""
    first, first_bias, second, second_bias = weights = [w.requires_grad_() for w in engine.gather().values()]
    losses = [mean_loss((x @ first.T + first_bias) @ second.T + second_bias, y) for x, y in batch]
    wanted = torch.autograd.grad(sum(losses, torch.zeros(())) / len(losses), weights[trained])
    same([*engine.gather("gradients").values()][trained], [*wanted])


class Fails(Dataset[tuple[Tensor, Tensor]]):
    """Samples. The sixth one that is read fails once."""

    def __init__(self, fails: bool) -> None:
        self.left = 6 if fails else 0

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.left -= 1
        if self.left == 0:
            raise OSError("a disk stumbled")
        return sample(index)


class Items:
    """Iterator over microbatches; one that fails is read again."""

    def __init__(self, fails: bool) -> None:
        self.number, self.fails = -1, fails

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.number == 1 and self.fails:
            self.fails = False
            raise OSError("a disk stumbled")
        self.number += 1
        return microbatch(self.number)


def dicts() -> Iterator[dict[str, Tensor]]:
    for number in range(8):
        x, y = microbatch(number)
        yield {"input_ids": x, "labels": y, **({} if number == 2 else {"mask": torch.ones(())})}


def after_failure(kind: str) -> str:
    """Fail in the second step on one stage alone; return the error, after the check of the third step."""
    grid = Grid(pipe=2, timeout=30)
    last = grid.pipe.rank == 1
    data = Fails(last) if kind == "own" else "frozen" if kind == "untrainable" else None
    engine = made(grid, kind == "field", data)
    items: Any = {"own": None, "field": dicts()}.get(kind, Items(kind == "iterator" and last))
    engine.train_batch(items)
    if kind == "untrainable" and last:
        engine.module.requires_grad_()
    step = partial(engine.eval_batch if kind == "evaluation" else engine.train_batch, items)
    if kind == "evaluation":
        items.fails = last
    text = error_text(step, AgreedError)
    if kind == "untrainable" and last:
        engine.module.requires_grad_(False)
    again = ""
    if kind in ("iterator", "evaluation"):
        again = error_text(partial(engine.train_batch, items), AgreedError)
        items = Items(False)
    engine.train_batch(items)
    if kind == "own":
        batches = [*BatchOrder(16, MICRO * COUNT, MICRO, 0, 1, engine.options.seed)][COUNT : 2 * COUNT]
        read = [tuple(map(torch.stack, zip(*map(sample, rows), strict=True))) for rows in batches]
        assert engine.training_dataloader is not None
        assert engine.training_dataloader.state_dict()["sample"] == 2 * COUNT * MICRO
    else:
        start = 0 if again else 4
        read = [microbatch(start), microbatch(start + 1)]
    require_gradients(engine, read, slice(2) if kind == "untrainable" else slice(4))  # type: ignore[arg-type]
    return text + again


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("untrainable", "layers.1.weight was frozen when the engine was made"),
        ("field", "it has no field 'mask'"),
        ("own", "OSError: a disk stumbled"),
        ("iterator", "OSError: a disk stumbled.*give every rank a new iterator"),
        ("evaluation", "OSError: a disk stumbled.*give every rank a new iterator"),
    ],
)
def test_after_a_failed_read_inputs_and_labels_match(ranks: Any, kind: str, words: str) -> None:
    """The rank that failed has read fewer microbatches than the others; labels must be of the same samples again."""
    first, second = ranks(2, after_failure, kind)
    assert first == second and re.search(words, first, re.DOTALL)


def freeze_then_shapes() -> str:
    grid = Grid(pipe=2, tensor=2, timeout=30)
    engine = made(grid)
    engine.train_batch(iter([microbatch(0), microbatch(1)]))
    if grid.pipe.rank == 0:
        engine.module.requires_grad_(False)
    uneven = [tuple(part[: 1 + grid.tensor.rank] for part in microbatch(2))] * COUNT
    text = error_text(partial(engine.train_batch, iter(uneven)), AgreedError)
    engine.train_batch(iter([microbatch(4), microbatch(5)]))
    require_gradients(engine, [microbatch(4), microbatch(5)], slice(2, 4))
    return text


def test_a_freeze_before_a_failed_step_acts_in_the_next_step(ranks: Any) -> None:
    """The first stage is frozen, and then a step fails; the next step trains the other stage only."""
    for text in ranks(4, freeze_then_shapes):
        assert "so they must take the same samples" in text
