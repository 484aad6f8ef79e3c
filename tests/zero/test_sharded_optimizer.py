"""`zero.ShardedOptimizer` in a plain loop: against torch's optimizers in one process, and against DDP."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from triax import Grid, Layout, PipelineModule, initialize
from triax.grid.layout import layout_of, set_layout
from triax.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from triax.zero import ShardedOptimizer, gathered

from paths import DOCS
from processes import program

WIDTH, SAMPLES, STEPS = 6, 4, 4  # samples of a backward pass of one replica


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.rare = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.empty = nn.Parameter(torch.zeros(0, WIDTH))
        self.frozen = nn.Parameter(torch.full((WIDTH,), 1.5), requires_grad=False)

    def forward(self, x: Tensor, rare: bool) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(x * self.frozen)))
        y = y + self.down(torch.tanh(self.up(y)))  # both a second time
        return y + self.rare(y) if rare else y


class Net(nn.Module):
    """A model with parameters that are used twice, sometimes or never, and with empty and frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, rare: int) -> Tensor:
        x = self.enter(x)
        for number, block in enumerate(self.blocks):
            x = block(x, rare=bool(rare >> number & 1))
        return self.norm(x) @ self.enter.weight.T  # a tied head


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.2},
        {"params": [p for _, p in named if p.dim() <= 1], "lr": 0.003, "weight_decay": 0.0},
    ]


