"""Compressed exchanges of gradients, step by step, against the papers' equations in one process in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_hook

import triax
from triax import Grid, LayerSpec, PipelineModule
from triax.engine.config import ConfigError, read_config
from triax.grid.layout import Layout
from triax.grid.random import derive
from triax.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from triax.zero import PowerSGD, ShardedOptimizer, SparseRows, TopK
from triax.zero.compressor import packed, packed_bytes, unpacked

WIDTH, STEPS, SAMPLES, LR = 6, 12, 8, 0.2
Gradients = dict[str, Tensor]
Reference = Callable[[list[Gradients]], Gradients]


# ------------------------------------------------------------------------- the papers, in one process


class DeepGradientCompression:
    """Lin et al. 2018, algorithm 4, for N nodes. ``held`` says who holds a piece of a tensor: they select alone."""

    def __init__(self, ratio: float, momentum: float, clip: float, warmup: int, start: int, split: Any = None) -> None:
        self.ratio, self.momentum, self.clip, self.warmup, self.start = ratio, momentum, clip, warmup, start
        self.u: list[Gradients] = []
        self.v: list[Gradients] = []
        self.t, self.split = 0, split or (lambda name, tensor: [tensor])

    def __call__(self, local: list[Gradients]) -> Gradients:
        n = len(local)
        if not self.u:
            self.u = [{k: torch.zeros_like(g) for k, g in one.items()} for one in local]
            self.v = [{k: torch.zeros_like(g) for k, g in one.items()} for one in local]
        total = {k: torch.zeros_like(g) for k, g in local[0].items()}
        done = self.t - self.start
        share = self.ratio
        if 0 <= done < self.warmup:
            share = math.exp(math.log(0.25) + (math.log(self.ratio) - math.log(0.25)) * done / self.warmup)
        for k in range(n):
            norm = math.sqrt(sum(float(g.square().sum()) for g in local[k].values()))
            factor = min(1.0, self.clip * n**-0.5 / (norm + 1e-6)) if self.clip else 1.0
            for name, g in local[k].items():
                self.u[k][name] = self.momentum * self.u[k][name] + factor * g
                if done < 0 or g.dim() < 2:
                    total[name] += self.u[k][name]
                    continue
                self.v[k][name] += self.u[k][name]
                pieces = zip(*(self.split(name, t) for t in (self.v[k][name], self.u[k][name], total[name])))
                for v, u, sums in pieces:
                    count = max(1, round(share * v.numel()))
                    threshold = v.abs().flatten().sort(descending=True).values[count - 1]
                    mask = v.abs() >= threshold
                    sums += v * mask
                    v *= ~mask
                    u *= ~mask
        self.t += 1
        return total


class RankR:
    """Vogels et al. 2019, algorithms 1 and 2, for N workers."""

    def __init__(self, rank: int, start: int, split: Any = None, warm: bool = True) -> None:
        self.rank, self.start, self.t, self.warm = rank, start, 0, warm
        self.q: dict[Any, Tensor] = {}
        self.e: list[dict[Any, Tensor]] = []
        self.split = split or (lambda name, tensor: [tensor])

    def __call__(self, local: list[Gradients]) -> Gradients:
        self.e = self.e or [{} for _ in local]
        total = {k: sum((one[k] for one in local[1:]), local[0][k].clone()) for k in local[0]}
        self.t += 1
        if self.t <= self.start:
            return total
        for name in total:
            if total[name].dim() < 2:
                continue
            pieces = [self.split(name, one[name]) for one in local]
            for shard, out in enumerate(self.split(name, total[name])):
                rows, columns = out.shape
                r = min(self.rank, rows, columns)
                if rows * columns < 2 * r * (rows + columns):
                    continue
                key = name, shard
                if key not in self.q or not self.warm:
                    seed = derive(0, "PowerSGD", name, shard, 0 if self.warm else self.t)
                    generator = torch.Generator().manual_seed(seed)
                    self.q[key] = torch.randn(columns, r, generator=generator, dtype=torch.float64)
                m = [pieces[k][shard] + self.e[k].get(key, 0.0) for k in range(len(local))]
                p = gram_schmidt(sum(each @ self.q[key] for each in m))
                qs = [each.T @ p for each in m]
                for k, each in enumerate(m):
                    self.e[k][key] = each - p @ qs[k].T
                self.q[key] = sum(qs)  # type: ignore[assignment]
                out.copy_(p @ self.q[key].T)
        return total


def gram_schmidt(matrix: Any) -> Tensor:
    columns: list[Tensor] = []
    for column in matrix.T:
        for _ in range(2):
            for other in columns:
                column = column - other * (other @ column)
        columns.append(column / column.norm())
    return torch.stack(columns, dim=1)


# ------------------------------------------------------------------------------ a model, and its data


class Part(nn.Module):
    """Two linear layers around a tanh, sharded over the tensor axis, and a norm, which is not."""

    def __init__(self, *, grid: Grid) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(WIDTH, 4 * WIDTH, grid=grid)
        self.down = RowParallelLinear(4 * WIDTH, WIDTH, grid=grid)
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)  # whole on every tensor rank, and a matrix

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.mix(self.norm(self.down(torch.tanh(self.up(x)))))
        return y


def batches(replica: int, replicas: int) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor]]]:
    """Microbatches of 2 samples, each with a weight: replicas have unequal shares of a batch's."""
    generator = torch.Generator().manual_seed(3)
    share = SAMPLES // replicas
    while True:
        x, y = torch.randn(2, SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
        weight = torch.randint(1, 9, (SAMPLES, 1), generator=generator).double()
        mine = slice(replica * share, (replica + 1) * share)
        yield from zip(x[mine].split(2), zip(y[mine].split(2), weight[mine].split(2), strict=True), strict=True)


def loss_fn(outputs: Tensor, labels: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    y, weight = labels
    return ((outputs - y).square() * weight).sum() / WIDTH, weight.sum()


def engine(grid: Grid, options: dict[str, Any]) -> triax.Engine:
    layers = [LayerSpec(Part) for _ in range(2)]
    model = PipelineModule(layers, grid=grid, loss_fn=loss_fn, dtype=torch.float64, partition="uniform")
    config = {
        "train_batch_size": SAMPLES,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_optimization": {"stage": 0, "reduce_bucket_size": 200},
        **options,
    }
    made, *_ = triax.initialize(model=model, config=config)
    return made


Trace = list[tuple[Gradients, Gradients]]  # of each step: gradients, weights


def trained(shape: tuple[int, int, int], options: dict[str, Any], steps: int = STEPS) -> Any:
    grid = Grid(*shape, timeout=60)
    made = engine(grid, options)
    data = batches(grid.data.rank, grid.data.size)
    trace: Trace = [({}, made.gather())]
    for _ in range(steps):
        made.train_batch(data)
        trace.append((made.gather("gradients"), made.gather()))
    return trace, made.traffic_report(), made.memory_report()["held"]


def plain(start: Gradients, replicas: int, exchange: Reference, steps: int = STEPS) -> Trace:
    """SGD in one process: each replica's share of the mean gradient, brought together as the paper says."""
    model = nn.Sequential(Part(grid=Grid()), Part(grid=Grid())).double()
    names = [f"layers.{name}" for name, _ in model.named_parameters()]
    parameters = list(model.parameters())
    with torch.no_grad():
        for name, parameter in zip(names, parameters, strict=True):
            parameter.copy_(start[name])
    data, trace = batches(0, 1), []
    for _ in range(steps):
        batch = [next(data) for _ in range(SAMPLES // 2)]
        whole = sum(float(weight.sum()) for _, (_, weight) in batch)
        share = len(batch) // replicas
        local = []
        for replica in range(replicas):
            mine = batch[replica * share : (replica + 1) * share]
            loss = torch.stack([loss_fn(model(x), labels)[0] for x, labels in mine]).sum()
            found = torch.autograd.grad(loss / whole, parameters)
            local.append(dict(zip(names, (g.clone() for g in found), strict=True)))
        gradients = exchange(local)
        with torch.no_grad():
            for name, parameter in zip(names, parameters, strict=True):
                parameter -= LR * gradients[name]
        trace.append((gradients, {n: p.detach().clone() for n, p in zip(names, parameters, strict=True)}))
    return trace


def halves(name: str, tensor: Tensor) -> list[Tensor]:
    """What each of two tensor ranks holds of a matrix: views."""
    if "up.weight" in name:
        return list(tensor.chunk(2, dim=0))
    return list(tensor.chunk(2, dim=1)) if "down.weight" in name else [tensor]


def assert_same(found: Trace, wanted: Trace) -> None:
    for step, ((gradients, weights), (theirs, want)) in enumerate(zip(found, wanted, strict=True)):
        for mine, other, what in ((gradients, theirs, "gradient"), (weights, want, "weight")):
            for name, value in other.items():
                message = f"{what} of {name} after step {step + 1}"
                torch.testing.assert_close(mine[name], value, rtol=1e-10, atol=1e-12, msg=lambda m, s=message: s + m)


TOPK = {"type": "topk", "ratio": 0.05}
FULL = {"type": "topk", "ratio": 0.03, "momentum": 0.7, "clip": 0.2, "warmup_steps": 6, "start_step": 2}
POWER = {"type": "powersgd", "rank": 1, "min_compression": 2.0}
GRIDS = [((1, 1, 1), 0), ((1, 2, 1), 1), ((1, 4, 1), 0), ((2, 2, 1), 1), ((1, 2, 2), 0)]


@pytest.mark.parametrize(("shape", "stage"), GRIDS)
@pytest.mark.parametrize("kind", ["topk", "dgc", "powersgd"])
def test_each_step_is_the_papers(ranks: Any, kind: str, shape: tuple[int, int, int], stage: int) -> None:
    section = {"topk": TOPK, "dgc": FULL, "powersgd": {**POWER, "start_step": 2}}[kind]
    zero = {"stage": stage, "reduce_bucket_size": 200}
    every = ranks(math.prod(shape), trained, shape, {"gradient_compression": section, "zero_optimization": zero})
    split = halves if shape[2] == 2 else None
    reference: Any = RankR(1, 2, split)
    if kind != "powersgd":
        reference = DeepGradientCompression(*((0.05, 0.0, 0.0, 0, 0) if kind == "topk" else (0.03, 0.7, 0.2, 6, 2)), split)
    wanted = plain(every[0][0][0][1], shape[1], reference)
    for trace, *_ in every:
        assert_same(trace[1:], wanted)
