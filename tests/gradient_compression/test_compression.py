"""Compressed exchanges of gradients, step by step, against the papers' equations in one process in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_hook

import triax
from triax import Grid, LayerSpec, PipelineModule
from triax.base.errors import ConfigError
from triax.compat.deepspeed.from_config import read_config
from triax.gradient_compression import PowerSGD, SparseRows, TopK
from triax.gradient_compression.compressor import message_bytes, pack_message, unpack_message
from triax.models.gpt import GPTConfig, GPTLoss, gpt_layers
from triax.randomness.random import derive
from triax.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from triax.zero import ShardedOptimizer

WIDTH, STEPS, SAMPLES, LR = 6, 12, 8, 0.2
Gradients = dict[str, Tensor]
Reference = Callable[[list[Gradients]], Gradients]


# ------------------------------------------------------------------------- the papers, in one process


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
    """Microbatches of 2 samples, each with a weight: replicas have unequal shares of the batch's weight."""
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


def engine(grid: Grid, options: dict[str, Any]) -> triax.PipelineEngine:
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
    return steps_of(Grid(*shape, timeout=60), options, steps)


def steps_of(grid: Grid, options: dict[str, Any], steps: int = STEPS) -> tuple[Trace, dict[str, Any], dict[str, int]]:
    made = engine(grid, options)
    data = batches(grid.data.rank, grid.data.size)
    trace: Trace = [({}, made.gather())]
    for _ in range(steps):
        made.train_batch(data)
        trace.append((made.gather("gradients"), made.gather()))
    return trace, made.traffic_report(), made.memory_report()["held"]


def plain(start: Gradients, replicas: int, exchange: Reference, steps: int = STEPS) -> Trace:
    """SGD in one process: each replica's share of the mean gradient, combined by the paper's equations."""
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
                parameter.sub_(LR * gradients[name])
        trace.append((gradients, {n: p.detach().clone() for n, p in zip(names, parameters, strict=True)}))
    return trace


def halves(name: str, tensor: Tensor) -> list[Tensor]:
    """Views of the parts of a matrix that each of two tensor ranks holds."""
    if "up.weight" in name:
        return list(tensor.chunk(2, dim=0))
    return list(tensor.chunk(2, dim=1)) if "down.weight" in name else [tensor]


def assert_same(found: Trace, wanted: Trace) -> None:
    for step, ((gradients, weights), (theirs, want)) in enumerate(zip(found, wanted, strict=True)):
        for mine, other, what in ((gradients, theirs, "gradient"), (weights, want, "weight")):
            for name, value in other.items():
                message = f"{what} of {name} after step {step + 1}: {{}}".format
                torch.testing.assert_close(mine[name], value, rtol=1e-10, atol=1e-12, msg=message)


TOPK = {"type": "topk", "ratio": 0.05}
FULL = {"type": "topk", "ratio": 0.03, "momentum": 0.7, "clip": 0.2, "warmup_steps": 6, "start_step": 2}
POWER = {"type": "powersgd", "rank": 1, "min_compression": 2.0}
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
    ("shape", "stage"),
    [pytest.param(*each, marks=() if each in (GRIDS[1], GRIDS[4]) else pytest.mark.exhaustive) for each in GRIDS],
)
def test_each_step_is_the_papers(ranks: Any, shape: tuple[int, int, int], stage: int) -> None:
    kinds = [*SECTIONS] if shape == (1, 2, 1) else ["topk", "dgc", "powersgd"]
    every = ranks(math.prod(shape), each_kind, shape, stage, kinds)
    for kind in kinds:
        reference = references(halves if shape[2] == 2 else None)[kind]
        wanted = plain(every[0][kind][0][1], shape[1], reference)
        for found in every:
            assert_same(found[kind][1:], wanted)


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.exhaustive), "nvme"])
def test_each_step_is_the_papers_where_the_update_is_offloaded(ranks: Any, tmp_path: Path, device: str) -> None:
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


def test_powersgd_steps_as_torchs_hook_does(ranks: Any) -> None:
    for found in ranks(2, hooked, (12, 9), 3):
        assert len(found) == 10
        for ours, theirs in found:
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------------------------- rows of embeddings


class Words(nn.Module):
    """An embedding, sharded over the tensor axis if there is one."""

    def __init__(self, *, grid: Grid) -> None:
        super().__init__()
        self.embedding = VocabParallelEmbedding(VOCABULARY, WIDTH, grid=grid)

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.embedding(ids)
        return y


