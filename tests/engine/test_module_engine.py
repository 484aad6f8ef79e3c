"""`initialize` of a plain module: DeepSpeed's loop, against a plain float64 loop of torch's in one process."""

from __future__ import annotations

import copy
import gc
import os
import re
import runpy
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import triax
from triax import Grid, initialize
from triax.base.errors import ConfigError
from triax.randomness.random import Dropout

from module_training import CLIP, MICRO, OPTIMIZERS, STEPS, WIDTH, config, groups, microbatch, net
from paths import DOCS

Trace = list[tuple[dict[str, Tensor], dict[str, Tensor], float]]  # of each step: gradients, weights, norm


def plain(kind: str, replicas: int, accumulation: int) -> Trace:
    """Reference run: one process, torch's own optimizer, and the mean of all microbatches' losses."""
    model = net()
    cls, options = OPTIMIZERS[kind]
    optimizer = cls(groups(model), **options)
    trace = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for index in range(accumulation):
            for replica in range(replicas):
                x, y = microbatch(step, index, replica)
                ((model(x, times=0.9) - y).square().mean() / replicas / accumulation).backward()
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        norm = nn.utils.clip_grad_norm_(trained.values(), CLIP).item()
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in trained.items()}
        optimizer.step()
        trace.append((gradients, {n: p.detach().clone() for n, p in model.named_parameters()}, norm))
    return trace


def engined(settings: dict[str, Any], grid: Grid) -> Trace:
    model = net(seed=grid.rank)
    engine, *_ = initialize(model=model, model_parameters=groups(model), config=settings, grid=grid)
    trace = []
    for step in range(STEPS):
        for index in range(engine.gradient_accumulation_steps()):
            x, y = microbatch(step, index, engine.grid.data.rank)
            loss = (engine(x, times=0.9) - y).square().mean()
            engine.backward(loss)
            assert engine.is_gradient_accumulation_boundary() == (index + 1 == engine.gradient_accumulation_steps())
            engine.step()
        norm = engine.get_global_grad_norm()
        assert norm is not None
        gradients = {name: gradient.clone() for name, gradient in engine.gather("gradients").items()}
        with engine.whole_weights():
            weights = {name: p.detach().clone() for name, p in engine.named_parameters()}
        trace.append((gradients, weights, norm))
    assert engine.global_steps == STEPS and engine.micro_steps == STEPS * engine.gradient_accumulation_steps()
    assert engine.global_samples == STEPS * engine.train_batch_size()
    return trace


CASES = [(kind, stage, accumulation) for kind in OPTIMIZERS for stage in range(4) for accumulation in (1, 3)]


LAST = (("AdamW", 3, 3), ("AdamW", 3, 3))  # with everything on disk, and reduced once a step


def every_case(cases: list[tuple[str, int, int]], folder: str) -> list[Trace]:
    grid = Grid(timeout=60)
    traces = [engined(config(kind, accumulation, stage), grid) for kind, stage, accumulation in cases]
    disk = {"device": "nvme", "nvme_path": folder}
    offloaded = config("AdamW", 3, 3, zero={"offload_optimizer": disk, "offload_param": disk, "sub_group_size": 100})
    once = config("AdamW", 3, 2, zero={"reduce_each_microbatch": False}, prescale_gradients=True)
    return [*traces, engined(offloaded, grid), engined(once, grid)]


def same(trace: Trace, expected: Trace) -> None:
    for (gradients, weights, norm), (g, w, n) in zip(trace, expected, strict=True):
        assert norm == pytest.approx(n, rel=1e-10)
        assert gradients.keys() == g.keys() and weights.keys() == w.keys()
        for name in g:
            torch.testing.assert_close(gradients[name], g[name], rtol=0, atol=1e-10, msg=name)
        for name in w:
            torch.testing.assert_close(weights[name], w[name], rtol=0, atol=1e-10, msg=name)


def check(ranks: Any, size: int, cases: list[tuple[str, int, int]], folder: Path) -> None:
    expected = {(kind, a): plain(kind, size, a) for kind in OPTIMIZERS for a in (1, 3)}
    for traces in ranks(size, every_case, cases, str(folder), timeout=120):
        for trace, (kind, _, accumulation) in zip(traces, [*cases, *LAST], strict=True):
            same(trace, expected[kind, accumulation])


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_step_is_that_of_one_process(ranks: Any, size: int, tmp_path: Path) -> None:
    check(ranks, size, CASES if size == 2 else CASES[1:8:2] + CASES[8::2], tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [1, 3, 4])
def test_every_step_is_that_of_one_process(ranks: Any, size: int, tmp_path: Path) -> None:
    check(ranks, size, CASES, tmp_path)


# Recomputation.


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


@pytest.mark.parametrize("size", [1, 2])
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


