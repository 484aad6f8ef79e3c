"""Compressed exchanges of gradients, step by step, against the papers' equations in one process in float64."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_hook

from triax import Grid
from triax.base.seeds import derive
from triax.plugins.gradient_compression import PowerSGD
from triax.plugins.gradient_compression.compressor import message_bytes, pack_message, unpack_message
from triax.zero import ShardedOptimizer

from support.compression_references import (
    FULL,
    POWER,
    STEPS,
    TOPK,
    WIDTH,
    Gradients,
    Reference,
    Trace,
    assert_same,
    batches,
    engine,
    plain,
)


class DeepGradientCompression:
    """Lin et al. 2018, algorithm 4, for N nodes. ``held`` gives the pieces of a tensor that select on their own."""

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
                self.q[key] = torch.stack(qs).sum(0)
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


def trained(shape: tuple[int, int, int], options: dict[str, Any], steps: int = STEPS) -> Any:
    return steps_of(Grid(*shape, timeout=60), options, steps)


def steps_of(grid: Grid, options: dict[str, Any], steps: int = STEPS) -> tuple[Trace, dict[str, Any], dict[str, int]]:
    made = engine(grid, options)
    data = batches(grid.data.rank, grid.data.size)
    trace: Trace = [({}, made.gather())]
    for _ in range(steps):
        made.train_batch(data)
        trace.append((made.gather("gradients"), made.gather()))
    return trace, made.traffic_report(), made.memory_report()["held"]


def halves(name: str, tensor: Tensor) -> list[Tensor]:
    """Views of the parts of a matrix that each of two tensor ranks holds."""
    if "up.weight" in name:
        return list(tensor.chunk(2, dim=0))
    return list(tensor.chunk(2, dim=1)) if "down.weight" in name else [tensor]


GRIDS = [((1, 1, 1), 0), ((1, 2, 1), 1), ((1, 4, 1), 0), ((2, 2, 1), 1), ((1, 2, 2), 0)]


SECTIONS: dict[str, dict[str, Any]] = {
    "topk": TOPK,
    "dgc": FULL,
    "powersgd": {**POWER, "start_step": 2},
    "most": {**TOPK, "ratio": 0.9},  # a message with all indices would be larger than the plain sum
    "cold": {**POWER, "warm_start": False},
}


def references(split: Any) -> dict[str, Reference]:
    return {
        "topk": DeepGradientCompression(0.05, 0.0, 0.0, 0, 0, split),
        "dgc": DeepGradientCompression(0.03, 0.7, 0.2, 6, 2, split),
        "powersgd": RankR(1, 2, split),
        "most": DeepGradientCompression(0.9, 0.0, 0.0, 0, 0, split),
        "cold": RankR(1, 0, split, warm=False),
    }


def each_kind(shape: tuple[int, int, int], stage: int, kinds: list[str], **more: Any) -> dict[str, Trace]:
    zero = {"stage": stage, "reduce_bucket_size": 200, **more}
    grid = Grid(*shape, timeout=60)
    options = [{"gradient_compression": SECTIONS[kind], "zero_optimization": zero} for kind in kinds]
    return {kind: steps_of(grid, each)[0] for kind, each in zip(kinds, options, strict=True)}


@pytest.mark.parametrize(
    ("shape", "stage", "kinds"),
    [
        (*GRIDS[1], [*SECTIONS]),
        (*GRIDS[4], ["dgc", "powersgd"]),
        *(pytest.param(*each, ["topk", "dgc", "powersgd"], marks=pytest.mark.exhaustive) for each in GRIDS),
    ],
)
def test_compressed_steps_equal_the_equations_of_the_papers(
    ranks: Any, shape: tuple[int, int, int], stage: int, kinds: list[str]
) -> None:
    every = ranks(math.prod(shape), each_kind, shape, stage, kinds)
    for kind in kinds:
        reference = references(halves if shape[2] == 2 else None)[kind]
        wanted = plain(every[0][kind][0][1], shape[1], reference)
        for found in every:
            assert_same(found[kind][1:], wanted)


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.exhaustive), "nvme"])
def test_compressed_steps_with_offload_equal_the_equations(ranks: Any, tmp_path: Path, device: str) -> None:
    kinds = ["dgc", "powersgd"]
    more: dict[str, Any] = {
        "offload_optimizer": {"device": device, **({"nvme_path": str(tmp_path)} if device == "nvme" else {})}
    }
    every = ranks(2, partial(each_kind, **more), (1, 2, 1), 1, kinds)
    for kind in kinds:
        wanted = plain(every[0][kind][0][1], 2, references(None)[kind])
        for found in every:
            assert_same(found[kind][1:], wanted)


def hooked(shape: tuple[int, int], rank: int) -> Any:
    """torch's own hook of PowerSGD, and ours, on the same gradients and the same first Q."""
    grid = Grid(timeout=60)
    weight = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    optimizer = ShardedOptimizer(
        torch.optim.SGD, [weight], grid, stage=0, compression=PowerSGD(rank, min_compression=1.0), lr=1.0
    )
    mine = next(optimizer.backward_passes.data_axis.exchange.replicated())  # type: ignore[union-attr]
    state = torch_hook.PowerSGDState(None, rank, start_powerSGD_iter=2, min_compression_rate=0.5)
    state.iter = 2  # the sums before are the same in any case
    generator, found = torch.Generator().manual_seed(grid.rank), []
    for step in range(10):
        gradient = torch.randn(shape, generator=generator, dtype=torch.float64)
        if not step:
            state.p_memory_dict[0] = torch.empty(shape[0] * rank, dtype=torch.float64)
            state.q_memory_dict[0] = mine.value.clone().view(-1)
        optimizer.zero_grad()
        (weight * gradient).sum().backward()
        optimizer.synchronize()
        ours = next(optimizer.gradients())[1].clone()
        bucket: Any = _GradBucket(gradient)
        theirs = torch_hook.powerSGD_hook(state, bucket).wait()
        optimizer.step()
        found.append((ours, theirs.view(shape)))
    return found


