"""Recomputation of the blocks of a plain module."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from triax import Grid, initialize

from support.module_jobs import loss_of, one
from support.module_training import CLIP, MICRO, OPTIMIZERS, WIDTH, config, microbatch
from support.sweeps import some


class Recomputed(nn.Module):
    """A block with dropout and a buffer that it changes; `how` says what it checkpoints by itself."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.record = how, SimpleNamespace(calls=0)  # an attribute itself counts one run
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm, self.dropout = nn.BatchNorm1d(4 * WIDTH), nn.Dropout(0.3)

    def inner(self, x: Tensor, *, scale: Tensor) -> Tensor:
        self.record.calls += 1
        return x + self.dropout(self.down(torch.tanh(self.norm(self.up(x))))) * scale

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        if self.how == "inside":
            return checkpoint(self.inner, x, scale=scale, use_reentrant=False) + x
        return self.inner(x, scale=scale) + x


class Tower(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.enter, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(0.7))
        self.blocks = nn.ModuleList(Recomputed(how) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            if self.how == "around":
                x = checkpoint(block, x, scale=self.scale, use_reentrant=False)
            else:
                x = block(x, scale=self.scale)
        return x


def tower(how: str) -> Tower:
    torch.manual_seed(0)
    return Tower(how).double()


def count_saved(call: Any) -> tuple[Tensor, int]:
    """Return what a call returns, and the number of elements that autograd saves in it."""
    count = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal count
        count += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return call(), count


Run = tuple[str, int, dict[str, Any]]  # what checkpoints by itself, stage, section
Climbed = tuple[list[dict[str, Tensor]], list[int], list[int], int]


def climb(runs: list[Run]) -> list[Climbed]:
    grid = Grid(timeout=60)
    return [climbed(grid, *run) for run in runs]


def climbed(grid: Grid, how: str, stage: int, section: dict[str, Any]) -> Climbed:
    """Gradients of each step, elements saved by each forward pass, calls of each block and of its norm."""
    model = tower(how)
    engine, *_ = initialize(model=model, config=config("SGD", 2, stage, activation_checkpointing=section), grid=grid)
    gradients, saved = [], []
    for step in range(2):
        for index in range(2):
            x, y = microbatch(step, index, grid.data.rank)
            torch.manual_seed(100 * step + 10 * index + grid.data.rank)
            out, count = count_saved(lambda x=x: engine(x))
            torch.rand(3)  # the masks of this pass do not depend on what is drawn later
            engine.backward((out - y).square().mean())
            engine.step()
            saved.append(count)
        gradients.append({name: g.clone() for name, g in engine.gather("gradients").items()})
    blocks: list[Any] = [*model.blocks]
    return gradients, saved, [block.record.calls for block in blocks], int(blocks[0].norm.num_batches_tracked)


def walked(replicas: int) -> list[dict[str, Tensor]]:
    """Reference run: one process without recomputation."""
    model = tower("")
    optimizer = torch.optim.SGD(model.parameters(), **OPTIMIZERS["SGD"][1])
    found = []
    for step in range(2):
        optimizer.zero_grad()
        for index in range(2):
            for replica in range(replicas):
                x, y = microbatch(step, index, replica)
                torch.manual_seed(100 * step + 10 * index + replica)
                ((model(x) - y).square().mean() / replicas / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    return found


ON: dict[str, Any] = {"enabled": True}
RECOMPUTED: list[Run] = [
    *(("", stage, ON) for stage in range(4)),
    ("", 3, {"partition_activations": True}),
    ("", 0, {"cpu_checkpointing": True}),
    ("", 2, {"granularity": "matmul"}),
    *((how, stage, ON) for how in ("inside", "around") for stage in (1, 3)),
]
OFF: list[Run] = [("", 0, {}), ("", 0, {"enabled": False, "interval": 1, "cpu_checkpointing": True})]


@pytest.mark.parametrize("size", some([1, 2], [1]))
def test_blocks_of_a_plain_module_are_recomputed(ranks: Any, size: int) -> None:
    """`enabled: true` recomputed nothing. It holds less, is exact, and runs no block a third time."""
    wanted = walked(size)
    for found in ranks(size, climb, RECOMPUTED + OFF, timeout=60):
        for run, (gradients, saved, calls, tracked) in zip(RECOMPUTED + OFF, found, strict=True):
            for step, expected in zip(gradients, wanted, strict=True):
                torch.testing.assert_close(step, expected, rtol=0, atol=1e-10, msg=str(run))
            if run in OFF:
                assert calls == [4] * 3 and min(saved) > 3 * MICRO * WIDTH * 12, (run, calls, saved)
                continue
            less = 3 * MICRO * WIDTH * (10 if run[2].get("granularity") else 2)
            assert calls == [2 * 4] * 3 and max(saved) <= less + 100, (run, calls, saved)
            assert tracked == (8 if run[0] else 4)  # torch.utils.checkpoint counts a microbatch twice


class InPlace(nn.Module):
    """A block that changes a tensor in place that its backward pass needs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.exp(x)
        y += 1.0
        return torch.tanh(self.linear(y))


def test_a_block_that_changes_a_saved_tensor_is_refused() -> None:
    """torch refuses it. Recomputed, it gave a gradient of the changed tensor without a word."""
    model = nn.Sequential(InPlace(), InPlace()).double()
    engine = one(config(activation_checkpointing=ON), model=model)
    with pytest.raises(
        RuntimeError, match=r"changes a tensor in place that its backward pass needs, of shape \(4, 6\)"
    ):
        engine.backward(loss_of(engine))


def test_a_copied_recomputing_module_uses_its_own_weights() -> None:
    engine = one(config(activation_checkpointing=ON))
    other = copy.deepcopy(engine.module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    x, _ = microbatch(0, 0, 0)
    assert not other(x).any() and engine(x).any()