def test_a_copy_of_a_recomputing_module_is_one_of_its_own() -> None:
    engine = one(config(activation_checkpointing=ON))
    other = copy.deepcopy(engine.module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    x, _ = microbatch(0, 0, 0)
    assert not other(x).any() and engine(x).any()


# Several passes, several engines.


def without_sync(stage: int) -> dict[str, Tensor]:
    engine, *_ = initialize(model=net(), config=config("SGD", 2, stage, zero={"reduce_each_microbatch": False}))
    for index in range(2):
        with engine.no_sync():
            for part in range(2):
                x, y = microbatch(part, index, engine.grid.data.rank)
                engine.backward((engine(x) - y).square().mean())
            with pytest.raises(RuntimeError, match="inside no_sync"):
                engine.step()
        if index == 0:  # in the other microbatch, all passes were silent
            x, y = microbatch(2, index, engine.grid.data.rank)
            engine.backward((engine(x) - y).square().mean())
        engine.step()
    return engine.gather("gradients")


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_no_sync(ranks: Any, stage: int) -> None:
    model = net()
    for replica in range(2):
        for index in range(2):
            for part in range(2 if index else 3):
                x, y = microbatch(part, index, replica)
                ((model(x) - y).square().mean() / 4).backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    for gradients in ranks(2, without_sync, stage):
        for name, p in model.named_parameters():
            if p.requires_grad:
                expected = torch.zeros_like(p) if p.grad is None else p.grad
                torch.testing.assert_close(gradients[name], expected, rtol=0, atol=1e-10)


def without_gradient(stage: int, zero: dict[str, Any]) -> dict[str, Tensor]:
    """Training in which, for each microbatch, one replica's loss does not depend on the module."""
    engine, *_ = initialize(model=net(), config=config("SGD", 2, stage, zero=zero), grid=Grid(timeout=30))
    rank = engine.grid.data.rank
    for index in range(2):
        x, y = microbatch(0, index, rank)
        loss = (engine(x) - y).square().mean()
        if (index, rank) in ((0, 1), (1, 0)):
            loss = torch.ones(1, requires_grad=True).sum()
        engine.backward(loss)
        engine.step()
    return engine.gather("gradients")


@pytest.mark.parametrize(
    ("stage", "zero"),
    [(0, {}), (2, {}), (3, {}), (3, {"reduce_each_microbatch": False}), (3, {"stage3_keep_gathered": True})],
)
def test_a_replica_without_a_gradient(ranks: Any, stage: int, zero: dict[str, Any]) -> None:
    model = net()
    for index, replica in ((0, 0), (1, 1)):
        x, y = microbatch(0, index, replica)
        ((model(x) - y).square().mean() / 4).backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    for gradients in ranks(2, without_gradient, stage, zero, timeout=40):
        for name, p in model.named_parameters():
            if p.requires_grad:
                expected = torch.zeros_like(p) if p.grad is None else p.grad
                torch.testing.assert_close(gradients[name], expected, rtol=0, atol=1e-10)


def without_gradient_after_two(stage: int) -> str:
    engine, *_ = initialize(model=net(), config=config("SGD", 1, stage), grid=Grid(timeout=30))
    x, y = microbatch(0, 0, engine.grid.data.rank)
    try:
        loss = (engine(x) + engine(x) - y).square().mean()
        engine.backward(loss if engine.grid.rank == 0 else torch.ones((), requires_grad=True))
        engine.step()
    except RuntimeError as error:
        return str(error)
    return "went on"


def test_a_replica_that_cannot_tell_what_the_others_gather_says_so(ranks: Any) -> None:
    for said in ranks(2, without_gradient_after_two, 3, timeout=20):
        assert "rank 1" in said and "exactly one forward pass ran before. Add 0.0 * output.sum() to the loss" in said
    assert ranks(2, without_gradient_after_two, 2, timeout=20) == ["went on"] * 2


def two_engines(stages: tuple[int, int], accumulation: int) -> list[dict[str, Tensor]]:
    grid = Grid(timeout=60)
    engines = [
        initialize(model=net(seed), config=config(kind, accumulation, stage), grid=grid)[0]
        for seed, (kind, stage) in enumerate(zip(OPTIMIZERS, stages, strict=True))
    ]
    for step in range(STEPS):
        for index in range(accumulation):
            x, y = microbatch(step, index, grid.data.rank)
            outputs = [engine(x) for engine in engines]
            loss = (outputs[0] * outputs[1] - y).square().mean()
            loss.backward()
            for engine in engines:
                engine.step()
        for engine in engines:
            assert engine.optimizer is not None
            engine.optimizer.zero_grad()
    return [engine.module_state_dict() for engine in engines]


@pytest.mark.parametrize("stages", [(0, 2), (3, 1)])
def test_one_loss_over_two_engines(ranks: Any, stages: tuple[int, int]) -> None:
    models = [net(seed) for seed in range(2)]
    optimizers = [
        cls(model.parameters(), **options) for model, (cls, options) in zip(models, OPTIMIZERS.values(), strict=True)
    ]
    for step in range(STEPS):
        for index in range(2):
            for replica in range(2):
                x, y = microbatch(step, index, replica)
                ((models[0](x) * models[1](x) - y).square().mean() / 4).backward()
        for model, optimizer in zip(models, optimizers, strict=True):
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    for states in ranks(2, two_engines, stages, 2):
        for state, model in zip(states, models, strict=True):
            assert state.keys() == model.state_dict().keys()
            for name, value in model.state_dict().items():
                torch.testing.assert_close(state[name], value, rtol=0, atol=1e-10)


def judge(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)).double()


def adversaries(torchs_backward: bool) -> list[list[dict[str, Tensor]]]:
    """A generator whose loss flows through a discriminator, in each stage, with and without ``zero_grad``."""
    grid, found = Grid(timeout=60), []
    for stage in range(4):
        settings = config(stage=stage)
        makers, judges = (initialize(model=judge(seed), config=settings, grid=grid)[0] for seed in range(2))

        def backward(engine: Any, loss: Tensor) -> None:
            loss.backward() if torchs_backward else engine.backward(loss)

        def forgetful(engine: Any, y: Tensor) -> None:
            backward(engine, engine(y).square().mean())
            engine.step()

        for step in range(STEPS):
            x, y = microbatch(step, 0, grid.data.rank)
            made = makers(x)
            if step == 1:  # forgotten once
                with pytest.raises(RuntimeError, match=r"gradients of Sequential.*Call zero_grad\(\) of this engine"):
                    forgetful(judges, y)
            judges.zero_grad()
            backward(judges, judges(y).square().mean())
            backward(judges, (judges(made.detach()) - 1.0).square().mean())
            judges.step()
            backward(makers, judges(made).square().mean())
            makers.step()
        found.append([makers.module_state_dict(), judges.module_state_dict()])
    return found