VOCABULARY, LENGTH = 64, 3


def looked_up(shape: tuple[int, int, int], stage: int, sparse: bool, few: bool) -> Any:
    grid = Grid(*shape, timeout=60)
    layers = [LayerSpec(Words), LayerSpec(Part), LayerSpec(Part)]
    model = PipelineModule(layers, grid=grid, loss_fn=loss_fn, dtype=torch.float64, partition="uniform")
    config = {
        "train_batch_size": SAMPLES,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": LR, "momentum": 0.9}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 400},
        "sparse_gradients": sparse,
    }
    made, *_ = triax.initialize(model=model, config=config)
    generator, trace, counts = torch.Generator().manual_seed(5), [], []
    for _ in range(3):
        ids = torch.randint(12 if few else VOCABULARY, (SAMPLES, LENGTH), generator=generator)
        y = torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
        weight = torch.randint(1, 9, (SAMPLES, 1, 1), generator=generator).double()
        share = SAMPLES // grid.data.size
        mine = slice(grid.data.rank * share, (grid.data.rank + 1) * share)
        parts = zip(ids[mine].split(2), zip(y[mine].split(2), weight[mine].split(2), strict=True), strict=True)
        made.train_batch(iter(list(parts)))
        trace.append((made.gather("gradients"), made.gather()))
        every = [ids[r * share : (r + 1) * share] for r in range(grid.data.size)]
        counts.append(max(part.unique().numel() for part in every))
    return trace, made.traffic_report(), counts


@pytest.mark.parametrize(("shape", "stage"), [((1, 2, 1), 0), ((1, 4, 1), 1), ((2, 2, 1), 1), ((1, 2, 2), 0)])
def test_rows_of_embeddings_sum_exactly(ranks: Any, shape: tuple[int, int, int], stage: int) -> None:
    size = math.prod(shape)
    wanted = ranks(size, looked_up, shape, stage, False, True)
    found = ranks(size, looked_up, shape, stage, True, True)
    for (trace, report, _), (want, plainly, _) in zip(found, wanted, strict=True):
        assert_same(trace, want)
        assert report["uncompressed"] == plainly["uncompressed"] == plainly["formula"]
        sent = sum(entry["bytes"] for entry in report["sent"]["data"].values())
        assert sent == pytest.approx(report["formula"]["data"])
    first, plainly = found[0], wanted[0]
    if shape == (1, 2, 1):
        # The replicas exchange rows, with 4 bytes for each index, instead of the table; and the number of rows.
        kinds = first[1]["sent"]["data"]
        assert kinds["all_gather"]["bytes"] == message_bytes(first[2][-1], first[2][-1] * WIDTH, torch.float64)
        assert first[2][-1] * (8 * WIDTH + 4) <= kinds["all_gather"]["bytes"] <= first[2][-1] * (8 * WIDTH + 4) + 8
        reduced = plainly[1]["sent"]["data"]["all_reduce"]["bytes"] - VOCABULARY * WIDTH * 8
        assert kinds["all_reduce"]["bytes"] == reduced + 8


def test_rows_of_embeddings_give_way_where_there_are_many(ranks: Any) -> None:
    wanted = ranks(2, looked_up, (1, 2, 1), 0, False, False)
    (trace, report, counts), _ = ranks(2, looked_up, (1, 2, 1), 0, True, False)
    assert_same(trace, wanted[0][0])
    small = counts[-1] * (8 * WIDTH + 4) < VOCABULARY * WIDTH * 8
    assert ("all_gather" in report["sent"]["data"]) == small


def beside_much(options: dict[str, Any]) -> float:
    """Bytes of a step in stage 1, with an embedding that shares a bucket with many other parameters."""
    layers = [LayerSpec(Words), LayerSpec(nn.Linear, WIDTH, 200), LayerSpec(nn.Linear, 200, WIDTH)]
    model = PipelineModule(layers, grid=Grid(timeout=60), loss_fn=loss_fn, dtype=torch.float64, partition="uniform")
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_optimization": {"stage": 1},
        **options,
    }
    made, *_ = triax.initialize(model=model, config=config)
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) % 3
    made.train_batch(iter([(ids, (torch.ones(2, LENGTH, WIDTH).double(), torch.ones(2, 1, 1).double()))]))
    return float(sum(entry["bytes"] for entry in made.traffic_report()["sent"]["data"].values()))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_rows_of_embeddings_never_send_more_than_the_sum(ranks: Any, dtype: str) -> None:
    """The other parameters of an embedding's bucket are all-reduced in stage 1, not reduce-scattered."""
    options = {"communication_data_type": dtype}
    plain, sparse = ranks(2, beside_much, options), ranks(2, beside_much, {**options, "sparse_gradients": True})
    for sent, whole in zip(sparse, plain, strict=True):
        assert whole <= sent <= whole + 8  # and how many rows there are