def microbatch(step: int, index: int, replica: int) -> tuple[Tensor, Tensor, int]:
    """Inputs, labels, and the blocks that use their rare parameters: on some replicas, in the last step on none."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * index + replica)
    x, y = torch.randn(2, SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    rare = (0, 0b11110, 0b10001, 0b01010)[replica % 4] if step < STEPS - 1 else 0
    return x, y, rare


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor, int]) -> Tensor:
    x, y, rare = batch
    loss: Tensor = (model(x, rare) - y).square().mean()
    return loss


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
}
CLIP = 0.3
Trace = list[tuple[dict[str, Tensor], dict[str, Tensor], float]]  # of each step: gradients, weights, norm


def plain(kind: str, replicas: int, passes: int) -> Trace:
    """Reference run: one process, torch's own optimizer, and the mean of the replicas' losses."""
    model = net()
    cls, options = OPTIMIZERS[kind]
    optimizer = cls(groups(model), **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    trace = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for index in range(passes):
            losses = [loss_of(model, microbatch(step, index, r)) for r in range(replicas)]
            (torch.stack(losses).sum() / replicas).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item()
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        scheduler.step()
        trace.append((gradients, {n: p.detach().clone() for n, p in model.named_parameters()}, norm))
    return trace


def sharded(kind: str, stage: int, passes: int, keep: bool = False) -> Trace:
    grid = Grid(timeout=60)
    model = net(seed=grid.rank)  # replicas start apart: the first one's weights count
    cls, options = OPTIMIZERS[kind]
    optimizer = ShardedOptimizer(
        cls,
        groups(model),
        grid,
        stage=stage,
        module=model,
        backward_passes_per_step=passes,
        keep_gathered=keep,
        bucket_size=300,
        **options,
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    names = {p: n for n, p in model.named_parameters()}
    trace = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for index in range(passes):
            loss_of(model, microbatch(step, index, grid.data.rank)).backward()
        norm = optimizer.clip_grad_norm_(CLIP).item()
        gradients = {names[p]: g.clone() for p, g in optimizer.gradients()}
        optimizer.step()
        scheduler.step()
        with gathered(model):
            weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        trace.append((gradients, weights, norm))
    return trace


def all_stages(kind: str, passes: int) -> list[Trace]:
    return [sharded(kind, stage, passes) for stage in range(4)] + [sharded(kind, 3, passes, keep=True)]


def assert_same(found: Trace, wanted: Trace) -> None:
    for (gradients, weights, norm), (want_gradients, want_weights, want_norm) in zip(found, wanted, strict=True):
        trained = {name: gradient for name, gradient in want_gradients.items() if not name.endswith("frozen")}
        torch.testing.assert_close(gradients, trained, rtol=1e-10, atol=1e-13)
        torch.testing.assert_close(weights, want_weights, rtol=1e-10, atol=1e-13)
        assert norm == pytest.approx(want_norm, rel=1e-10, abs=0)


@pytest.mark.parametrize(
    ("replicas", "kind", "passes"),
    [
        (1, "sgd", 1),
        (2, "adamw", 2),
        pytest.param(2, "sgd", 3, marks=pytest.mark.exhaustive),
        pytest.param(4, "sgd", 2, marks=pytest.mark.exhaustive),
    ],
)
def test_every_stage_is_torchs_optimizer_on_one_process(ranks: Any, replicas: int, kind: str, passes: int) -> None:
    wanted = plain(kind, replicas, passes)
    assert any(w.equal(v) for w, v in zip(wanted[-1][1].values(), wanted[-2][1].values()))  # what had no gradient
    for stages in ranks(replicas, all_stages, kind, passes):
        for found in stages:
            assert_same(found, wanted)


def beside_ddp(passes: int, redundancy: bool) -> float:
    """The largest difference between DDP with torch's optimizer (or its own sharded one) and ours, after all steps."""
    grid = Grid(timeout=60)
    cls, options = OPTIMIZERS["adamw"]
    model = net()
    theirs = DistributedDataParallel(model, find_unused_parameters=True, process_group=grid.data.group)
    optimizer: torch.optim.Optimizer
    if redundancy:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=cls, process_group=grid.data.group, **options
        )
    else:
        optimizer = cls(model.parameters(), **options)
    for step in range(STEPS - 1):
        optimizer.zero_grad()
        for index in range(passes):
            with theirs.no_sync() if index < passes - 1 else contextlib.nullcontext():
                loss_of(theirs, microbatch(step, index, grid.data.rank)).backward()
        optimizer.step()
    gradients = {n: p.grad for n, p in model.named_parameters()}

    worst = 0.0
    for stage in range(4):
        mine = net(seed=grid.rank)
        sharding = ShardedOptimizer(
            cls, mine.parameters(), grid, stage=stage, module=mine, backward_passes_per_step=passes, **options
        )
        for step in range(STEPS - 1):
            sharding.zero_grad()
            for index in range(passes):
                loss_of(mine, microbatch(step, index, grid.data.rank)).backward()
            sharding.step()
        names = {p: n for n, p in mine.named_parameters()}
        differences = [(g, gradients[names[p]]) for p, g in sharding.gradients()]
        with gathered(mine):
            differences += [(a.detach().clone(), b) for a, b in zip(mine.parameters(), model.parameters())]
        for a, b in differences:
            worst = max(worst, (a if b is None else a - b).abs().max().item() if a.numel() else 0.0)
    return worst


@pytest.mark.parametrize(("replicas", "passes", "redundancy"), [(2, 1, False), (2, 2, False), (4, 1, True)])
def test_it_trains_as_ddp_does(ranks: Any, replicas: int, passes: int, redundancy: bool) -> None:
    assert max(ranks(replicas, beside_ddp, passes, redundancy)) < 1e-12


def missing(stage: int, step: int) -> int | None:
    """The pass that the second replica skips. In stage 3 it may be the last one, in which it gathers all the same."""
    return None if step > 1 else 2 if stage == 3 else 1 - step


def odd_passes(stage: int) -> list[dict[str, Tensor]]:
    """A replica without any gradient, then a step after two of three passes, then a closure, then a sum."""
    grid = Grid(timeout=30)
    model = net()
    optimizer = ShardedOptimizer(
        torch.optim.SGD,
        model.named_parameters(),
        grid,
        stage=stage,
        module=model,
        lr=0.1,
        backward_passes_per_step=3,
        bucket_size=300,
    )
    names = {p: n for n, p in model.named_parameters()}
    found = []
    for step in range(4):
        optimizer.zero_grad()
        for index in range(3 if step < 2 else 2):
            loss = loss_of(model, microbatch(step, index, grid.data.rank))
            if grid.data.rank != 1 or index != missing(stage, step):
                loss.backward()
        if step == 3:
            optimizer.zero_grad()  # given up after its backward passes
            assert optimizer.step(partial(backward, model, microbatch(step, 0, grid.data.rank))) > 0
        else:
            optimizer.step()
        found.append({names[p]: g.clone() for p, g in optimizer.gradients()})
    return found