@pytest.mark.parametrize(("size", "torchs_backward"), [(1, True), (2, False), (2, True)])
def test_a_step_does_not_add_the_loss_of_another_engine(ranks: Any, size: int, torchs_backward: bool) -> None:
    makers, judges = judge(0), judge(1)
    cls, options = OPTIMIZERS["SGD"]
    optimizers = [cls(model.parameters(), **options) for model in (makers, judges)]
    for step in range(STEPS):
        batches = [microbatch(step, 0, replica) for replica in range(size)]
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        made = makers(x)
        judges.zero_grad()
        (judges(y).square().mean() + (judges(made.detach()) - 1.0).square().mean()).backward()
        nn.utils.clip_grad_norm_(judges.parameters(), CLIP)
        optimizers[1].step()
        makers.zero_grad()
        judges(made).square().mean().backward()
        nn.utils.clip_grad_norm_(makers.parameters(), CLIP)
        optimizers[0].step()
    for found in ranks(size, adversaries, torchs_backward):
        for states in found:
            wanted = [dict(makers.state_dict()), dict(judges.state_dict())]
            torch.testing.assert_close(states, wanted, rtol=0, atol=1e-10)


def sharded(stage: int) -> dict[str, Tensor]:
    """Replicas of tensor ranks: two of the linears sharded, the rest whole."""
    grid = Grid(data=2, tensor=2, timeout=60)
    model = net(seed=grid.rank)
    for parameter in [*model.parameters(), *model.buffers()]:  # parallelize has rank 0's along the tensor axis alone
        whole = parameter.detach().clone()
        grid.world.broadcast(whole)
        parameter.data.copy_(whole)
    triax.parallelize(model, grid, {"blocks.*.up": "column", "blocks.*.down": "row"})
    engine, *_ = initialize(model=model, config=config("AdamW", 3, stage), grid=grid)
    for step in range(STEPS):
        for index in range(3):
            x, y = microbatch(step, index, grid.data.rank)
            engine.backward((engine(x, times=0.9) - y).square().mean())
            engine.step()
    return engine.module_state_dict()


@pytest.mark.parametrize("stage", [1, 3])
def test_tensor_ranks(ranks: Any, stage: int) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        for index in range(3):
            for replica in range(2):
                x, y = microbatch(step, index, replica)
                ((model(x, times=0.9) - y).square().mean() / 6).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    for state in ranks(4, sharded, stage):
        assert state.keys() == model.state_dict().keys()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-10)


# Half precision.

HALF = {"enabled": True, "initial_scale_power": 6, "hysteresis": 1}


def overflow() -> tuple[list[Any], list[dict[str, Tensor]]]:
    engine, *_ = initialize(model=net().float(), config=config("SGD", 2, 2, fp16=HALF, nan_loss="ignore"))
    facts, states = [], [engine.module_state_dict()]
    for step in range(2):
        for index in range(2):
            x, y = microbatch(step, index, engine.grid.data.rank)
            if (step, index, engine.grid.data.rank) == (0, 0, 1):
                x = x + torch.inf
            output = engine(x)  # float64, cast
            assert output.dtype == torch.float16
            engine.backward((output - y.half()).square().mean())
            engine.step()
        facts.append((engine.loss_scale(), engine.skipped_steps, engine.global_steps, engine.get_lr()))
        states.append(engine.module_state_dict())
    return facts, states


def test_an_overflow_on_one_rank_skips_the_step_on_both(ranks: Any) -> None:
    for facts, states in ranks(2, overflow):
        assert [f[:3] for f in facts] == [(32.0, 1, 1), (32.0, 1, 2)]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
        assert not torch.equal(states[1]["enter.weight"], states[2]["enter.weight"])


class Named(dict[str, Any]):
    """Output with named fields, as models of Hugging Face return it."""


class Wrapped(nn.Module):
    def __init__(self, opaque: bool = False) -> None:
        super().__init__()
        self.inner, self.opaque = net().float(), opaque

    def forward(self, x: Tensor, ids: Tensor) -> Any:
        assert x.dtype == self.inner.norm.weight.dtype and ids.dtype == torch.int64
        y = self.inner(x)
        if self.opaque:
            return iter([y])
        return Named(first=y, second=(y * 2, None))


@pytest.mark.parametrize("way", ["backward", "scale", "plain", "together"])
def test_loss_scales_come_in_once(way: str) -> None:
    """However the backward pass is called, and whichever of two engines with unlike scales it is called by."""
    x, _ = microbatch(0, 0, 0)
    ids = torch.zeros(3, dtype=torch.int64)
    scales = [{**HALF, "initial_scale_power": power} for power in (4, 7)]
    engines = [initialize(model=Wrapped(), config=config(fp16=scale))[0] for scale in scales]
    losses = []
    for engine in engines:
        y = engine(x.float(), ids=ids)
        assert isinstance(y, Named) and y["first"].dtype == torch.float16
        losses.append((y["first"].float().square().mean() + y["second"][0].float().mean()) * 8)
    if way == "backward":
        for engine, loss in zip(engines, losses, strict=True):
            engine.backward(loss)
    elif way == "scale":
        torch.stack([engine.scale(loss) for engine, loss in zip(engines, losses, strict=True)]).sum().backward()
    elif way == "plain":
        (losses[0] + losses[1]).backward()
    else:
        engines[0].backward(losses[0] + losses[1])
    for engine in engines:
        engine.step()
    first, second = (engine.get_global_grad_norm() for engine in engines)
    model = net().float()
    y = model(x.float())
    ((y.square().mean() + (y * 2).mean()) * 8).backward()
    expected = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    assert first == pytest.approx(expected, rel=2e-3) and second == pytest.approx(expected, rel=2e-3)


