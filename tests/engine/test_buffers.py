"""Buffers that steps change (batch norm's statistics) are the first replica's on all replicas, as under DDP."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, PipelineModule, TiedLayerSpec
from triax.grid.layout import Layout, set_layout

from support.sweeps import some
from support.toys import error_text, mean_loss, same
from support.training import small_config

WIDTH, STEPS, MICRO = 6, 4, 4
State = dict[str, Tensor]


class Tracked(nn.Module):
    """A layer with buffers of all kinds: constant, counted, replaced, in no checkpoint, of another dtype."""

    count: Tensor
    mask: Tensor
    average: Tensor
    hidden: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.arange(4 * WIDTH) % 3 > 0)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("average", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("hidden", torch.zeros(2, WIDTH, dtype=torch.complex128), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x * self.mask[:WIDTH]) + self.average
        if self.training:
            self.count += len(x)
            self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
            self.hidden.real[0] += y.detach().mean(0)
        return y


def layers() -> list[nn.Module]:
    torch.manual_seed(2)
    made = [Tracked(), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=None)]
    return [layer.double() for layer in made]


def batch(step: int) -> Tensor:
    return torch.randn(MICRO, 2, 5, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def thaw(modules: list[nn.Module], step: int) -> None:
    """Let the last batch norm's statistics change in the last two steps only."""
    modules[-1].train(step >= STEPS - 2)


def replicated(replicas: int) -> State:
    """Plain PyTorch: a copy of the model for each replica, whose buffers are the first one's after each step."""
    models = [nn.Sequential(*layers()) for _ in range(replicas)]
    optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for index, (x, y) in enumerate(batch(step)):
            model = models[index % replicas]
            thaw([*model], step)
            grads = torch.autograd.grad(mean_loss(model(x), y) / MICRO, [*model.parameters()])
            for parameter, grad in zip(models[0].parameters(), grads, strict=True):
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        optimizer.step()
        for model in models[1:]:
            for mine, theirs in zip(all_tensors(model), all_tensors(models[0]), strict=True):
                mine.data.copy_(theirs.data)
    return {**models[0].state_dict(), "0.hidden": models[0][0].hidden}


def all_tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


CONFIG: dict[str, Any] = small_config(micro=5)