def backward(model: nn.Module, batch: tuple[Tensor, Tensor, int]) -> Tensor:
    loss = loss_of(model, batch)
    loss.backward()
    return loss


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_replicas_may_have_unlike_numbers_of_backward_passes(ranks: Any, stage: int) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wanted = []
    for step in range(4):
        optimizer.zero_grad()
        for index in range((3, 3, 2, 1)[step]):
            for replica in range(2):
                if replica != 1 or index != missing(stage, step):
                    (loss_of(model, microbatch(step, index, replica)) / 2).backward()
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        wanted.append({n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named})
        optimizer.step()
    for found in ranks(2, odd_passes, stage):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-13)


class Pair(nn.Module):
    """Two linears over the tensor axis, and a scale whose gradient each tensor rank has a part of."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.grid = grid
        self.up = ColumnParallelLinear(WIDTH, 8, grid=grid)
        self.down = RowParallelLinear(8, WIDTH, grid=grid)
        self.scale = nn.Parameter(torch.linspace(1, 2, WIDTH))
        set_layout(self.scale, Layout((WIDTH,), partial=True))

    def forward(self, x: Tensor) -> Tensor:
        part = torch.zeros(len(x), 1, dtype=x.dtype)
        part[self.grid.tensor.rank :: self.grid.tensor.size] = 1.0
        x = x * (part * self.scale + (1 - part) * self.scale.detach())
        y: Tensor = self.down(torch.tanh(self.up(x)))
        return y


def tensor_parallel(stage: int) -> Any:
    grid = Grid(tensor=2, timeout=60)
    torch.manual_seed(0)
    model = Pair(grid).double()
    with torch.no_grad():
        for parameter in model.parameters():  # the same on any grid
            layout = layout_of(parameter)
            whole = torch.randn(layout.shape, generator=torch.Generator().manual_seed(len(layout.shape)))
            parameter.copy_(layout.shard(whole, grid.tensor.rank, grid.tensor.size))
    optimizer = ShardedOptimizer(
        torch.optim.SGD, model.parameters(), grid, stage=stage, module=model, lr=0.1, reduction="sum"
    )
    x, y, _ = microbatch(0, 0, grid.data.rank)
    (model(x) - y).square().sum().backward()
    norm = optimizer.clip_grad_norm_(1e9).item()
    found = {}
    for parameter, gradient in optimizer.gradients():
        told = grid.tensor.all_gather_json(gradient.tolist())
        parts = [torch.tensor(part, dtype=gradient.dtype) for part in told]
        found[id(parameter)] = layout_of(parameter).assemble(parts)
    return norm, [found[id(p)] for p in model.parameters()]


def test_the_tensor_axis(ranks: Any) -> None:
    """Sharded and partial parameters; the norm counts each element once; a sum over replicas."""
    model = Pair(Grid()).double()
    with torch.no_grad():
        for parameter in model.parameters():
            generator = torch.Generator().manual_seed(parameter.dim())
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    for replica in range(2):
        x, y, _ = microbatch(0, 0, replica)
        (model(x) - y).square().sum().backward()
    wanted = [p.grad for p in model.parameters()]
    total = torch.stack([g.norm() for g in wanted if g is not None]).norm().item()
    for stage in range(4):
        for norm, found in ranks(4, tensor_parallel, stage):
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-13)
            assert norm == pytest.approx(total, rel=1e-10, abs=0)


def resumed(stage: int, half: bool) -> bool:
    """Four steps, or two, a save, a load into another model and optimizer, and two: the same weights, bitwise."""
    grid = Grid(timeout=60)

    def fresh() -> tuple[Net, ShardedOptimizer]:
        model = net().float() if half else net()
        optimizer = ShardedOptimizer(
            torch.optim.AdamW,
            groups(model),
            grid,
            stage=stage,
            module=model,
            lr=0.01,
            weight_dtype=torch.bfloat16 if half else None,
        )
        return model, optimizer

    def train(model: Net, optimizer: ShardedOptimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            x, y, rare = microbatch(step, 0, grid.data.rank)
            dtype = model.norm.weight.dtype
            loss_of(model, (x.to(dtype), y.to(dtype), rare)).backward()
            optimizer.step()

    def weights(model: Net) -> dict[str, Tensor]:
        with gathered(model):
            return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    model, optimizer = fresh()
    train(model, optimizer, range(2))
    optimizer.param_groups[1]["lr"] = 0.02
    saved, state = weights(model), {**optimizer.state_dict()}
    assert state["param_groups"][1]["lr"] == 0.02
    elements = sum(t.numel() for s in state["state"].values() for t in s.values() if t.dim())
    whole = 2 * sum(b.flat.numel for b in optimizer.backward_passes.data_axis.buckets if b.trained)
    assert elements == whole // (grid.data.size if stage else 1)

    other, loaded = fresh()
    with gathered(other, modifier_rank=0):
        other.load_state_dict(saved)
    loaded.load_state_dict(torch_copy(state))
    assert loaded.param_groups[1]["lr"] == 0.02
    train(model, optimizer, range(2, 4))
    train(other, loaded, range(2, 4))
    a, b = weights(model), weights(other)
    with pytest.raises(ValueError, match="load what this rank saved"):
        loaded.load_state_dict({**state, "shard": {**state["shard"], "rank": 7}})
    return all(torch.equal(a[name], b[name]) for name in a) and not all(torch.equal(a[n], saved[n]) for n in a)


def torch_copy(state: Any) -> Any:
    """Copy a state through a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("half", [False, True])