def test_outputs_that_cannot_be_looked_into() -> None:
    ids = torch.zeros(3, dtype=torch.int64)
    engine, *_ = initialize(model=Wrapped(opaque=True), config=config(fp16=HALF))
    next(engine(torch.ones(MICRO, WIDTH), ids)).float().mean().backward()
    with pytest.raises(RuntimeError, match=re.escape("engine.scale(loss).backward()")):
        engine.step()
    engine.zero_grad()
    engine.backward(next(engine(torch.ones(MICRO, WIDTH), ids)).float().mean())
    engine.step()
    assert engine.global_steps == 1


@pytest.mark.parametrize("way", ["plain", "first", "second", "scale", "other scale"])
@pytest.mark.parametrize("powers", [(4, 7), (None, 7), (7, None)])
def test_loss_scales_of_engines_in_a_row(way: str, powers: tuple[int | None, int | None]) -> None:
    """A module of an engine uses this engine's loss scale; outside, that of the engine that began the pass."""
    scales = [None if power is None else {**HALF, "initial_scale_power": power} for power in powers]
    settings = [config() if scale is None else config(fp16=scale) for scale in scales]
    first, second = (initialize(model=net().float(), config=each)[0] for each in settings)
    x = microbatch(0, 0, 0)[0].float().requires_grad_()
    between = first(x)
    loss = second(between if powers[1] else between.float()).float().square().mean() * 4
    if way == "plain":
        loss.backward()
    elif way in ("first", "second"):
        {"first": first, "second": second}[way].backward(loss)
    else:
        {"scale": second, "other scale": first}[way].scale(loss).backward()
    first.step()
    second.step()
    models = [net().float(), net().float()]
    plain_x = x.detach().clone().requires_grad_()
    (models[1](models[0](plain_x)).square().mean() * 4).backward()
    for engine, model in zip((first, second), models, strict=True):
        expected = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        assert engine.get_global_grad_norm() == pytest.approx(expected, rel=5e-3)
    began = {"plain": None, "first": powers[0], "second": powers[1], "scale": powers[1], "other scale": powers[0]}[way]
    assert x.grad is not None and plain_x.grad is not None
    torch.testing.assert_close(x.grad / 2 ** (began or 0), plain_x.grad, rtol=2e-2, atol=2e-3)


def penalty(critic: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """A gradient penalty's loss, and the gradient."""
    y = critic(x).float()
    (gradient,) = torch.autograd.grad(y.mean() * MICRO, x, create_graph=True)
    return y.square().mean() + (gradient.norm(dim=1) - 1).square().mean(), gradient


@pytest.mark.parametrize("way", ["backward", "scale", "plain"])
def test_gradient_penalties_under_a_loss_scale(way: str) -> None:
    engine, *_ = initialize(model=net().float(), config=config(fp16=HALF))
    model = net().float()
    x = microbatch(0, 0, 0)[0].float().requires_grad_()
    (loss, gradient), (expected, whole) = penalty(engine, x), penalty(model, x)
    assert gradient.dtype == torch.float32
    torch.testing.assert_close(gradient, whole, rtol=2e-2, atol=2e-3)
    assert loss.item() == pytest.approx(expected.item(), rel=5e-3)
    if way == "backward":
        engine.backward(loss)
    else:
        (engine.scale(loss) if way == "scale" else loss).backward()
    engine.step()
    expected.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-2)


def test_small_gradients_leave_in_the_dtype_of_the_inputs() -> None:
    """Scaled inside, and true in float32: as float16, they would be nothing."""
    engine, *_ = initialize(model=net().float(), config=config(fp16={**HALF, "initial_scale_power": 16}))
    x = microbatch(0, 0, 0)[0].float().requires_grad_()
    factor = 2.0**-24  # the least of float16
    (small,) = torch.autograd.grad((engine(x).float() * factor).sum(), x)
    (expected,) = torch.autograd.grad((net().float()(x) * factor).sum(), x)
    torch.testing.assert_close(small / factor, expected / factor, rtol=2e-2, atol=5e-3)


def test_inputs_stay_the_objects_they_are() -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.given = net().float(), None

        def forward(self, x: Tensor, more: Any) -> Tensor:
            self.given = more
            y: Tensor = self.inner(torch.relu_(x))  # in place
            return y

    scaling, *_ = initialize(model=net().float(), config=config(fp16=HALF))
    engine, *_ = initialize(model=Kept(), config=config())
    more = Named(cache=[torch.ones(2)])
    x = microbatch(0, 0, 0)[0].float().requires_grad_()
    y = engine(x * 1.0, more)
    assert engine.module.given is more
    y /= 2  # in place, too
    y.mean().backward()
    assert x.grad is not None and scaling is not None


