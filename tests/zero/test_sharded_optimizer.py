"""`zero.ShardedOptimizer` in a plain loop: against torch's optimizers in one process, and against DDP."""

from __future__ import annotations

import contextlib
import io
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from triax import Grid, Layout
from triax.grid.layout import layout_of, set_layout
from triax.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from triax.zero import ShardedOptimizer, gathered

from support.differences import largest
from support.foreign_optimizers import Foreign
from support.sharded_loops import STEPS, WIDTH, Net, backward, loss_of, microbatch, net, sharded_sgd
from support.sweeps import some


def groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.2},
        {"params": [p for _, p in named if p.dim() <= 1], "lr": 0.003, "weight_decay": 0.0},
    ]


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
            worst = largest([worst, (a if b is None else a - b).abs().max() if a.numel() else 0.0])
    return worst


@pytest.mark.parametrize(
    ("replicas", "passes", "redundancy"), some([(2, 1, False), (2, 2, False), (4, 1, True)], (1, 2))
)
def test_a_sharded_optimizer_trains_as_ddp(ranks: Any, replicas: int, passes: int, redundancy: bool) -> None:
    assert max(ranks(replicas, beside_ddp, passes, redundancy)) < 1e-12


def missing(stage: int, step: int) -> int | None:
    """The pass that the second replica skips. In stage 3 it may be the last one, in which it gathers all the same."""
    return None if step > 1 else 2 if stage == 3 else 1 - step


def odd_passes(stage: int) -> list[dict[str, Tensor]]:
    """A replica without any gradient, then a step after two of three passes, then a closure, then a sum."""
    grid = Grid(timeout=30)
    model = net()
    optimizer = sharded_sgd(model, grid, stage=stage, backward_passes_per_step=3, bucket_size=300)
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


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_replicas_may_skip_backward_passes_of_a_step(ranks: Any, stage: int) -> None:
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
    optimizer = sharded_sgd(model, grid, stage=stage, reduction="sum")
    x, y, _ = microbatch(0, 0, grid.data.rank)
    (model(x) - y).square().sum().backward()
    norm = optimizer.clip_grad_norm_(1e9).item()
    found = {}
    for parameter, gradient in optimizer.gradients():
        told = grid.tensor.all_gather_json(gradient.tolist())
        parts = [torch.tensor(part, dtype=gradient.dtype) for part in told]
        found[id(parameter)] = layout_of(parameter).assemble(parts)
    return norm, [found[id(p)] for p in model.parameters()]


def test_a_sharded_optimizer_sums_over_a_tensor_axis(ranks: Any) -> None:
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


def unlike(stage: int) -> list[Tensor]:
    """Weights that are whole on every rank, of ranks that have drawn them from different seeds."""
    grid = Grid(tensor=2, timeout=60)
    torch.manual_seed(grid.rank)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Pair(grid))
    optimizer = sharded_sgd(model, grid, stage=stage)
    with gathered(model):
        return [p.detach().clone() for p in optimizer.param_groups[0]["params"] if not layout_of(p).sharded]


def test_tensor_ranks_start_from_the_first_ones_weights(ranks: Any) -> None:
    torch.manual_seed(0)
    first = nn.Linear(WIDTH, WIDTH)
    for stage in (0, 3):
        one, *others = ranks(4, unlike, stage)
        assert torch.equal(one[0], first.weight) and torch.equal(one[1], first.bias)
        for found in others:
            assert len(found) == 4 and all(torch.equal(x, y) for x, y in zip(found, one, strict=True))


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
def test_a_sharded_optimizer_resumes_bitwise_from_its_state_dict(ranks: Any, half: bool) -> None:
    for stage in range(4):
        assert all(ranks(2, resumed, stage, half))


class WideMomentum(Foreign):
    """Keeps its momentum in fp32, whatever the dtype of what it steps."""

    def update(self, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
        momentum = state.setdefault("momentum", torch.zeros_like(p, dtype=torch.float32))
        p.sub_(momentum.mul_(0.9).add_(g), alpha=group["lr"])


def momentum_pair(**parameters: Tensor) -> ShardedOptimizer:
    """Return an optimizer of named bf16 parameters, after two steps."""
    named = {name: nn.Parameter(value.clone()) for name, value in parameters.items()}
    optimizer = ShardedOptimizer(
        WideMomentum, named.items(), Grid(), lr=0.1, weight_dtype=torch.bfloat16, master_dtype=torch.bfloat16
    )
    for step in (1, 2):
        optimizer.zero_grad()
        sum((p * p / (3.0 * step)).sum() for p in named.values()).backward()  # type: ignore[union-attr]
        optimizer.step()
    return optimizer


def test_saved_state_is_loaded_bitwise_by_parameter_name() -> None:
    """Momentum in fp32 came back rounded to bf16, and parameters in another order got each other's."""
    a, b = torch.randn(2, 9, generator=torch.Generator().manual_seed(0))
    state = torch_copy(momentum_pair(a=a, b=b).state_dict())
    loaded = momentum_pair(a=b, b=a)
    loaded.load_state_dict(state)
    momentum, saved = loaded.state_dict()["state"][0]["momentum"], state["state"][0]["momentum"]
    assert torch.equal(momentum, saved) and not torch.equal(saved, saved.bfloat16())
    with pytest.raises(ValueError, match="a has the place of b"):
        momentum_pair(b=b, a=a).load_state_dict(state)


def half_precision(stage: int) -> list[float]:
    """Steps too small for a bf16 weight near 1: master weights add them up, on every replica."""
    grid = Grid(timeout=60)
    model = nn.Linear(WIDTH, WIDTH)
    nn.init.ones_(model.weight)
    optimizer = sharded_sgd(
        model, grid, stage=stage, lr=5e-4, weight_dtype=torch.bfloat16, communication_dtype=torch.bfloat16
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


def test_a_sharded_optimizer_keeps_masters_in_fp32(ranks: Any) -> None:
    for stage in range(4):
        for values in ranks(2, half_precision, stage):
            assert values[0] == 1.0 and values[-1] == pytest.approx(1 - 10 * 1e-3, rel=2**-8) and values[-1] < 1


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