def test_its_state_is_saved_and_loaded(ranks: Any, half: bool) -> None:
    for stage in range(4):
        assert all(ranks(2, resumed, stage, half))


def test_a_modules_zero_grad_counts_too() -> None:
    """``module.zero_grad()`` replaces the gradients' tensors; nothing is lost, and nothing old is kept."""
    for stage in (0, 1):
        model, wanted = net(), net()
        optimizer = ShardedOptimizer(
            torch.optim.SGD, model.parameters(), Grid(), stage=stage, lr=0.1, backward_passes_per_step=2
        )
        optimizer.zero_grad()
        backward(model, microbatch(0, 0, 1))
        model.zero_grad()
        backward(model, microbatch(0, 1, 1))
        backward(wanted, microbatch(0, 1, 1))
        gradients = dict(optimizer.gradients())
        for a, b in zip(model.parameters(), wanted.parameters()):
            if b.grad is not None:
                torch.testing.assert_close(gradients[a], b.grad, rtol=1e-12, atol=0)


def make(**changes: Any) -> ShardedOptimizer:
    model = changes.pop("model", None) or net()
    arguments: dict[str, Any] = {
        "optimizer_class": torch.optim.SGD,
        "params": model.parameters(),
        "grid": Grid(),
        "lr": 0.1,
        **changes,
    }
    return ShardedOptimizer(**arguments)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"grid": "data"}, "'data' is not a grid: pass grid = triax.Grid"),
        ({"optimizer_class": torch.optim.LBFGS}, "LBFGS needs whole tensors"),
        ({"optimizer_class": "SGD"}, "pass the class itself"),
        ({"stage": 4}, "stage=4 is no stage of ZeRO: give 0, 1, 2 or 3"),
        ({"stage": 3}, "pass module=model"),
        ({"stage": 3, "module": nn.Linear(2, 2)}, "parameter 0 of group 0 is not one of module's parameters"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step=0 is too small: give at least 1"),
        ({"reduction": "avg"}, "'mean' or 'sum', not 'avg'"),
        ({"params": []}, "empty parameter list"),
        ({"params": [nn.Parameter(torch.zeros(2, device="meta"))]}, "is on meta, and the grid on cpu"),
        ({"bucket_size": 0}, "a bucket of 0 elements holds nothing"),
    ],
)
def test_arguments_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        make(**changes)