def in_eval_mode(stage: int, way: str, half: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Fine-tuning without dropout, with evaluations between, of which no backward pass follows."""
    more: dict[str, Any] = {"fp16": {**HALF, "initial_scale_power": 8}} if half else {}
    model = net().float() if half else net()
    engine, *_ = initialize(model=model, model_parameters=groups(model), config=config("SGD", 2, stage, **more))
    engine.eval()
    norms = []
    for step in range(STEPS):
        for index in range(2):
            x, y = microbatch(step, index, engine.grid.data.rank)
            loss = (engine(x, times=0.9).to(y.dtype) - y).square().mean()
            assert engine(x).requires_grad
            engine.backward(loss) if way == "backward" else loss.backward()
            assert engine(x).requires_grad
            engine.step()
        norm = engine.get_global_grad_norm()
        assert norm is not None
        norms.append(norm)
        gradients = {name: value.clone() for name, value in engine.gather("gradients").items()}
        assert engine(x).requires_grad
        for name, value in engine.gather("gradients").items():
            assert torch.equal(value, gradients[name])
    return norms, engine.gather()


@pytest.mark.parametrize("way", ["plain", "backward"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_training_in_eval_mode(ranks: Any, stage: int, way: str) -> None:
    expected = plain("SGD", 2, 2)
    for norms, weights in ranks(2, in_eval_mode, stage, way, False):
        assert norms == pytest.approx([norm for _, _, norm in expected], rel=1e-10)
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[-1][1][name], rtol=0, atol=1e-10)


@pytest.mark.parametrize("way", ["plain", "backward"])
def test_training_in_eval_mode_under_a_loss_scale(way: str) -> None:
    norms, _ = in_eval_mode(0, way, True)
    assert norms == pytest.approx([norm for _, _, norm in plain("SGD", 1, 2)], rel=2e-2)


def test_outputs_that_cannot_be_looked_into_in_eval_mode() -> None:
    ids, x = torch.zeros(3, dtype=torch.int64), torch.ones(MICRO, WIDTH)
    engine, *_ = initialize(model=Wrapped(opaque=True), config=config(fp16=HALF))
    engine.eval()
    for _ in range(2):
        engine.backward(next(engine(x, ids)).float().mean())
        engine.step()
    next(engine(x, ids)).float().mean().backward()
    with pytest.raises(RuntimeError, match=re.escape("engine.scale(loss).backward()")):
        engine.step()
    engine.zero_grad()
    engine(x, ids)  # an evaluation
    engine.train().module.opaque = False
    engine(x, ids)["first"].float().mean().backward()
    engine.step()
    assert engine.global_steps == 3


# The scripts of DeepSpeed's pages.

GETTING_STARTED = """
import argparse
import json
import sys
import weakref

import torch
import triax.compat.deepspeed as deepspeed

class SimpleModel(torch.nn.Module):
    def __init__(self, hidden_dim):
        super().__init__()
        self.linear = torch.nn.Linear(hidden_dim, hidden_dim)
        self.cross_entropy_loss = torch.nn.CrossEntropyLoss()

    def forward(self, x, y):
        return self.cross_entropy_loss(self.linear(x), y)

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser = deepspeed.add_config_arguments(parser)
cmd_args = parser.parse_args()
deepspeed.init_distributed()
rank = torch.distributed.get_rank()

torch.manual_seed(rank)
net = SimpleModel(16)
generator = torch.Generator().manual_seed(1)
x = torch.randn(64, 16, generator=generator)
dataset = torch.utils.data.TensorDataset(x, x.argmax(1))
model_engine, optimizer, trainloader, _ = deepspeed.initialize(
    args=cmd_args, model=net, model_parameters=net.parameters(), training_data=dataset
)
losses = []
for epoch in range(12):
    for step, (inputs, labels) in enumerate(trainloader):
        inputs = inputs.to(model_engine.device)
        if model_engine.fp16_enabled():
            inputs = inputs.half()
        loss = model_engine(inputs, labels.to(model_engine.device))
        model_engine.backward(loss)
        model_engine.step()
    losses.append(loss.item())
result = losses[0], losses[-1], model_engine.loss_scale(), model_engine.zero_optimization_stage()
"""
CONFIG = """{
  // as the tutorials have it
  "train_batch_size": 16,
  "gradient_accumulation_steps": 2, /* of each rank */
  "steps_per_print": 1000,
  "optimizer": {"type": "Adam", "params": {"lr": 0.05, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.05, "warmup_num_steps": 10}},
  "gradient_clipping": 1.0,
  "fp16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
  "zero_optimization": {
    "stage": 2,
    "contiguous_gradients": true,
    "overlap_comm": true,
    "reduce_scatter": true,
    "allgather_bucket_size": 5e8,
    "reduce_bucket_size": 5e8,
    "offload_optimizer": {"device": "cpu", "pin_memory": false}
  }
}"""


def run_script(path: str, settings: str) -> Any:
    sys.argv = [path, "--deepspeed", "--deepspeed_config", settings]
    return runpy.run_path(path, run_name="__main__")["result"]


@pytest.mark.parametrize("size", [1, 2])
def test_the_getting_started_loop_but_for_the_import(ranks: Any, size: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(GETTING_STARTED)
    (tmp_path / "ds_config.json").write_text(CONFIG)
    for first, last, scale, stage in ranks(
        size, run_script, str(tmp_path / "train.py"), str(tmp_path / "ds_config.json")
    ):
        assert last < 0.5 * first and scale >= 2**12 and stage == 2


# Data.


class Noted(nn.Module):
    """Remembers what it saw, and drops some of it."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.drop = nn.Linear(1, 1, dtype=torch.float64), Dropout(0.5)
        self.seen: list[list[float]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.flatten().tolist())
        return self.line(self.drop(x))


def samples() -> list[tuple[Tensor, Tensor]]:
    return [(torch.full((1,), float(i), dtype=torch.float64), torch.zeros(1, dtype=torch.float64)) for i in range(40)]


def from_data(start: int, stop: int, workers: int = 0) -> tuple[list[list[float]], Tensor]:
    """Steps start .. stop - 1; what was seen of each global batch, sorted, and the last step's gradient."""
    settings: dict[str, Any] = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "seed": 3}
    settings |= {"optimizer": {"type": "SGD", "params": {"lr": 0.0}}}
    torch.manual_seed(0)
    engine, _, loader, _ = initialize(model=Noted(), config=settings, training_data=samples())
    assert loader is not None and len(loader) == 5 * engine.gradient_accumulation_steps()
    if workers:
        loader = engine.deepspeed_io(samples(), num_local_io_workers=workers)  # type: ignore[arg-type]
    loader.seek(start)
    engine.global_steps = start

    def batches() -> Iterator[Any]:
        while True:
            yield from loader

    source = batches()
    while engine.global_steps < stop:
        x, y = next(source)
        engine.backward((engine(x) - y).square().mean())
        engine.step()
    everyone = engine.grid.data.all_gather_json(engine.module.seen)
    each = engine.gradient_accumulation_steps()
    starts = range(0, len(everyone[0]), each)
    found = [sorted(i for seen in everyone for part in seen[at : at + each] for i in part) for at in starts]
    return found, engine.gather("gradients")["line.weight"]


