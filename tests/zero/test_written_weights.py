"""Weights that user code writes in place: the masters keep them, or they are refused by name."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import Grid
from triax.compat.deepspeed import fragments
from triax.zero import ShardedOptimizer

from support.toys import error_text
from support.training import small_config

WIDTH, ROWS, LIMIT = 5, 12, 0.05


class Words(nn.Module):
    """An embedding, perhaps with ``max_norm``, which writes the rows that a batch reads, and a linear layer."""

    def __init__(self, max_norm: float | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH, max_norm=max_norm)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.linear(self.embedding(ids))
        return y


def words(max_norm: float | None = None) -> Words:
    torch.manual_seed(0)
    return Words(max_norm).double()


def ids(step: int, replica: int) -> Tensor:
    return torch.randint(0, ROWS, (4,), generator=torch.Generator().manual_seed(10 * step + replica))


def clip(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-LIMIT, LIMIT)


def plainly(replicas: int, max_norm: float | None = None, steps: int = 4) -> dict[str, Tensor]:
    model = words(max_norm)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps):
        if max_norm is None:
            clip(model)
        optimizer.zero_grad()
        for replica in range(replicas):
            (model(ids(step, replica)).square().mean() / replicas).backward()
        optimizer.step()
    return dict(model.state_dict())


def stepped(
    stage: int, weight_dtype: torch.dtype | None, max_norm: float | None = None, resumes: bool = False
) -> dict[str, Tensor]:
    """Train in a plain loop that clips the weights before each step, as a critic's are, and may be saved in between."""
    grid, model = Grid(timeout=60), words(max_norm)
    options: Any = {"stage": stage, "bucket_size": 50, "weight_dtype": weight_dtype, "master_dtype": torch.float64}
    optimizer = ShardedOptimizer(torch.optim.Adam, model.parameters(), grid, lr=0.01, **options)
    for step in range(4):
        if max_norm is None:
            clip(model)
        if resumes:
            state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
            model = words()
            model.load_state_dict(weights)
            optimizer = ShardedOptimizer(torch.optim.Adam, model.parameters(), grid, lr=0.01, **options)
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        model(ids(step, grid.rank)).square().mean().backward()
        optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize("size", [1, 2])
def test_masters_keep_what_user_code_writes_to_weights(ranks: Any, size: int) -> None:
    wanted = plainly(size)
    for stage in range(3):
        for dtype, bound in ((None, 1e-10), (torch.float32, 1e-6)):
            for found in ranks(size, stepped, stage, dtype):
                torch.testing.assert_close(found, wanted, rtol=0, atol=bound, check_dtype=False)


def test_saved_state_has_the_weights_written_by_user_code(ranks: Any) -> None:
    for stage in range(3):
        for found in ranks(2, stepped, stage, torch.float32, max_norm=None, resumes=True):
            torch.testing.assert_close(found, plainly(2), **near(1e-6))


def test_clipping_weights_to_max_norm_acts_on_one_replica(ranks: Any) -> None:
    torch.testing.assert_close(ranks(1, stepped, 1, torch.float32, 0.5)[0], plainly(1, 0.5), **near(1e-6))


def near(bound: float) -> dict[str, Any]:
    return {"rtol": 0, "atol": bound, "check_dtype": False}


def engine_of(
    model: nn.Module, stage: int, grid: Grid, optimizer: type[torch.optim.SGD] = torch.optim.SGD, **more: Any
) -> triax.ModuleEngine:
    config = small_config(micro=4, zero={"stage": stage, "reduce_bucket_size": 50}, **more)
    config.pop("optimizer")
    return triax.initialize(model=model, optimizer=partial(optimizer, lr=0.0), config=config, grid=grid)[0]


def step(engine: triax.ModuleEngine, number: int) -> None:
    engine.backward(engine(ids(number, engine.grid.rank)).float().square().mean())
    engine.step()


def loaded_and_saved(stage: int, folder: Path) -> None:
    """Weights that are loaded into the module of an engine stay, and are those of the next checkpoint."""
    grid, other = Grid(timeout=60), words()
    engine = engine_of(copy.deepcopy(other), stage, grid, bf16={"enabled": True})
    clip(other)
    engine.module.load_state_dict(other.state_dict())
    step(engine, 0)
    torch.testing.assert_close(engine.module_state_dict(), dict(other.state_dict()), **near(1e-3))
    with torch.no_grad():
        engine.module.linear.bias.fill_(0.25)
    engine.save_checkpoint(folder)
    again = engine_of(words(), stage, grid, bf16={"enabled": True})
    again.load_checkpoint(folder)
    assert bool((again.module_state_dict()["linear.bias"] == 0.25).all())