def tied_ends(section: dict[str, Any]) -> Tensor:
    """A tied weight of the first and the last stage, each with other parameters, on four replicas."""
    grid = Grid(2, 4, 1, timeout=60)
    sizes = GPTConfig(
        vocab_size=33,
        max_position_embeddings=4,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    model = PipelineModule(gpt_layers(sizes), grid=grid, loss_fn=GPTLoss(grid, vocab_size=33), seed=2)
    config = {
        "train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "gradient_compression": section,
    }
    made, *_ = triax.initialize(model=model, config=config)
    generator = torch.Generator().manual_seed(grid.data.rank)
    for _ in range(8):
        ids = torch.randint(33, (4, 5), generator=generator)
        made.train_batch(iter([*zip(ids[:, :-1].split(2), ids[:, 1:].split(2), strict=True)]))
    tie = next(bucket for bucket in made.data_axis.buckets if bucket.tie is not None)
    return tie.weights.clone()


@pytest.mark.parametrize("section", [{**POWER, "rank": 2}, {**TOPK, "ratio": 0.9}], ids=["powersgd", "topk, dense"])
def test_a_tie_stays_one_weight_on_all_its_stages(ranks: Any, section: dict[str, Any]) -> None:
    """Bit by bit: the order of a ring's sums depends on the rest of the message, which differs between stages."""
    first, *others = ranks(8, tied_ends, section)
    for weight in others:
        assert torch.equal(weight, first)


class Tied(nn.Module):
    """A head tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.head(self.embedding(ids))
        return y


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Tied, "embedding.weight is tied to another layer"),
        (lambda: nn.Linear(2, 2), "it has no nn.Embedding"),
    ],
)
def test_models_without_sparse_rows_are_refused(model: Callable[[], nn.Module], words: str) -> None:
    config = {"train_batch_size": 1, "sparse_gradients": True, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
    with pytest.raises(ConfigError, match=words):
        triax.initialize(model=model(), config=config)


# ------------------------------------------------------------------------------------- bytes and states


def counted(replicas: int, options: list[dict[str, Any]]) -> list[Any]:
    grid = Grid(1, replicas, 1, timeout=60)
    return [steps_of(grid, each, 2)[1:] for each in options]


@pytest.mark.parametrize(("replicas", "stage"), [(2, 0), (4, 1)])
def test_bytes_are_the_formulas(ranks: Any, replicas: int, stage: int) -> None:
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


def test_messages() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for count in (1, 2, 3, 8):
            numbers, values = torch.arange(count, dtype=torch.int32), torch.randn(count).to(dtype)
            message = pack_message(numbers, values)
            assert message.numel() * 4 == message_bytes(count, count, dtype)
            for sent in torch.cat([message, message]).view(2, -1):
                back = unpack_message(sent, count, count, dtype)
                assert torch.equal(back[0], numbers) and torch.equal(back[1], values)


# -------------------------------------------------------------------------------- overflow, resumption


def overflowing() -> Any:
    """fp16 with a scale that overflows in the first steps, which must not change the residuals."""
    grid = Grid(timeout=60)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1))
    config = {
        "train_batch_size": 2 * grid.size,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "fp16": {"enabled": True, "loss_scale": 128.0},
        "gradient_compression": {"type": "topk", "ratio": 0.1},
    }
    made, *_ = triax.initialize(model=model, config=config)
    generator, seen = torch.Generator().manual_seed(grid.rank), []
    for step in range(4):
        x = torch.randn(2, WIDTH, generator=generator)
        loss = made(x).float().square().mean()
        made.backward(loss * 1e6 if step == 2 and grid.rank == 1 else loss)
        made.step()
        exchange: Any = made.data_axis.exchange
        seen.append((torch.cat([*exchange.state()["residual"]]).clone(), exchange.steps, made.skipped_steps))
    return seen


def test_an_overflow_leaves_residuals_alone(ranks: Any) -> None:
    for seen in ranks(2, overflowing):
        assert [steps for _, steps, _ in seen] == [1, 2, 2, 3] and [skipped for *_, skipped in seen] == [0, 0, 1, 1]
        residuals = [residual for residual, *_ in seen]
        assert torch.equal(residuals[1], residuals[2]) and not torch.equal(residuals[0], residuals[1])
        assert all(residual.isfinite().all() and residual.any() for residual in residuals)


def resumed(shape: tuple[int, int, int], section: dict[str, Any], folder: str, load: bool, steps: int) -> Any:
    grid = Grid(*shape, timeout=60)
    adam = {"type": "AdamW", "params": {"lr": 0.01}}
    sgd = {"type": "SGD", "params": {"lr": LR}}
    made = engine(grid, {"gradient_compression": section, "optimizer": sgd if section.get("momentum") else adam})
    data = batches(grid.data.rank, grid.data.size)
    if load:
        made.load_checkpoint(folder)
        for _ in range(made.global_steps * SAMPLES // 2 // grid.data.size):
            next(data)
    sums = total(made, grid)
    losses = [float(made.train_batch(data)) for _ in range(steps)]
    if not load:
        made.save_checkpoint(folder)
        sums = total(made, grid)
        losses += [float(made.train_batch(data)) for _ in range(3)]
    return losses, made.gather(), sums, made.data_axis.exchange.steps  # type: ignore[union-attr]


def total(made: triax.PipelineEngine, grid: Grid) -> dict[str, dict[str, Tensor]]:
    """Sum of the residuals of all replicas: state -> parameter -> sum."""
    found: dict[str, dict[str, Tensor]] = {}
    exchange = made.data_axis.exchange
    assert exchange is not None
    for key, flats in exchange.state().items():
        for bucket, flat in zip([b for b in made.data_axis.buckets if b.trained], flats, strict=True):
            whole = flat.clone()
            grid.data.all_reduce(whole)
            for slot, member in zip(bucket.flat.slots, bucket.members, strict=True):
                if flat.numel():
                    found.setdefault(key, {})[member.layout.name] = whole[slot.start : slot.stop]
    return found


@pytest.mark.parametrize("section", [FULL, POWER], ids=["dgc", "powersgd"])
def test_resumed_in_the_middle(ranks: Any, tmp_path: Path, section: dict[str, Any]) -> None:
    folder = str(tmp_path)
    before = ranks(4, resumed, (2, 2, 1), section, folder, False, 4)
    after = ranks(4, resumed, (2, 2, 1), section, folder, True, 3)
    for (losses, weights, sums, steps), (again, others, loaded, count) in zip(before, after, strict=True):
        assert losses[-3:] == again and steps == count == 7
        assert all(torch.equal(weights[name], others[name]) for name in weights)
        assert all(torch.equal(sums[key][name], loaded[key][name]) for key in sums for name in sums[key])
    # On other numbers of replicas, the sum of the residuals is the same.
    held = {key: {k: v for one in before for k, v in one[2][key].items()} for key in before[0][2]}
    assert any(value.any() for value in held["residual"].values())
    for replicas in (1, 4):
        for losses, _, loaded, count in ranks(replicas, resumed, (1, replicas, 1), section, folder, True, 1):
            assert count == 5 and losses[0] == pytest.approx(before[0][0][-3], rel=1e-10)
            assert loaded.keys() == held.keys()
            for key, values in held.items():
                for name, value in values.items():
                    torch.testing.assert_close(loaded[key][name], value, rtol=1e-12, atol=1e-15)


def test_what_another_method_kept_is_handed_on(ranks: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = str(tmp_path)
    ((_, _, sums, _),) = ranks(1, resumed, (1, 1, 1), POWER, folder, False, 4)
    grid = Grid()
    made = engine(grid, {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "gradient_compression": TOPK})
    made.load_checkpoint(folder)
    assert "the state of PowerSGDExchange (q) is not loaded" in caplog.text
    for name, value in total(made, grid)["residual"].items():
        assert torch.equal(value, sums["residual"][name])
    caplog.clear()
    engine(grid, {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}).load_checkpoint(folder)
    assert "the state of PowerSGDExchange (q, residual) is not loaded" in caplog.text


# --------------------------------------------------------------------------------- without the engine


def alone(compression: Any, stage: int, steps: int = 6, resume: int = 0) -> Any:
    """A plain loop, in which a layer is used in the first steps only; saved and loaded after ``resume`` steps."""
    grid = Grid(timeout=60)

    def made() -> tuple[nn.Module, ShardedOptimizer]:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Embedding(20, WIDTH)]).double()
        chosen = SparseRows(list(model[2].parameters())) if compression == "rows" else compression
        return model, ShardedOptimizer(
            torch.optim.SGD, model.parameters(), grid, stage=stage, compression=chosen, lr=LR
        )

    model, optimizer = made()
    generator, trace = torch.Generator().manual_seed(grid.rank), []
    for step in range(steps):
        if resume and step == resume:
            weights, state = {k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict()
            model, optimizer = made()
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
        ids = torch.randint(20, (2,), generator=generator)
        x = model[0](model[2](ids))  # type: ignore[index]
        optimizer.zero_grad()
        (model[1](x) if step < 2 else x).square().mean().backward()  # type: ignore[index]
        optimizer.step()
        trace.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    return trace


@pytest.mark.parametrize(
    "compression", [TopK(0.1), PowerSGD(1), "rows", "fp16"], ids=["topk", "powersgd", "rows", "fp16"]
)
def test_plain_loops(ranks: Any, compression: Any) -> None:
    found, whole = ranks(2, alone, compression, 1), ranks(2, alone, None, 1)
    again = ranks(2, alone, compression, 1, resume=3)
    for trace, more, plainly in zip(found, again, whole, strict=True):
        for step, first, other, want in zip(trace, found[0], more, plainly, strict=True):
            for name, value in step.items():
                assert torch.equal(value, first[name]) and torch.equal(value, other[name])
                if compression == "rows":
                    torch.testing.assert_close(value, want[name], rtol=1e-12, atol=1e-15)
    last, before = found[0][-1], found[0][2]
    if compression in (TopK(0.1), PowerSGD(1)):
        # A layer's residual still changes it in steps in which no replica used it.
        assert not torch.equal(last["1.weight"], before["1.weight"])
        assert not torch.allclose(last["0.weight"], whole[0][-1]["0.weight"], rtol=1e-3)
    else:
        assert torch.equal(last["1.weight"], before["1.weight"])


def test_a_plain_loop_sends_everything_in_the_end(ranks: Any) -> None:
    """Error feedback: the steps and the residuals add up to the sum of all gradients."""
    for values in (None, torch.float16, torch.bfloat16):  # what rounding loses is not lost
        for missing, steps in ranks(2, fed_back, values):
            assert missing < 1e-12 and steps == 10


def fed_back(values: torch.dtype | None) -> Any:
    grid = Grid()
    weight = nn.Parameter(torch.zeros(5, 8, dtype=torch.float64))
    optimizer = ShardedOptimizer(torch.optim.SGD, [weight], grid, stage=0, compression=TopK(0.3, values=values), lr=1.0)
    gradient = torch.randn(5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for _ in range(10):
        optimizer.zero_grad()
        (weight * gradient).sum().backward()
        optimizer.step()
    exchange: Any = optimizer.backward_passes.data_axis.exchange
    (residual,) = exchange.state()["residual"]
    held = residual.clone()
    grid.data.all_reduce(held)
    missing = weight.detach() + 10 * gradient - held[:40].view(5, 8)
    return float(missing.abs().max()), exchange.steps


def not_finite(compression: Any) -> Any:
    """Steps of a plain loop that skips a step whose gradient is not finite on one replica."""
    grid = Grid(timeout=60)
    weight = nn.Parameter(torch.randn(6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    optimizer = ShardedOptimizer(torch.optim.SGD, [weight], grid, stage=0, compression=compression, lr=0.1)
    exchange: Any = optimizer.backward_passes.data_axis.exchange
    norms = []
    for step in range(4):
        optimizer.zero_grad()
        factor = torch.inf if step == 2 and grid.rank == 1 else 1.0 + grid.rank
        (weight.square().sum() * factor).backward()
        before = [t.clone() for each in exchange.state().values() for t in each]
        norm = optimizer.clip_grad_norm_(1.0)
        norms.append(bool(norm.isfinite()))
        if norms[-1]:
            optimizer.step()
            continue
        after = [t for each in exchange.state().values() for t in each]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return norms, bool(weight.isfinite().all())


@pytest.mark.parametrize("compression", [TopK(0.2), PowerSGD(1, min_compression=1.0)], ids=["topk", "powersgd"])
def test_what_is_not_finite_is_not_kept(ranks: Any, compression: Any) -> None:
    assert ranks(2, not_finite, compression) == [([True, True, False, True], True)] * 2


# ---------------------------------------------------------------------------------------- what is refused

BASE = {"train_batch_size": 1}
SGD_M = {"type": "SGD", "params": {"lr": 1.0, "momentum": 0.9}}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"gradient_compression": {"type": "topk", "rank": 2}}, "rank is an option of type powersgd"),
        ({"gradient_compression": {"start_step": 2}}, "start_step is an option of type topk and powersgd"),
        ({"gradient_compression": {"type": "topk", "ratio": 0.0}}, "ratio"),
        ({"gradient_compression": {"type": "top"}}, "'topk'"),
        ({"gradient_compression": TOPK, "zero_optimization": {"stage": 2}}, "set stage 1"),
        ({"gradient_compression": POWER, "zero_optimization": {"stage": 3}}, "set stage 1"),
        ({"sparse_gradients": True, "zero_optimization": {"stage": 2}}, "sparse_gradients needs"),
        ({"sparse_gradients": True, "gradient_compression": TOPK}, "give one of them"),
        (
            {"gradient_compression": {"type": "fp16"}, "communication_data_type": "bf16"},
            "both set the dtype",
        ),
        ({"gradient_compression": POWER, "communication_data_type": "bf16"}, "leave it out"),
        ({"gradient_compression": FULL, "optimizer": SGD_M}, "SGD without momentum"),
        (
            {"sparse_gradients": True, "communication_data_type": "fp16"},
            "sparse_rows sums .* communication_data_type to bf16",
        ),
        (
            {"gradient_compression": {"type": "fp16"}, "optimizer": {"type": "OneBitAdam", "params": {"lr": 1.0}}},
            "OneBitAdam sums gradients that are means already.* communication_data_type to bf16",
        ),
        (
            {"gradient_compression": FULL, "optimizer": {"type": "Adam", "params": {"lr": 1.0}}},
            "the optimizer is Adam",
        ),
        (
            {
                "gradient_compression": {"type": "bf16"},
                "torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["torch.nn.Linear"]},
            },
            "give one of them",
        ),
    ],
)
def test_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_config({**BASE, **config})


def test_refused_where_it_is_made() -> None:
    model = nn.Linear(4, 4)
    section = {"gradient_compression": {"type": "topk", "momentum": 0.9}}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    with pytest.raises(ConfigError, match="without momentum"):
        triax.initialize(model=model, optimizer=optimizer, config={**BASE, **section})
    grid = Grid()
    refused: list[tuple[dict[str, Any], str]] = [
        ({"compression": "int8"}, "'fp16' or 'bf16'"),
        ({"compression": TopK(), "stage": 2}, "use stage 1"),
        ({"compression": "fp16", "communication_dtype": torch.float32}, "differ"),
        ({"compression": 4}, "compression=4 is unknown: pass 'fp16'"),
        ({"compression": TopK(momentum=0.9), "momentum": 0.9}, "SGD with momentum 0.9: use torch.optim.SGD without"),
        ({"compression": PowerSGD(), "communication_dtype": torch.bfloat16}, "PowerSGD sends something else: leave"),
        ({"compression": SparseRows([model.weight]), "communication_dtype": torch.float16}, "use bf16"),
    ]
    for arguments, words in refused:
        with pytest.raises(ValueError, match=words):
            ShardedOptimizer(torch.optim.SGD, model.parameters(), grid, **{"lr": 1.0, **arguments})
    with pytest.raises(ValueError, match="the optimizer is Adam: use"):
        ShardedOptimizer(torch.optim.Adam, model.parameters(), grid, lr=1.0, compression=TopK(momentum=0.9))
    for make in (
        lambda: TopK(0.0),
        lambda: TopK(momentum=1.0),
        lambda: TopK(clip=-1.0),
        lambda: TopK(warmup_steps=-1),
        lambda: TopK(values=torch.int8),
        lambda: PowerSGD(0),
        lambda: PowerSGD(start_step=-1),
        lambda: PowerSGD(min_compression=0.5),
        lambda: SparseRows([torch.zeros(3)]),
    ):
        with pytest.raises(ValueError, match=r"\bis\b|\bare\b"):
            make()