def test_training_data_has_one_order_and_resumes_on_another_grid(ranks: Any) -> None:
    whole, gradient = from_data(0, 8)
    assert len(whole) == 8 and sorted(i for part in whole[:5] for i in part) == [float(i) for i in range(40)]
    for seen, g in ranks(2, from_data, 0, 8):
        assert seen == whole
        torch.testing.assert_close(g, gradient, rtol=1e-12, atol=0)  # the same elements dropped
    for seen, _ in ranks(4, from_data, 3, 8):
        assert seen == whole[3:]
    assert from_data(6, 8, workers=2)[0] == whole[6:]


# Small things.


def one(settings: dict[str, Any] | None = None, **others: Any) -> Any:
    others.setdefault("model", net())
    return initialize(config=config() if settings is None else settings, **others)[0]


def loss_of(engine: Any, step: int = 0) -> Tensor:
    x, y = microbatch(step, 0, 0)
    loss: Tensor = (engine(x) - y).square().mean()
    return loss


def test_the_wrong_call_says_which_is_right() -> None:
    engine = one()
    with pytest.raises(RuntimeError, match=re.escape("step() without a backward pass: call engine.backward(loss)")):
        engine.step()
    loss_of(engine)
    with pytest.raises(RuntimeError, match="without a backward pass"):
        engine.step()
    for wrong, said in ((3.0, "a float"), (torch.ones(()), "without a graph"), (engine(microbatch(0, 0, 0)[0]), "6")):
        with pytest.raises(RuntimeError, match=f"backward takes a loss.*{said}"):
            engine.backward(wrong)
    engine.backward(loss_of(engine))
    loss = (engine.module(microbatch(0, 0, 0)[0]) - 1.0).square().mean()  # the engine does not see this pass begin
    with pytest.raises(RuntimeError, match=r"call the model as engine\(\.\.\.\).*add the losses and call backward"):
        loss.backward()
    engine.zero_grad()
    with pytest.raises(RuntimeError, match=re.escape("call engine.step(), not optimizer.step()")):
        engine.optimizer.step()
    with (
        pytest.raises(RuntimeError, match=r"no_sync.. does not work in ZeRO stage 2.*reduce_each_microbatch"),
        one(config(stage=2)).no_sync(),
    ):
        pytest.fail("not reached")
    with pytest.raises(AttributeError, match="neither ConfiguredModuleEngine nor its Net has 'wieghts'"):
        engine.wieghts  # noqa: B018
    untrained = one({"train_batch_size": 4})
    with pytest.raises(RuntimeError, match="there is no optimizer"):
        untrained.step()
    assert untrained(microbatch(0, 0, 0)[0]).shape == (MICRO, WIDTH)
    late = one()
    late.module.blocks[0].frozen.requires_grad_()
    late.backward(loss_of(late))
    with pytest.raises(RuntimeError, match="1 parameters were frozen when the optimizer was made"):
        late.step()
    with pytest.raises(ConfigError, match=r"pass grid=triax\.compat\.megatron\.mpu\.grid_of_mpu"):
        one(mpu=object())
    with pytest.raises(ConfigError, match=r"make grid = triax.Grid\(tensor=2\)"):
        one(config(tensor_parallel={"autotp_size": 2}))
    with pytest.raises(ConfigError, match="interval 2 groups the layers of a PipelineModule"):
        one(config(activation_checkpointing={"interval": 2}))
    with pytest.raises(ConfigError, match="no repeated blocks that can be recomputed"):
        one(config(activation_checkpointing={"enabled": True}), model=nn.Linear(WIDTH, WIDTH).double())
    with pytest.raises(ConfigError, match="no layer of the model is a Blok; there are Block"):
        one(config(activation_checkpointing={"enabled": True, "checkpointable_layers": ["Blok"]}))
    with pytest.raises(TypeError, match=r"not an nn\.Module"):
        one({}, model="a name")


def staged() -> str:
    with pytest.raises(ConfigError) as caught:
        initialize(model=net(), config=config(), grid=Grid(pipe=2))
    return str(caught.value)


def test_a_grid_with_stages(ranks: Any) -> None:
    assert all("list its layers in a PipelineModule" in said for said in ranks(2, staged))


def one_fails() -> str:
    engine = one(grid=Grid(timeout=30))
    if engine.grid.rank == 1:
        engine.module.blocks[1].forward = lambda x: x @ torch.ones(1, 1)
    try:
        for _ in range(2):
            engine.backward(loss_of(engine))
            engine.step()
    except RuntimeError as error:
        return str(error)
    return "went on"