class Modal(torch.optim.SGD):
    """An optimizer with modes whose weights are equal."""

    def train(self) -> None:
        pass

    def eval(self) -> None:
        pass


def through(call: str, engine: triax.ModuleEngine, folder: Path) -> None:
    """Make a call that is about other weights than those that were written, or that reads all of them."""
    embedding, bias = engine.module.embedding.weight, engine.module.linear.bias
    if call == "set":
        fragments.safe_set_full_fp32_param(embedding, torch.ones(ROWS, WIDTH))
    elif call == "set_local":
        local = fragments.safe_get_local_fp32_param(embedding)
        assert local is not None
        fragments.safe_set_local_fp32_param(embedding, torch.ones_like(local))
    elif call == "get":
        values = fragments.safe_get_full_fp32_param(bias)
        assert values is not None
        torch.testing.assert_close(values, torch.full((WIDTH,), 0.25), **near(0))
    elif call == "load":
        engine.load_checkpoint(folder, load_module_strict=False, load_module_only=True)
    elif call == "mode":
        assert engine.optimizer is not None
        engine.optimizer.eval()
        engine.optimizer.train()
    elif call == "common":
        with engine.common_weights():
            assert not bool((bias == 0.25).any())
    elif call == "save":
        engine.save_checkpoint(folder)
        model = words()
        triax.load_weights(model, folder)
        torch.testing.assert_close(model.linear.bias.detach(), torch.full((WIDTH,), 0.25), **near(1e-6))
    else:
        getattr(engine, call)()


CALLS: list[tuple[int, str | None, str]] = [
    *((stage, None, call) for stage in range(3) for call in ("set", "set_local", "get", "save", "load", "mode")),
    *((0, "local_sgd", call) for call in ("set", "get", "common", "save", "synchronize")),
    *((0, "async_diloco", call) for call in ("common", "synchronize", "leave")),
]


def written_before(folder: Path) -> None:
    """Between two steps in bf16, write a bias in place, then make each call: the masters have what was written."""
    for number, (stage, local, call) in enumerate(CALLS):
        case = f"{stage} {local} {call}"
        more = {} if local is None else {"local_updates": {"type": local, "every": 4}}
        if local == "async_diloco":
            more["local_updates"] |= {"outer_lr": 1.0, "outer_momentum": 0.0}
        grid = Grid(timeout=60)
        kind = Modal if call == "mode" else torch.optim.SGD
        engine = engine_of(words(), stage, grid, kind, bf16={"enabled": True}, **more)
        step(engine, 0)
        if call == "load":
            rows = nn.ModuleDict({"embedding": nn.Embedding(ROWS, WIDTH)}).double()
            engine_of(rows, stage, grid, bf16={"enabled": True}).save_checkpoint(folder / str(number))
        with torch.no_grad():
            engine.module.linear.bias.fill_(0.25)
        through(call, engine, folder / str(number))
        if call != "leave":
            step(engine, 1)
        bias = engine.module_state_dict()["linear.bias"]
        torch.testing.assert_close(bias, torch.full((WIDTH,), 0.25), **near(1e-6), msg=case)
        if call not in ("leave", "synchronize") and local == "async_diloco":
            engine.leave()


def test_values_written_to_weights_survive_every_engine_call(ranks: Any, tmp_path: Path) -> None:
    ranks(2, written_before, tmp_path)


def refused(stage: int, how: str) -> str:
    grid = Grid(timeout=60)
    model = words(0.5 if how == "max_norm" else None)
    more: dict[str, Any] = {} if how == "max_norm" else {"bf16": {"enabled": True}}
    engine = engine_of(model, stage, grid, **more)
    if how == "data":
        step(engine, 0)
        model.linear.weight.data.clamp_(-LIMIT, LIMIT)
    return error_text(lambda: step(engine, 1), RuntimeError)


def cases(folder: Path) -> None:
    for stage in range(3):
        loaded_and_saved(stage, folder / str(stage))


def test_weights_loaded_into_a_module_are_stepped_and_saved(ranks: Any, tmp_path: Path) -> None:
    ranks(2, cases, tmp_path)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_weights_written_differently_by_replicas_are_refused(ranks: Any, stage: int) -> None:
    for message in ranks(2, refused, stage, "max_norm"):
        assert "embedding.weight was written in place, and differently on different replicas" in message
    for message in ranks(2, refused, stage, "data"):
        assert "linear.weight was written through .data" in message