class _GradBucket:
    """The part of DDP's bucket that the hook uses."""

    def __init__(self, gradient: Tensor) -> None:
        self._flat, self._shape = gradient.clone().view(-1), gradient.shape

    def buffer(self) -> Tensor:
        return self._flat

    def gradients(self) -> list[Tensor]:
        return [self._flat.view(self._shape)]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def test_powersgd_steps_equal_those_of_torchs_hook(ranks: Any) -> None:
    for found in ranks(2, hooked, (12, 9), 3):
        assert len(found) == 10
        for ours, theirs in found:
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def counted(replicas: int, options: list[dict[str, Any]]) -> list[Any]:
    grid = Grid(1, replicas, 1, timeout=60)
    return [steps_of(grid, each, 2)[1:] for each in options]


@pytest.mark.parametrize(("replicas", "stage"), [(2, 0), (4, 1)])
def test_compressed_exchanges_send_the_bytes_of_the_formulas(ranks: Any, replicas: int, stage: int) -> None:
    """Counts of fp32 numbers in a stage: two matrices of 4 W * W, one of W * W, and vectors."""
    base = {"zero_optimization": {"stage": stage, "reduce_bucket_size": 10**6}}
    matrices = [4 * WIDTH * WIDTH, 4 * WIDTH * WIDTH, WIDTH * WIDTH]
    shapes = [(4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (WIDTH, WIDTH)]
    vectors = 4 * WIDTH + WIDTH + 2 * WIDTH + WIDTH
    ring, eight = (replicas - 1) / replicas, 8

    names = {
        "none": {"type": "none"},
        "topk": TOPK,
        "fp16 values": {**TOPK, "values": "fp16"},
        "most": SECTIONS["most"],
        "powersgd": POWER,
        "fp16": {"type": "fp16"},
        "bf16": {"type": "bf16"},
    }
    reports, *_ = ranks(
        replicas, counted, replicas, [{**base, "gradient_compression": each} for each in names.values()]
    )
    told = dict(zip(names, reports, strict=True))

    def sent(name: str) -> tuple[dict[str, float], dict[str, Any], dict[str, int]]:
        report, held = told[name]
        kinds = {kind: entry["bytes"] for kind, entry in report["sent"]["data"].items()}
        assert sum(kinds.values()) == pytest.approx(report["formula"]["data"])
        return kinds, report, held

    plainly, report, held = sent("none")
    assert "compression" not in held
    assert report["formula"] == report["uncompressed"]
    weights = plainly.get("all_gather", 0.0)

    def gathered(values: int) -> float:
        chosen = sum(2 * max(1, round(0.05 * n)) for n in matrices)
        return (replicas - 1) * (
            chosen * (4 + values) + (-(-values * chosen) % 4) + (chosen % 2) * (4 if values == 8 else 0)
        )

    kinds, after, held = sent("topk")
    assert after["uncompressed"] == report["uncompressed"]
    assert kinds["all_reduce"] == 2 * ring * 2 * vectors * eight
    assert kinds["all_gather"] == weights + gathered(8)
    assert held["compression"] == plain_elements(report, ring, stage) * eight
    assert sent("fp16 values")[0]["all_gather"] == weights + gathered(2)
    # Indices and values of most elements would take more bytes than all elements.
    dense = sent("most")[0]["all_reduce"]
    assert dense == 2 * ring * 2 * (vectors + sum(matrices)) * eight

    kinds, *_ = sent("powersgd")
    assert kinds["all_reduce"] == 2 * ring * 2 * (vectors + sum(rows + columns for rows, columns in shapes)) * eight
    assert kinds.get("all_gather", 0.0) == weights

    for dtype, width in (("fp16", 2), ("bf16", 2)):
        kinds, after, held = sent(dtype)
        assert sum(kinds.values()) - weights == pytest.approx((sum(plainly.values()) - weights) * width / eight)
        assert "compression" not in held and after["uncompressed"] == report["uncompressed"]


def plain_elements(report: dict[str, Any], ring: float, stage: int) -> float:
    """Number of elements of the buckets, with padding, from the bytes of the plain sum in float64."""
    return float(report["uncompressed"]["data"] / ring / 2 / 8)


def test_compressed_messages_pack_and_unpack_exactly() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for count in (1, 2, 3, 8):
            numbers, values = torch.arange(count, dtype=torch.int32), torch.randn(count).to(dtype)
            message = pack_message(numbers, values)
            assert message.numel() * 4 == message_bytes(count, count, dtype)
            for sent in torch.cat([message, message]).view(2, -1):
                back = unpack_message(sent, count, count, dtype)
                assert torch.equal(back[0], numbers) and torch.equal(back[1], values)