def config(grid: Grid, stage: int) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0} if stage == 3 else {"stage": stage}
    return {**CONFIG, "gradient_accumulation_steps": MICRO // grid.data.size, "zero_optimization": zero}


def own(grid: Grid, step: int) -> list[tuple[Tensor, Tensor]]:
    return [(pair[0], pair[1]) for pair in batch(step)[grid.data.rank :: grid.data.size]]


def sent(engine: Any) -> float:
    """Bytes that this rank broadcast in the last step."""
    return sum(
        kinds["broadcast"]["bytes"] for kinds in engine.traffic_report()["sent"].values() if "broadcast" in kinds
    )


def train_plain(engine: triax.ModuleEngine, step: int) -> None:
    thaw([*engine.module], step)
    for x, y in own(engine.grid, step):
        engine.backward(mean_loss(engine(x), y))
        engine.step()


def plain(folder: Path) -> list[tuple[State, State, list[float]]]:
    grid, found = Grid(timeout=60), []
    for stage in range(4):
        engine, *_ = triax.initialize(model=nn.Sequential(*layers()), config=config(grid, stage), grid=grid)
        broadcast = []
        for step in range(STEPS):
            train_plain(engine, step)
            broadcast.append(sent(engine))
        hidden = {"0.hidden": engine.module[0].hidden}
        engine.save_checkpoint(folder / str(stage))
        other, *_ = triax.initialize(model=nn.Sequential(*layers()), config=config(grid, stage), grid=grid)
        other.load_checkpoint(folder / str(stage))
        found.append(({**engine.module_state_dict(), **hidden}, other.module_state_dict(), broadcast))
    return found


def piped(sizes: tuple[int, int, int], folder: Path) -> list[tuple[State, State, State]]:
    grid, found = Grid(*sizes, timeout=60), []
    for stage, schedule in enumerate(["1f1b", "zb-v", "zb-h1", "1f1b"]):
        modules = [PipelineModule(layers(), grid=grid, loss_fn=mean_loss) for _ in range(2)]
        made = [triax.initialize(model=m, config=config(grid, stage), schedule=schedule)[0] for m in modules]
        engine, other = made
        for step in range(STEPS):
            thaw([layer for key, layer in engine.module.layers.items() if key == "3"] or [nn.Identity()], step)
            engine.train_batch(iter(own(grid, step)))
        held = {name: value for name, value in engine.module.named_buffers() if not name.endswith("hidden")}
        engine.save_checkpoint(folder / str(stage))
        other.load_checkpoint(folder / str(stage))
        found.append((engine.module_state_dict(), other.module_state_dict(), held))
    return found


TRACKED = 8 + 8 * WIDTH + 16 * 2 * WIDTH  # count, average and hidden: not the mask
NORM = 2 * 8 * WIDTH + 8


@pytest.mark.parametrize("size", some([1, 2, 4], [1]))
def test_all_replicas_of_a_module_get_the_first_ones_buffers(ranks: Any, tmp_path: Path, size: int) -> None:
    """Each replica had its own statistics: evaluation and state dicts depended on the rank."""
    wanted = replicated(size)
    for rank, stages in enumerate(ranks(size, plain, tmp_path)):
        for found, loaded, broadcast in stages:
            same(found, wanted)
            same(loaded, {name: value for name, value in found.items() if name != "0.hidden"}, rtol=0, atol=0)
            before, after = TRACKED + NORM, TRACKED + 2 * NORM
            assert broadcast == ([before, before, after, after] if rank == 0 and size > 1 else [0] * STEPS)


@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1, 1),
        (2, 2, 1),
        *(pytest.param(sizes, marks=pytest.mark.exhaustive) for sizes in [(2, 1, 1), (1, 2, 1)]),
    ],
    ids=str,
)
def test_all_replicas_of_a_pipeline_get_the_first_ones_buffers(
    ranks: Any, tmp_path: Path, sizes: tuple[int, int, int]
) -> None:
    """As plain PyTorch gives them: in the state dict, after a checkpoint is loaded, and in each stage's module."""
    wanted = {f"layers.{name}": value for name, value in replicated(sizes[1]).items() if name != "0.hidden"}
    for stages in ranks(math.prod(sizes), piped, sizes, tmp_path):
        for found, loaded, held in stages:
            same(found, wanted)
            same(loaded, found, rtol=0, atol=0)
            kept = held.keys() & wanted.keys()  # not the mask, which is not saved
            assert kept
            same({name: held[name] for name in kept}, {name: wanted[name] for name in kept})


def constant() -> list[Any]:
    """Traffic of a step of a model whose buffers are masks, and of one without buffers."""
    found = []
    for model in (nn.Sequential(Tracked().eval(), nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)):
        grid = Grid(data=2, timeout=60)
        engine, *_ = triax.initialize(model=model.double(), config=config(grid, 1), grid=grid)
        for step in range(2):
            for x, y in own(grid, step):
                engine.backward(mean_loss(engine(x), y))
                engine.step()
        sums = engine.traffic_report()["sent"]["world"]["all_reduce"]
        found.append((sent(engine), sums["calls"], sums["bytes"] / 8))
    return found


def test_constant_buffers_are_not_sent(ranks: Any) -> None:
    """A model with masks sends one number a step more than one without buffers: whether a buffer has changed."""
    (masks, calls, numbers), (none, same_calls, fewer) = ranks(2, constant)[0]
    assert masks == none == 0 and calls == same_calls and numbers == fewer + 1