def test_a_rank_that_fails_says_so_and_the_other_stops(ranks: Any) -> None:
    other, failed = ranks(2, one_fails, timeout=20)
    assert failed.startswith("rank 1 (pipe 0, data 1, tensor 0) failed at forward of microbatch 0: RuntimeError: ")
    assert failed in other


def test_accumulation_is_counted_as_one_likes() -> None:
    boundary, counted = one(config(accumulation=2)), one(config(accumulation=2))
    for step in range(2):
        boundary.set_gradient_accumulation_boundary(step == 1)
        boundary.backward(loss_of(boundary, step))
        counted.backward(loss_of(counted, step))
        counted.step()
    boundary.step()
    first, second = boundary.gather(), counted.gather()
    assert all(torch.equal(first[name], second[name]) for name in first)
    counted.set_train_batch_size(12)
    assert counted.get_batch_info() == (12, MICRO, 3)
    counted.backward(loss_of(counted))
    counted.step()
    with pytest.raises(ConfigError, match="after 1 microbatches of a step"):
        counted.set_train_batch_size(8)
    assert not counted.is_gradient_accumulation_boundary()
    assert counted.backward(loss_of(counted), scale_wrt_gas=False) > counted.backward(loss_of(counted))


def test_schedules_and_modes() -> None:
    plateau = {"type": "ReduceLROnPlateau", "params": {"patience": 0, "factor": 0.5, "threshold": 0.5}}
    engine = one(config(scheduler=plateau))
    for _ in range(2):
        engine.backward(loss_of(engine))
        engine.step()
    assert engine.get_lr() == [0.025]
    loss_of(engine).backward()
    with pytest.raises(RuntimeError, match="ReduceLROnPlateau needs the loss"):
        engine.step()
    given = torch.optim.SGD(groups(model := net()), lr=0.1, momentum=0.9)
    engine, optimizer, loader, scheduler = initialize(
        model=model,
        optimizer=given,
        config={"train_batch_size": MICRO},
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    )
    assert optimizer is engine.optimizer and scheduler is engine.lr_scheduler and loader is None
    engine.backward(loss_of(engine))
    engine.step()
    assert engine.get_lr() == [0.05, 0.0015] and engine.get_mom() == [0.9, 0.9]
    given = torch.optim.SGD(groups(other := net()), lr=0.1)
    over = torch.optim.lr_scheduler.StepLR(given, 1, 0.5)
    followed = one({"train_batch_size": MICRO}, model=other, optimizer=given, lr_scheduler=over)
    for rates in ([0.05, 0.0015], [0.025, 0.00075]):
        followed.backward(loss_of(followed))
        before = followed.module.enter.weight.detach().clone()
        rate = followed.get_lr()[0]
        followed.step()
        moved = followed.module.enter.weight - before + rate * 0.2 * before  # with the weight decay
        torch.testing.assert_close(moved, -rate * followed.gather("gradients")["enter.weight"])
        assert followed.get_lr() == rates and followed.lr_scheduler is over
    with pytest.raises(TypeError, match="neither a function nor a schedule of the optimizer that is passed with it"):
        one(lr_scheduler=over)
    assert engine.eval() is engine and not engine.module.training and engine.train().module.training
    assert engine.shift is engine.module.shift and [*engine.parameters()] == [*engine.module.parameters()]
    plainly = copy.deepcopy(net())
    plainly.load_state_dict(engine.module_state_dict())
    x, _ = microbatch(0, 0, 0)
    assert torch.equal(plainly(x), engine(x))