@pytest.mark.parametrize("stage", [0, 3])
def test_torchs_grad_scaler_is_refused(stage: int) -> None:
    """The scaler unscales `.grad`, which is not what the step reads."""
    model = nn.Linear(WIDTH, 1)
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    for kind in ("plain loop", "engine"):
        if kind == "engine":
            optimizer: Any = initialize(model=model, config={**config, "zero_optimization": {"stage": stage}})[1]
        else:
            optimizer = ShardedOptimizer(torch.optim.SGD, model.parameters(), Grid(), stage=stage, module=model, lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, WIDTH)).mean()).backward()
        before = model.weight.detach().clone()
        with pytest.raises(RuntimeError, match=r"GradScaler unscales \.grad, .* precision='fp16'"):
            scaler.step(optimizer)
        assert torch.equal(model.weight, before)


def test_orders_of_calls_refused() -> None:
    model = net()
    optimizer = make(model=model)
    batch = microbatch(0, 0, 1)
    backward(model, batch)
    with pytest.raises(RuntimeError, match="backward pass 2 of a step that has backward_passes_per_step=1"):
        backward(model, batch)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"call optimizer\.zero_grad\(\) before"):
        backward(model, batch)
    optimizer.zero_grad()

    def broken(gradient: Tensor) -> Tensor:
        raise ArithmeticError("planted")

    handle = model.enter.bias.register_hook(broken)
    with pytest.raises(ArithmeticError):
        backward(model, batch)
    handle.remove()
    with pytest.raises(RuntimeError, match=r"failed half way.*zero_grad\(\)"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"failed half way.*zero_grad\(\)"):
        backward(model, batch)
    optimizer.zero_grad()
    backward(model, batch)
    optimizer.step()
    with pytest.raises(RuntimeError, match="make it with all groups"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    model.blocks[0].frozen.requires_grad_()
    with pytest.raises(RuntimeError, match="1 parameters were frozen when the optimizer was made"):
        optimizer.step()


def unlike() -> str:
    grid = Grid(timeout=60)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3 + grid.rank))
    with pytest.raises(ValueError, match="replicas must have the same model") as error:
        ShardedOptimizer(torch.optim.SGD, model.named_parameters(), grid, lr=0.1)
    return str(error.value)


def test_models_that_differ_are_refused_on_every_rank(ranks: Any) -> None:
    first, second = ranks(2, unlike)
    assert first == second and "('1.weight', (3, 2)" in first and "('1.weight', (4, 2)" in first


def half_precision(stage: int) -> list[float]:
    """Steps too small for a bf16 weight near 1: master weights add them up, on every replica."""
    grid = Grid(timeout=60)
    model = nn.Linear(WIDTH, WIDTH)
    nn.init.ones_(model.weight)
    optimizer = ShardedOptimizer(
        torch.optim.SGD,
        model.parameters(),
        grid,
        stage=stage,
        module=model,
        lr=5e-4,
        weight_dtype=torch.bfloat16,
        communication_dtype=torch.bfloat16,
    )
    values = []
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.ones(2, WIDTH, dtype=torch.bfloat16)).sum().backward()  # the gradient of each weight is 2
        optimizer.step()
        with gathered(model):
            assert model.weight.dtype == torch.bfloat16
            values.append(model.weight[0, 0].item())
    return values


def test_masters_in_fp32(ranks: Any) -> None:
    for stage in range(4):
        for values in ranks(2, half_precision, stage):
            assert values[0] == 1.0 and values[-1] == pytest.approx(1 - 10 * 1e-3, rel=2**-8) and values[-1] < 1


def schedulers(optimizer: torch.optim.Optimizer) -> list[torch.optim.lr_scheduler.LRScheduler]:
    return [
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10),  # also turns momentum
        torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2),
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4),
            ],
            milestones=[2],
        ),
    ]