class CountedExperts(nn.Module):
    """A user's layer of 4 experts, sharded over the expert axis, whose buffer has a row for each of its experts."""

    seen: Tensor

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros(4 // grid.expert.size, 1, dtype=torch.float64))
        set_layout(cast(Any, self.seen), Layout((4, 1), expert_dim=0))
        self.rank = grid.rank

    def forward(self, x: Tensor) -> Tensor:
        self.seen.fill_(10.0 + self.rank)
        y: Tensor = self.linear(x)
        return y


def expert_buffers() -> list[float]:
    grid = Grid(data=4, expert=2, timeout=60)
    engine = triax.initialize(model=CountedExperts(grid), config=config(grid, 1), grid=grid)[0]
    for x, y in own(grid, 0):
        engine.backward(mean_loss(engine(x), y))
        engine.step()
    found: list[float] = engine.module.seen.flatten().tolist()
    return found


def test_buffers_of_experts_are_those_of_their_first_replica(ranks: Any) -> None:
    """Ranks 0 and 2 hold the first two experts, ranks 1 and 3 the others: each pair has a first rank of its own."""
    assert ranks(4, expert_buffers) == [[10.0, 10.0], [11.0, 11.0], [10.0, 10.0], [11.0, 11.0]]


def local(kind: str) -> list[State]:
    """Train by local steps, and return the weights and buffers after each of them."""
    grid, found = Grid(timeout=60), []
    updates = {"type": kind, "every": 2, "start_step": 1}
    model = nn.Sequential(*layers())
    engine, *_ = triax.initialize(model=model, config={**config(grid, 0), "local_updates": updates}, grid=grid)
    for step in range(STEPS):
        train_plain(engine, step)
        found.append(engine.module_state_dict())
    engine.synchronize()
    return [*found, engine.module_state_dict()]


@pytest.mark.parametrize("kind", ["local_sgd", "diloco"])
def test_local_updates_synchronize_buffers_with_the_weights(ranks: Any, kind: str) -> None:
    one, other = ranks(2, local, kind)
    equal = [all(torch.equal(mine[key], theirs[key]) for key in mine) for mine, theirs in zip(one, other, strict=True)]
    assert equal == [True, False, True, False, True]


def tied_batch_norm(partition: list[int]) -> str:
    grid = Grid(pipe=2, timeout=30)
    norm, linear = TiedLayerSpec("norm", nn.BatchNorm1d, WIDTH), LayerSpec(nn.Linear, WIDTH, WIDTH)
    listed = [linear, norm, linear, norm]
    model = PipelineModule(listed, grid=grid, loss_fn=mean_loss, dtype=torch.float64, partition=partition)
    engine = triax.initialize(model=model, config=config(grid, 0))[0]
    return error_text(lambda: engine.train_batch(iter(own(grid, 0))), RuntimeError)


def test_a_tied_layer_of_two_ranks_keeps_its_buffers(ranks: Any) -> None:
    for message in ranks(2, tied_batch_norm, [0, 2, 4]):
        assert "layers.1.running_mean is a buffer of a tied layer that several pipe ranks run" in message
    assert ranks(2, tied_batch_norm, [0, 1, 4]) == ["no error"] * 2


class Scaled(nn.Linear):
    """A linear layer whose buffers are set by the program, or by a checkpoint."""

    scale: Tensor

    def __init__(self, scale: float) -> None:
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)
        self.register_buffer("scale", torch.tensor([scale, math.nan], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale[0]


def tied_scale(folder: Path, scale: float) -> State:
    """Train one step; save it, or with another scale load it and take the second step."""
    grid = Grid(pipe=2, timeout=30)
    tied = TiedLayerSpec("scaled", Scaled, scale)
    layers = [tied, LayerSpec(nn.Linear, WIDTH, WIDTH), tied]
    model = PipelineModule(layers, grid=grid, loss_fn=mean_loss, dtype=torch.float64, partition=[0, 1, 3])
    engine = triax.initialize(model=model, config=config(grid, 0))[0]
    if scale != 2.0:
        engine.load_checkpoint(folder)
        engine.eval_batch(iter(own(grid, 1)))
    engine.train_batch(iter(own(grid, int(scale != 2.0))))
    if scale == 2.0:
        engine.save_checkpoint(folder)
    state: State = engine.module_state_dict()
    return state


def test_a_tied_layer_of_two_ranks_loads_its_buffers(ranks: Any, tmp_path: Path) -> None:
    """The first step after loading took the loaded values for a change of its own; a NaN was refused in each step."""
    start: State = ranks(2, tied_scale, tmp_path, 2.0)[0]
    tied, linear = Scaled(2.0), nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    model = nn.Sequential(tied, linear, tied)
    model.load_state_dict({name.removeprefix("layers."): value for name, value in start.items()}, strict=False)
    losses = [mean_loss(model(x), y) / MICRO for x, y in batch(1)]
    torch.stack(losses).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(0.1 * parameter.grad)
    wanted = model.state_dict()
    for found in ranks(2, tied_scale, tmp_path, 1.0):
        torch.testing.assert_close(
            found,
            {name: wanted[name.removeprefix("layers.")] for name in found},
            rtol=1e-10,
            atol=1e-13,
            equal_nan=True,
        )


class FirstMean(nn.Module):
    """A layer whose buffer is the mean of the first inputs, as an ActNorm's."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if not self.mean.any():
            self.mean.copy_(x.detach().mean(0))
        y: Tensor = self.linear(x - self.mean)
        return y


def norms() -> list[nn.Module]:
    torch.manual_seed(2)
    return [layer.double() for layer in (FirstMean(), nn.BatchNorm1d(WIDTH))]


def failing(step: int, failed: int, replica: int) -> tuple[Tensor, Tensor]:
    x, y = batch(step)[replica]
    return x, y * math.nan if step == failed else y


def after_failures(piped: bool, failed: int) -> tuple[State, State]:
    """Return this replica's buffers after the failed step, and weights and buffers after all steps."""
    grid, found = Grid(data=2, timeout=60), [State()]
    model = PipelineModule(norms(), grid=grid, loss_fn=mean_loss) if piped else nn.Sequential(*norms())
    optimizer, sizes = triax.Optimizer("SGD", lr=0.1), triax.Batch(microbatch=5, microbatches=1)
    engine: Any = triax.Engine(model, grid=grid, optimizer=optimizer, batch=sizes)
    for step in range(STEPS):
        x, y = failing(step, failed, grid.data.rank)
        try:
            if piped:
                engine.train_batch(iter([(x, y)]))
            else:
                engine.backward(mean_loss(engine(x), y))
                engine.step()
        except triax.AgreedError:
            found.append({name: buffer.clone() for name, buffer in engine.module.named_buffers()})
    return found[-1], engine.module_state_dict()


def plainly_after(failed: int) -> tuple[State, State]:
    """Return the first replica's buffers after the failed step, and its state in the end, of plain PyTorch."""
    models = [nn.Sequential(*norms()) for _ in range(2)]
    after = State()
    for step in range(STEPS):
        for replica, model in enumerate(models):
            x, y = failing(step, failed, replica)
            (mean_loss(model(x), y) / 2).backward()
        with torch.no_grad():
            for mine, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
                if step != failed:
                    assert mine.grad is not None and other.grad is not None
                    mine.sub_(0.1 * (mine.grad + other.grad))
                    other.copy_(mine)
                mine.grad = other.grad = None
        models[1].load_state_dict(models[0].state_dict())
        after = dict(models[0].named_buffers()) if step == failed else after
        after = {name: buffer.clone() for name, buffer in after.items()}
    return after, dict(models[0].state_dict())


@pytest.mark.parametrize("failed", [0, STEPS - 1])
@pytest.mark.parametrize("piped", [False, True])
def test_a_failed_step_leaves_all_replicas_the_first_ones_buffers(ranks: Any, piped: bool, failed: int) -> None:
    """A step that a nan loss ended left each replica its own buffers, some of them for ever."""
    after, end = plainly_after(failed)
    prefix = "layers." if piped else ""
    for held, whole in ranks(2, after_failures, piped, failed):
        same(held, {f"{prefix}{name}": value for name, value in after.items()})
        same(whole, {f"{prefix}{name}": value for name, value in end.items()})