def test_more_microbatches_from_now_on() -> None:
    engine = one({"train_batch_size": MICRO, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
    engine.backward(loss_of(engine))
    engine.step()
    engine.set_train_batch_size(2 * MICRO)
    before = weights(engine)
    for index in range(2):
        assert all(torch.equal(a, b) for a, b in zip(before, weights(engine), strict=True))
        engine.backward(loss_of(engine, index))
        engine.step()
    assert engine.global_steps == 2 and not torch.equal(before[0], weights(engine)[0])


def weights(engine: Any) -> list[Tensor]:
    return [p.detach().clone() for p in engine.module.parameters()]


@pytest.mark.parametrize("how", ["cast", "assigned"])
def test_weights_that_went_elsewhere_are_told_of(how: str) -> None:
    """A step would move what the model does not have any more."""
    engine = one({"train_batch_size": MICRO, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
    if how == "cast":
        engine.module.to(torch.float32).to(torch.float64)
    else:
        engine.module.load_state_dict({k: v.clone() for k, v in engine.module.state_dict().items()}, assign=True)
    engine.backward(loss_of(engine))
    with pytest.raises(RuntimeError, match=r"\S+ is no longer where it is stepped: the model was moved, cast"):
        engine.step()


# docs/engine.md


def run_docs(source: str, folder: str) -> int:
    os.chdir(folder)
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, "docs/engine.md", "exec"), space)
    return int(space["actor"].global_steps)


@pytest.mark.parametrize("size", [1, 2])
def test_the_programs_of_the_docs_run(ranks: Any, size: int, tmp_path: Path) -> None:
    text = (DOCS / "engine.md").read_text()
    source = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    assert ranks(size, run_docs, source, str(tmp_path)) == [2] * size
    assert torch.load(tmp_path / "model.pt")["linear.weight"].shape == (16, 16)


def test_a_dropped_engine_is_freed_at_once() -> None:
    """Without a garbage collection: an engine's members refer to it weakly."""
    freed = []
    for _ in range(2):  # torch's imports in the first optimizer step of a process keep frames alive
        model = triax.PipelineModule([nn.Linear(2, 2)], grid=Grid(), loss_fn=nn.MSELoss())
        settings = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        pipelined, *_rest = initialize(model=model, config=settings)
        plain_one, *_rest = initialize(model=nn.Linear(2, 2), config=settings)
        pipelined.train_batch(iter([(torch.ones(2, 2), torch.ones(2, 2))]))
        plain_one.backward(plain_one(torch.ones(2, 2)).sum())
        plain_one.step()
        watched: list[weakref.ref[Any]] = [weakref.ref(pipelined), weakref.ref(plain_one)]
        gc.disable()
        del pipelined, plain_one
        freed = [each() is None for each in watched]
        gc.enable()
    assert freed == [True, True]


def local_ranks() -> tuple[int, str]:
    engine = one({"train_batch_size": MICRO * 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
    return engine.local_rank, os.environ["LOCAL_RANK"]


def test_local_rank_is_the_launchers(ranks: Any) -> None:
    """``local_rank`` was 0 on every rank without a GPU."""
    assert ranks(2, local_ranks) == [(0, "0"), (1, "1")]


def in_a_row(half: bool, how: str) -> list[dict[str, Tensor]]:
    """Return the gradients of two engines, one after the other; of the second's inputs, they are small for fp16."""
    engines = []
    torch.manual_seed(0)
    for power in (16, 12):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()
        if power == 12 and how == "only way":
            for weight in [parameter for parameter in model.parameters() if parameter.dim() == 2]:
                weight.data.mul_(2.0**-7)
        config = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}}
        fp16 = {"enabled": half, **({"initial_scale_power": power} if half else {})}
        engines.append(initialize(model=model, config={**config, "fp16": fp16})[0])
    first, second = engines
    y = first(torch.linspace(-1, 1, 4 * WIDTH, dtype=torch.float64).view(4, WIDTH))
    loss = second(y).double().square().mean() * 0.05
    (loss if how == "only way" else loss + y.double().mean() * 0.01).backward()
    for engine in engines:
        engine.step()
    return [{name: value.double() for name, value in engine.gather("gradients").items()} for engine in engines]


@pytest.mark.parametrize("how", ["only way", "two ways"])
def test_fp16_gradients_from_one_engine_to_the_next_stay_scaled(how: str) -> None:
    """Under ``loss.backward()`` they were unscaled in between, in fp16, and became 0."""
    for mine, theirs in zip(in_a_row(True, how), in_a_row(False, how), strict=True):
        for name, value in theirs.items():
            assert value.abs().max() > 0
            assert (mine[name] - value).norm() < 0.01 * value.norm(), name


class Waves(nn.Module):
    """Complex parameters between real ones; one is used in its conjugate alone."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.waves = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128))
        self.conjugated = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.fft.fft(self.enter(x)) @ self.waves * self.conjugated.conj()
        return y.real * y.imag.tanh()


def waves(kind: str, zero: dict[str, Any] | None) -> list[Any]:
    torch.manual_seed(3)
    model = Waves().double()
    found: list[Any] = []
    cls, options = OPTIMIZERS[kind]
    if zero is None:
        optimizer = cls(model.parameters(), **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            for replica in range(2):
                (model(microbatch(step, 0, replica)[0]).square().mean() / 2).backward()
            for p in model.parameters():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad.resolve_conj()  # else clipping fails
            norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP).item()
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            optimizer.step()
            found.append((norm, gradients, {name: p.detach().clone() for name, p in model.named_parameters()}))
        return found
    settings = config(kind, stage=zero.get("stage", 0), zero=zero)
    engine = initialize(model=model, config=settings, grid=Grid(data=2, timeout=60))[0]
    for step in range(STEPS):
        engine.backward(engine(microbatch(step, 0, engine.grid.data.rank)[0]).square().mean())
        engine.step()
        found.append((engine.get_global_grad_norm(), engine.gather("gradients"), engine.gather()))
    return found


@pytest.mark.parametrize("kind", ["Muon", "Adafactor"])
def test_optimizers_of_real_tensors_refuse_complex_ones(kind: str) -> None:
    """torch's error at the first step named no parameter."""
    settings = {"train_batch_size": MICRO, "optimizer": {"type": kind, "params": {"lr": 0.1}}}
    with pytest.raises(ConfigError, match=rf"optimizer {kind} steps real tensors, and .* is complex128: take AdamW"):
        initialize(model=Waves(), config=settings)


def all_waves() -> list[Any]:
    offloaded = {"stage": 2, "sub_group_size": 17, "offload_optimizer": {"device": "cpu"}}
    cases: list[tuple[str, dict[str, Any]]] = [("AdamW", {"stage": 2}), ("AdamW", offloaded)]
    cases += [("SGD", {"stage": stage}) for stage in (0, 1, 3)]
    return [(kind, waves(kind, zero)) for kind, zero in cases]


def test_complex_parameters_are_torchs(ranks: Any) -> None:
    """Their norm was of the real parts alone, so clipping was wrong too; the fused optimizers failed on them."""
    wanted = {kind: waves(kind, None) for kind in OPTIMIZERS}
    for found in ranks(2, all_waves):
        for kind, steps in found:
            torch.testing.assert_close(steps, wanted[kind], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"bf16": {"enabled": True}}, "waves is complex128, and fp16 or bf16 weights"),
        ({"communication_data_type": "fp16"}, "waves is complex128, and gradients sent in another dtype"),
    ],
)
def test_options_that_drop_the_imaginary_part_are_refused(more: dict[str, Any], words: str) -> None:
    settings = {"train_batch_size": MICRO, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **more}
    with pytest.raises(ValueError, match=words):
        initialize(model=Waves(), config=settings)