@pytest.mark.parametrize("which", [0, 1])
def test_learning_rate_schedulers(which: int) -> None:
    def train(model: Net, optimizer: Callable[[Net], torch.optim.Optimizer]) -> list[Tensor]:
        made = optimizer(model)
        scheduler = schedulers(made)[which]
        for step in range(6):
            made.zero_grad()
            backward(model, microbatch(step, 0, 1))
            made.step()
            scheduler.step()
        return [p.detach() for p in model.parameters()]

    wanted = train(net(), lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9))
    found = train(net(), lambda m: make(model=m, momentum=0.9))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


def overlapped(stage: int) -> list[str]:
    """Events of the second of two backward passes, in order."""
    grid = Grid(timeout=60)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    optimizer = ShardedOptimizer(
        torch.optim.SGD, model.parameters(), grid, stage=stage, lr=0.1, bucket_size=20, backward_passes_per_step=2
    )
    calls: list[str] = []
    start = grid.data.reduce_scatter

    def spy(output: Tensor, tensor: Tensor, async_op: bool = False) -> Any:
        calls.append("reduce")
        return start(output, tensor, async_op)

    grid.data.reduce_scatter = spy  # type: ignore[method-assign]
    for number, layer in enumerate(model):
        layer.register_full_backward_hook(lambda *_, n=number: calls.append(f"backward {n}"))
    for _ in range(2):
        calls.append("pass")
        model(torch.randn(2, 4, requires_grad=True)).sum().backward()
    optimizer.step()
    return calls


@pytest.mark.parametrize("stage", [1, 2])
def test_reduction_overlaps_the_backward_pass(ranks: Any, stage: int) -> None:
    for calls in ranks(2, overlapped, stage):
        first, last = (" ".join(calls).split("pass")[1:]) if calls else ("", "")
        assert first.count("reduce") == (3 if stage == 2 else 0) and last.count("reduce") == 3
        assert last.index("reduce") < last.index("backward 0")


# ------------------------------------------------------------------------------------------------- docs/zero.md


def documented(start: str) -> str:
    """Code block of docs/zero.md that starts with this line."""
    text = (DOCS / "zero.md").read_text()
    return next(block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if block.startswith(start))


def test_the_documented_loop(ranks: Any, tmp_path: Path) -> None:
    """Under torchrun's environment, in processes that have torch already; torchrun itself is in the sweep."""
    (tmp_path / "plain.py").write_text(documented("# plain.py"))
    said = ranks(2, program, ["plain.py"], str(tmp_path), init_group=False)
    check_documented("".join(said), 2, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("processes", [1, 2])
def test_the_documented_loop_as_launched(processes: int, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(documented("# plain.py"))
    python = [sys.executable] if processes == 1 else [str(Path(sys.executable).parent / "torchrun")]
    options = [] if processes == 1 else ["--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [*python, *options, "plain.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    check_documented(done.stdout, processes, tmp_path)


def check_documented(said: str, processes: int, tmp_path: Path) -> None:
    losses = [float(line.split()[2]) for line in said.splitlines() if line.startswith("step ")]
    assert len(losses) == 20 and losses[-1] < losses[0] - 1.5
    saved = load_file(tmp_path / "model.safetensors")
    assert not any(tensor.isnan().any() for tensor in saved.values())
    assert len(list(tmp_path.glob("optimizer-*.pt"))) == processes


def test_the_documented_lending() -> None:
    grid = Grid()
    layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    made = PipelineModule(layers, grid=grid, loss_fn=lambda o, y: (o - y).square().mean())
    config = {"train_batch_size": 1, "optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 3}}
    engine, *_ = initialize(model=made, config=config)
    before = engine.gather()
    exec(documented("from triax.zero import gathered"), {"engine": engine, "grid": grid, "torch": torch})
    after = engine.gather()
    assert torch.equal(after["layers.0.weight"], 0.5 * before["layers.0.weight"])
    assert torch.equal(after["layers.1.weight"], before["layers.1.weight"])
