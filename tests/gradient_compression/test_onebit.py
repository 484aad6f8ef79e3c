"""1-bit Adam, 0/1 Adam and 1-bit LAMB: each step equal to the papers' equations, written here in float64.

The references run N replicas in one process, one after the other. They take from the engine only where parameters lie
in its buckets, which says what is compressed under one scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, PipelineModule
from triax.base.errors import ConfigError
from triax.compat.deepspeed.config.to_options import notes_of
from triax.compat.deepspeed.from_config import read_config
from triax.gradient_compression import OneBitAdam, ZeroOneAdam
from triax.gradient_compression.onebit.allreduce import OneBitMean, pack, unpack
from triax.grid.assemble import assemble
from triax.models.gpt import GPTConfig, GPTLoss, gpt_layers
from triax.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from triax.zero import ShardedOptimizer

from toys import mean_loss

WIDTH, BATCH, STEPS = 6, 8, 13
FREEZE = 3
PARAMS: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"freeze_step": FREEZE},
    "ZeroOneAdam": {"var_freeze_step": 6, "var_update_scaler": 2, "local_step_scaler": 1, "local_step_clipper": 3},
    "OneBitLamb": {"freeze_step": FREEZE, "factor_threshold": 0.3},
}
Trace = list[dict[str, Tensor]]  # weights after each step


def layers(grid: Grid) -> list[Any]:
    """A column-parallel layer, a row-parallel layer, and a replicated one."""
    across = LayerSpec(ColumnParallelLinear, WIDTH, 2 * WIDTH, grid=grid)
    back = LayerSpec(RowParallelLinear, 2 * WIDTH, WIDTH, grid=grid)
    return [across, torch.tanh, back, torch.tanh, LayerSpec(nn.Linear, WIDTH, WIDTH)]


def share(step: int, replica: int, replicas: int) -> tuple[Tensor, Tensor]:
    """Batches in which one feature is 0 until the variance is frozen: weights that read it have a variance of 0."""
    x, y = torch.randn(2, BATCH, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    x[:, 1] *= step > FREEZE + 1
    mine = slice(replica * BATCH // replicas, (replica + 1) * BATCH // replicas)
    return x[mine], y[mine]


def rate(step: int, group: int) -> float:
    """A learning-rate schedule that is 0 for some steps of one group."""
    return 0.0 if group == 1 and step in (4, 7, 8, 10, 11, 12) else 0.02 / (1 + 0.1 * step)


def grouped(named: Any) -> list[dict[str, Any]]:
    parameters = [p for _, p in named]
    matrices = [p for p in parameters if p.dim() > 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": [p for p in parameters if p.dim() == 1]}]


def made(shape: tuple[int, int, int], kind: str, bucket: int = 2**20, params: Any = None, **config: Any) -> Any:
    grid = Grid(*shape, timeout=60)
    model = PipelineModule(layers(grid), grid=grid, loss_fn=mean_loss, partition="uniform")
    if not config.keys() & {"bf16", "fp16"}:
        model.double()
    settings = {
        "train_batch_size": BATCH,
        "optimizer": {"type": kind, "params": {"lr": 0.01, "betas": [0.8, 0.95], **PARAMS[kind], **(params or {})}},
        "zero_optimization": {"reduce_bucket_size": bucket},
        **config,
    }
    return triax.initialize(model=model, config=settings, model_parameters=grouped(model.named_parameters()))[0]


def step(engine: Any, number: int) -> None:
    for group, options in enumerate(engine.optimizer.param_groups):
        options["lr"] = rate(number, group)
    data = engine.grid.data
    dtype = next(engine.module.parameters(), torch.zeros(0, dtype=torch.float64)).dtype
    x, y = share(number, data.rank, data.size)
    engine.train_batch(iter([(x.to(dtype), y)]))


def chunks(replicas: Any, grid: Grid) -> dict[str, Tensor]:
    """Return, for each parameter, the chunk of each element: the part that one replica serves on one tensor rank."""
    found = {}
    for bucket in replicas.buckets:
        part = bucket.flat.numel // grid.data.size
        for slot, member in zip(bucket.flat.slots, bucket.members, strict=True):
            numbers = torch.arange(slot.start, slot.stop) // part + 100 * grid.tensor.rank * member.layout.sharded
            found[member.layout.name] = member.layout, numbers.view(member.parameter.shape)
    return assemble(grid, found)


def trained(shape: tuple[int, int, int], kind: str, bucket: int = 2**20, **config: Any) -> Any:
    engine = made(shape, kind, bucket, **config)
    trace, norms = [], []
    for number in range(1, STEPS + 1):
        step(engine, number)
        trace.append(engine.gather())
        norms.append(engine.get_global_grad_norm())
    return trace, norms, chunks(engine.data_axis, engine.grid)


# The papers' equations.


def compressed(x: Tensor, chunk: Tensor, alive: Tensor) -> Tensor:
    """Tang et al. 2021: signs, scaled to preserve the 2-norm of each chunk."""
    found = torch.zeros_like(x)
    for number in chunk.unique():
        here = (chunk == number) & (alive > 0)
        if here.any():
            scale = x[here].square().mean().sqrt()
            found[here] = torch.where(x[here] >= 0, scale, -scale)
    return found


class Compressor:
    """Tang et al. 2021, algorithm 1, lines 6 to 12: N workers' errors and the servers', of one parameter."""

    def __init__(self, replicas: int, chunk: Tensor) -> None:
        self.chunk = chunk.flatten()
        self.workers = [torch.zeros(chunk.numel(), dtype=torch.float64) for _ in range(replicas)]
        self.server = torch.zeros(chunk.numel(), dtype=torch.float64)

    def __call__(self, values: list[Tensor], alive: Tensor) -> Tensor:
        if len(values) == 1:
            return values[0]
        sent = []
        for i, value in enumerate(values):
            whole = value + self.workers[i]
            sent.append(compressed(whole, self.chunk, alive))
            self.workers[i] = whole - sent[-1]
        whole = torch.stack(sent).mean(0) + self.server
        found = compressed(whole, self.chunk, alive)
        self.server = whole - found
        return found


class Reference:
    """N replicas of the model in one process, stepped by the paper's equations."""

    def __init__(self, kind: str, replicas: int, places: Any, corrects: bool, clip: float = 0.0) -> None:
        self.models = [PipelineModule(layers(Grid()), loss_fn=mean_loss).double() for _ in range(replicas)]
        self.update, self.n, self.corrects, self.clip = UPDATES[kind], replicas, corrects, clip
        self.params = PARAMS[kind]
        self.norms: list[float] = []
        named = dict(self.models[0].named_parameters())
        self.states: dict[str, dict[str, Any]] = {
            name: {
                "m": [torch.zeros(p.numel(), dtype=torch.float64)] * replicas,
                "v": torch.zeros(p.numel(), dtype=torch.float64),
                "C": Compressor(replicas, places[name]),
            }
            for name, p in named.items()
        }

    def run(self, steps: int = STEPS) -> Trace:
        trace = []
        for t in range(1, steps + 1):
            gradients: list[dict[str, Tensor]] = []
            for i, model in enumerate(self.models):
                model.zero_grad()
                x, y = share(t, i, self.n)
                mean_loss(model(x), y).backward()
                own = {k: p.grad for k, p in model.named_parameters()}
                gradients.append({k: g.flatten().clone() for k, g in own.items() if g is not None})
            self.norms.append(self.measure(gradients, t))
            for name in gradients[0]:
                where = [dict(m.named_parameters())[name].data.view(-1) for m in self.models]
                matrix = dict(self.models[0].named_parameters())[name].dim() > 1
                group = {"lr": rate(t, int(not matrix)), "decay": 0.1 if matrix else 0.0, "betas": (0.8, 0.95)}
                moved = self.update(self, t, where, [g[name] for g in gradients], self.states[name], group)
                for home, value in zip(where, moved, strict=True):
                    home.copy_(value)
            trace.append({k: p.detach().clone() for k, p in self.models[0].named_parameters()})
        return trace

    def measure(self, gradients: list[dict[str, Tensor]], t: int) -> float:
        """Return the norm of the mean gradient if it is summed, else the root mean square of the replicas' norms."""
        whole = [torch.cat(list(g.values())) for g in gradients]
        if self.summed(t) or self.n == 1:
            norm = float(torch.stack(whole).mean(0).norm())
        else:
            norm = math.sqrt(sum(float(g.norm()) ** 2 for g in whole) / self.n)
        if self.clip and norm > self.clip:
            for each in gradients:
                for g in each.values():
                    g.mul_(self.clip / (norm + 1e-6))
        return norm

    def summed(self, t: int) -> bool:
        if "freeze_step" in self.params:
            return bool(t <= self.params["freeze_step"])
        return t in VARIANCE_STEPS

    def bias(self, beta: float, t: int) -> float:
        return 1 - beta**t if self.corrects else 1.0


VARIANCE_STEPS = (1, 2, 3, 5)  # k_0 = 1; k_{j+1} - k_j = 2^(j // 2); and none after step 6: 7 would be the next
MEETINGS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12)  # behind step 6: one apart, then two (8), then three at the most (9, 12)


def adam(
    ref: Reference, t: int, x: list[Tensor], g: list[Tensor], s: dict[str, Any], group: dict[str, Any]
) -> list[Tensor]:
    """Tang et al. 2021, algorithm 1."""
    (b1, b2), frozen = group["betas"], ref.params["freeze_step"]
    if t <= frozen:
        mean = torch.stack(g).mean(0)
        m = b1 * s["m"][0] + (1 - b1) * mean
        s["v"] = b2 * s["v"] + (1 - b2) * mean**2
    else:
        alive = (s["v"] > 0).double()
        m = s["C"]([(b1 * s["m"][0] + (1 - b1) * each) * alive for each in g], alive)
    s["m"] = [m] * ref.n
    d = (s["v"] / ref.bias(b2, min(t, frozen))).sqrt() + 1e-8
    return [p - group["lr"] * (m / ref.bias(b1, t) / d + group["decay"] * p) for p in x]


def zero_one(
    ref: Reference, t: int, x: list[Tensor], g: list[Tensor], s: dict[str, Any], group: dict[str, Any]
) -> list[Tensor]:
    """Lu et al. 2022, algorithm 1, with AdamW's decay in each replica's local steps, and so in what they accumulate."""
    b1, b2 = group["betas"]
    lr, keep = group["lr"] / ref.bias(b1, t), 1 - group["lr"] * group["decay"]
    if t in VARIANCE_STEPS:
        mean = torch.stack(g).mean(0)
        s["m"] = [b1 * m + (1 - b1) * mean for m in s["m"]]
        s["v"] = b2 * s["v"] + (1 - b2) * mean**2
        s["taken"] = s.get("taken", 0) + 1
        d = (s["v"] / ref.bias(b2, s["taken"])).sqrt() + 1e-8
        return [keep * p - lr * m / d for p, m in zip(x, s["m"], strict=True)]
    alive = (s["v"] > 0).double()
    d = (s["v"] / ref.bias(b2, s["taken"])).sqrt() + 1e-8
    s["m"] = [(b1 * m + (1 - b1) * each) * alive for m, each in zip(s["m"], g, strict=True)]
    if "start" not in s:
        s["start"], s["u"], s["rates"], s["kept"] = x[0].clone(), [torch.zeros_like(p) for p in x], 0.0, 1.0
    s["u"] = [keep * u + lr * m for u, m in zip(s["u"], s["m"], strict=True)]
    s["rates"], s["kept"] = s["rates"] * keep + lr, s["kept"] * keep
    if t not in MEETINGS and ref.n > 1:
        return [keep * p - lr * m / d for p, m in zip(x, s["m"], strict=True)]  # x_{t + 1/2}
    if s["rates"] == 0:
        s["m"] = [torch.stack(s["m"]).mean(0)] * ref.n
        u = torch.zeros_like(x[0])
    else:
        u = s["C"](s["u"], alive)
        s["m"] = [u / s["rates"]] * ref.n
    moved = s.pop("start") * s["kept"] - u / d
    return [moved] * ref.n


def lamb(
    ref: Reference, t: int, x: list[Tensor], g: list[Tensor], s: dict[str, Any], group: dict[str, Any]
) -> list[Tensor]:
    """Li et al. 2021, algorithm 1, with DeepSpeed's effect of weight decay on the factor."""
    (b1, b2), b3, frozen, p = group["betas"], 0.9, ref.params["freeze_step"], x[0]
    if t <= frozen:
        mean = torch.stack(g).mean(0)
        m = b1 * s["m"][0] + (1 - b1) * mean
        s["v"] = b2 * s["v"] + (1 - b2) * mean**2
        d = (s["v"] / ref.bias(b2, t)).sqrt() + 1e-8
        update = m / ref.bias(b1, t) / d + group["decay"] * p
        c = float(p.norm() / update.norm()) if p.norm() > 0 and update.norm() > 0 else 1.0
        c = min(max(c, 0.01), 10.0) if p.norm() > 0 and update.norm() > 0 else 1.0
        s["c"] = b3 * s.get("c", 0.0) + (1 - b3) * c
    else:
        alive = (s["v"] > 0).double()
        m = s["C"]([(b1 * s["m"][0] + (1 - b1) * each) * alive for each in g], alive)
        told = (m - b1 * s["m"][0]) / (1 - b1)
        s["fresh"] = b2 * s.get("fresh", s["v"]) + (1 - b2) * told**2
        d = (s["v"] / ref.bias(b2, frozen)).sqrt() + 1e-8
        real = (s["fresh"] / ref.bias(b2, t)).sqrt() + 1e-8
        plain = m / ref.bias(b1, t) / d
        update = plain + group["decay"] * p
        r = float((d / real)[alive > 0].max())
        if group["decay"]:
            part = min(1.0, float(plain.norm() / update.norm()))
            r = r * part + 1 - part
        r = min(max(r, 0.5), 4.0)
        last, change = s.get("r", 1.0), ref.params["factor_threshold"]
        s["r"] = min(max(r, last * (1 - change)), last * (1 + change))
        c = s["r"] * s["c"] / (1 - b3**frozen if ref.corrects else 1.0)
    s["m"] = [m] * ref.n
    return [p - group["lr"] * c * update] * ref.n


UPDATES: dict[str, Callable[..., list[Tensor]]] = {"OneBitAdam": adam, "ZeroOneAdam": zero_one, "OneBitLamb": lamb}


def compare(found: Trace, wanted: Trace) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        for name, value in theirs.items():
            torch.testing.assert_close(mine[name], value, rtol=1e-10, atol=1e-12)


# Each kind on one process and on four replicas, and one of them on each other grid.
CHOSEN = {(1, 1, 1): list(PARAMS), (1, 4, 1): list(PARAMS), (1, 2, 1): ["OneBitAdam"]}
CHOSEN |= {(2, 2, 1): ["OneBitLamb"], (1, 2, 2): ["ZeroOneAdam"]}


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        pytest.param(shape, kind, marks=() if kind in chosen else pytest.mark.exhaustive)
        for shape, chosen in CHOSEN.items()
        for kind in PARAMS
    ],
    ids=str,
)
def test_the_papers_equations(ranks: Any, kind: str, shape: tuple[int, int, int]) -> None:
    if kind == "OneBitLamb" and shape[2] > 1:
        return  # refused: see below
    corrects, clip = shape[1] != 2, 0.4 if shape[1] == 4 or shape[2] == 2 else 0.0
    params, bucket = {"bias_correction": corrects}, 100 if shape[0] == 2 else 2**20
    found = ranks(math.prod(shape), trained, shape, kind, bucket, params=params, gradient_clipping=clip)
    places = found[0][2]
    reference = Reference(kind, shape[1], places, corrects, clip)
    wanted = reference.run()
    for trace, norms, _ in found:
        compare(trace, wanted)
        if shape[1] > 1:
            assert norms == pytest.approx(reference.norms, rel=1e-10)
    assert clip == 0 or sum(norm > clip for norm in reference.norms) > 2


# What is sent, and what is kept of it.


def exchanged(numel: int, spans: list[tuple[int, int]]) -> Any:
    """Compute one compressed mean of each rank's values and errors; return it and the bytes sent."""
    grid = Grid(timeout=60)
    axis, dtype = grid.data, torch.float32
    generator = torch.Generator().manual_seed(axis.rank)
    mean, own = OneBitMean(axis, numel, spans, grid.device), torch.zeros(numel)
    server, alive = torch.randn(numel // axis.size, generator=generator), torch.zeros(numel)
    for start, stop in spans:
        own[start:stop] = torch.randn(stop - start, generator=generator)
        alive[start:stop] = 1
    alive[3] = 0
    server *= alive[slice(*mean.part)]
    before, kept = (own * alive).clone(), server.clone()
    grid.traffic.clear()
    found = mean(own, server, alive)
    return before, kept, found, own, server, grid.traffic.report()["data"], mean.bytes(dtype)


@pytest.mark.parametrize("replicas", [2, 4])
def test_nothing_is_lost_between_what_is_sent_and_what_is_kept(ranks: Any, replicas: int) -> None:
    """The mean of the inputs, values and errors, equals the output plus the mean of the remaining errors."""
    numel, spans = 64 * replicas, [(0, 37), (48, 48), (48, 49), (64, 64 * replicas - 5)]
    results = ranks(replicas, exchanged, numel, spans)
    before, kept, found, own, server, _, _ = (list(column) for column in zip(*results, strict=True))
    came = torch.stack(before).double().mean(0) + torch.cat(kept).double()
    left = found[0].double() + torch.cat(server).double() + torch.stack(own).double().mean(0)
    torch.testing.assert_close(left, came, rtol=0, atol=1e-5)
    assert all(torch.equal(each, found[0]) for each in found)
    assert not found[0][3] and not found[0][49:64].any() and not found[0][37:48].any()
    for start, stop in spans[::3]:  # one magnitude a chunk
        for part in range(replicas):
            low, high = max(start, part * 64), min(stop, (part + 1) * 64)
            if low < high:
                values = found[0][low:high].abs()
                assert values[values > 0].unique().numel() == 1

    # A bit an element and 4 bytes a chunk, of as many chunks as the part with most of them has, there and back.
    wanted = (replicas - 1) * (64 // 8 + 4 * 2)
    for *_, sent, said in results:
        assert {kind: (entry.calls, entry.bytes) for kind, entry in sent.items()} == {
            "all_to_all": (1, wanted),
            "all_gather": (1, wanted),
        }
        assert said == 2 * wanted


def test_bits_are_packed_eight_to_a_byte() -> None:
    signs = torch.rand(3, 40, generator=torch.Generator().manual_seed(0)) < 0.5
    packed = pack(signs)
    assert packed.dtype == torch.uint8 and packed.shape == (3, 5)
    assert torch.equal(unpack(packed, torch.float32), torch.where(signs, 1.0, -1.0))


def transposed() -> Any:
    axis = Grid(timeout=60).data
    sent = torch.arange(8).view(4, 2) + 100 * axis.rank
    found = [torch.zeros(4, 2, dtype=torch.int64) for _ in range(2)]
    axis.all_to_all(found[0], sent)
    axis.all_to_all(found[1], sent, async_op=True).wait()
    return found, axis.traffic.report()["data"]["all_to_all"]


def test_all_to_all_gives_each_rank_its_own(ranks: Any) -> None:
    for rank, (found, sent) in enumerate(ranks(4, transposed)):
        wanted = [[100 * source + 2 * rank, 100 * source + 2 * rank + 1] for source in range(4)]
        assert found[0].tolist() == found[1].tolist() == wanted
        assert sent == (2, 2 * 3 * 2 * 8)


def counted(kind: str) -> Any:
    engine = made((1, 4, 1), kind, params={"var_update_scaler": 1} if kind == "ZeroOneAdam" else {}, bf16=HALF)
    buckets = [(b.flat.numel, len(b.members)) for b in engine.data_axis.buckets]
    sent = []
    for number in range(1, STEPS + 1):
        x, y = share(number, engine.grid.data.rank, 4)
        engine.train_batch(iter([(x.bfloat16(), y)]))
        report = engine.traffic_report()
        sent.append({name: entry["bytes"] for name, entry in report["sent"].get("data", {}).items()})
    return buckets, sent, report["formula"]["data"]


HALF = {"enabled": True}


@pytest.mark.parametrize("kind", ["OneBitAdam", "ZeroOneAdam"])
def test_bytes_are_a_sixteenth_of_fp16s(ranks: Any, kind: str) -> None:
    n = 4
    for buckets, sent, formula in ranks(n, counted, kind):
        numel = sum(size for size, _ in buckets)
        in_half = 2 * 2 * numel * (n - 1) / n  # an all-reduce of fp16
        assert formula == 2 * in_half  # and what plain Adam sends, in fp32
        for number, step_sent in enumerate(sent, start=1):
            summed = number <= FREEZE if kind == "OneBitAdam" else number in (1, 2, 4)
            small = step_sent.pop("all_reduce", 0.0)
            if summed:
                assert small >= 2 * in_half and not step_sent
            elif kind == "ZeroOneAdam" and number in (10, 11, 13):
                assert not step_sent  # between meetings
            else:
                # Behind the sixteenth: 4 bytes a chunk, at most the parameters of a bucket in each part, and a cut.
                overhead = 2 * (n - 1) * 4 * sum(members for _, members in buckets)
                assert in_half / 16 < sum(step_sent.values()) <= in_half / 16 + overhead
                assert small < 200  # what ranks agree on


# Checkpoints.


def interrupted(
    folder: str, kind: str, shape: tuple[int, int, int], at: int, resume: bool, to: int, **config: Any
) -> Any:
    engine = made(shape, kind, **config)
    if resume:
        step(engine, 1)  # state of its own, which is forgotten
        engine.load_checkpoint(folder)
    for number in range(at + 1 if resume else 1, to + 1):
        step(engine, number)
        if number == at and not resume:
            engine.save_checkpoint(folder)
    kept = {}
    for member, master, *_ in engine.data_axis.stepper.views:
        state = {k: v.clone() if isinstance(v, Tensor) else v for k, v in engine.optimizer.state[master].items()}
        kept[member.layout.name] = (member.parameter.detach().clone(), master.detach().clone(), state)
    return kept


@pytest.mark.parametrize(
    ("kind", "at", "config"),
    [
        pytest.param("OneBitAdam", 2, {}, marks=pytest.mark.exhaustive),
        ("OneBitAdam", 7, {"bf16": HALF}),
        ("ZeroOneAdam", 8, {}),
        ("ZeroOneAdam", 11, {"bf16": HALF}),  # between two meetings: replicas are apart
        ("OneBitLamb", 6, {}),
    ],
)
def test_resumed_in_the_middle_it_is_bitwise_the_same(
    ranks: Any, tmp_path: Path, kind: str, at: int, config: dict[str, Any]
) -> None:
    whole = ranks(2, interrupted, str(tmp_path), kind, (1, 2, 1), at, False, STEPS, **config)
    resumed = ranks(2, interrupted, str(tmp_path), kind, (1, 2, 1), at, True, STEPS, **config)
    for mine, theirs in zip(resumed, whole, strict=True):
        for name, (parameter, master, state) in theirs.items():
            assert torch.equal(mine[name][0], parameter) and torch.equal(mine[name][1], master)
            assert mine[name][2].keys() == state.keys()
            for key, value in state.items():
                there = mine[name][2][key]
                same = torch.equal(there, value) if isinstance(value, Tensor) else there == value
                assert same, (name, key)
    if kind == "ZeroOneAdam":
        assert "moved" in whole[0]["layers.0.weight"][2]  # the run ended apart, too
        assert not torch.equal(whole[0]["layers.0.weight"][0], whole[1]["layers.0.weight"][0])


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.exhaustive), 4])
def test_on_another_number_of_replicas_what_is_left_out_goes_on(ranks: Any, tmp_path: Path, replicas: int) -> None:
    """Errors add the same to the next mean; replicas with local updates all resume from the mean."""
    for kind, at in (("OneBitAdam", 7), ("ZeroOneAdam", 11)):
        folder = str(tmp_path / kind)
        saved = ranks(2, interrupted, folder, kind, (1, 2, 1), at, False, at)
        found = ranks(replicas, interrupted, folder, kind, (1, replicas, 1), at, True, at)
        for name, (_, _, state) in saved[0].items():
            for key in [key for key in ("worker_error", "moved", "local_avg") if key in state]:
                wanted = (saved[0][name][2][key] + saved[1][name][2][key]) / 2
                for each in found:
                    torch.testing.assert_close(each[name][2][key], wanted, rtol=1e-14, atol=1e-16)
            wanted = torch.cat([each[name][2]["server_error"] for each in saved])
            assert torch.equal(torch.cat([each[name][2]["server_error"] for each in found]), wanted)
            for key in ("exp_avg_sq", "step", "rates"):
                torch.testing.assert_close(found[0][name][2].get(key), state.get(key), rtol=0, atol=0)
            if kind == "ZeroOneAdam":
                apart = torch.stack([each[name][1] for each in saved])
                assert replicas == 1 or not torch.equal(apart[0], apart[1]) or not state["moved"].any()
                torch.testing.assert_close(found[0][name][1], apart.mean(0), rtol=1e-12, atol=1e-14)


# fp16 and bf16, overflows, parameters without gradients.


def overflowed() -> Any:
    engine = made((1, 2, 1), "OneBitAdam", fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1})
    for number in range(1, 7):
        step(engine, number)
    before = {id(p): {k: v.clone() for k, v in s.items() if isinstance(v, Tensor)} for p, s in _states(engine)}
    weights = engine.gather()
    x, y = share(7, engine.grid.data.rank, 2)
    scale = 1e5 if engine.grid.data.rank == 1 else 1.0  # one replica's gradients do not fit
    engine.train_batch(iter([(x.half(), y * scale)]))
    skipped = engine.skipped_steps
    kept = all(torch.equal(v, before[id(p)][k]) for p, s in _states(engine) for k, v in s.items() if v is not s["step"])
    step(engine, 8)
    dtypes = {v.dtype for _, s in _states(engine) for v in s.values() if isinstance(v, Tensor)}
    after = engine.gather()
    same = all(torch.equal(weights[name], after[name]) for name in weights)
    return skipped, kept, dtypes, same, engine.optimizer.steps, after


def _states(engine: Any) -> list[tuple[Any, dict[str, Any]]]:
    return list(engine.optimizer.state.items())


def test_an_overflow_leaves_errors_and_momenta_as_they_are(ranks: Any) -> None:
    for skipped, kept, dtypes, same, steps, _ in ranks(2, overflowed):
        assert skipped == 1 and kept and not same
        assert dtypes == {torch.float32} and steps == 7


class Branch(nn.Module):
    """A model with a layer that is used in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.rare, self.never = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, rare: bool) -> Tensor:
        y: Tensor = self.always(x)
        return y + self.rare(y) if rare else y


def branched(kind: str) -> Any:
    torch.manual_seed(0)
    model = Branch().double()
    optimizer = {"type": kind, "params": {"lr": 0.01, **PARAMS[kind]}}
    config = {"train_micro_batch_size_per_gpu": BATCH // 2, "optimizer": optimizer}
    grid = Grid(timeout=60)
    engine = triax.initialize(model=model, grid=grid, config=config)[0]
    seen = []
    for number in range(1, 10):
        x, y = share(number, grid.data.rank, 2)
        rare = number != 7 and (number != 5 or grid.data.rank == 1)  # on one replica, on none
        state = {key: value.clone() for key, value in engine.module_state_dict().items()}
        errors = [{k: v.clone() for k, v in s.items() if isinstance(v, Tensor)} for _, s in _states(engine)]
        engine.backward((engine(x, rare) - y).square().mean())
        engine.step()
        after = [{k: v for k, v in s.items() if isinstance(v, Tensor)} for _, s in _states(engine)]
        stood = [
            a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
            for a, b in zip(errors or after, after, strict=True)
        ]
        still = {name: torch.equal(value, engine.module_state_dict()[name]) for name, value in state.items()}
        seen.append((still, stood))
    return seen


@pytest.mark.parametrize("kind", ["OneBitAdam", "OneBitLamb"])
def test_what_has_no_gradient_on_any_replica_stands_still(ranks: Any, kind: str) -> None:
    for seen in ranks(2, branched, kind):
        for number, (still, stood) in enumerate(seen, start=1):
            assert still == {name: "never" in name or (number == 7 and "rare" in name) for name in still}
            if number == 7:
                assert sum(stood) == 4 and len(stood) == 6


# Without an engine, and where there is none.


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {"0": nn.Linear(WIDTH, 2 * WIDTH), "2": nn.Linear(2 * WIDTH, WIDTH), "4": nn.Linear(WIDTH, WIDTH)}
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers["4"](torch.tanh(self.layers["2"](torch.tanh(self.layers["0"](x)))))
        return y


def standalone(weights: dict[str, Tensor], how: str) -> Any:
    grid = Grid(timeout=60)
    model = Plain().double()
    model.load_state_dict(weights)
    options = {"lr": 0.01, "betas": (0.8, 0.95), **PARAMS["OneBitAdam"]}
    groups = grouped(model.named_parameters())
    engine: Any = None
    if how == "sharded":
        optimizer: Any = ShardedOptimizer(OneBitAdam, groups, grid, stage=0, module=model, **options)
        replicas = optimizer.backward_passes.data_axis
    else:
        config = {"train_micro_batch_size_per_gpu": BATCH // grid.data.size, "gradient_clipping": 0.4}
        engine, optimizer, *_ = triax.initialize(
            model=model, grid=grid, config=config, optimizer=OneBitAdam(groups, **options)
        )
        replicas = engine.data_axis
    trace = []
    for number in range(1, STEPS + 1):
        for group, its in enumerate(optimizer.param_groups):
            its["lr"] = rate(number, group)
        x, y = share(number, grid.data.rank, grid.data.size)
        optimizer.zero_grad()
        loss = mean_loss(model(x), y)
        if engine is not None:
            engine.backward(loss)
            engine.step()
        else:
            loss.backward()
            optimizer.clip_grad_norm_(0.4)
            optimizer.step()
        trace.append({name: p.detach().clone() for name, p in model.named_parameters()})
        if how == "sharded" and number == 6:
            saved = optimizer.state_dict()
            optimizer = ShardedOptimizer(OneBitAdam, groups, grid, stage=0, module=model, **options)
            optimizer.load_state_dict(saved)
    return trace, chunks(replicas, grid)


@pytest.mark.parametrize("how", ["sharded", "an instance"])
def test_in_a_plain_loop_it_is_the_same(ranks: Any, how: str) -> None:
    model = PipelineModule(layers(Grid()), loss_fn=mean_loss).double()
    start = {name: p.detach() for name, p in model.named_parameters()}
    found = ranks(2, standalone, start, how)
    wanted = Reference("OneBitAdam", 2, found[0][1], True, 0.4).run()
    for trace, _ in found:
        compare(trace, wanted)


def apart(resumed: bool) -> Any:
    """A plain loop of 0/1 Adam, made again and loaded between two synchronizations, on the first replica's weights."""
    grid = Grid(timeout=60)
    torch.manual_seed(0)
    model = Plain().double()

    def made() -> Any:
        options: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95), **PARAMS["ZeroOneAdam"]}
        groups = grouped(model.named_parameters())
        return ShardedOptimizer(ZeroOneAdam, groups, grid, stage=0, module=model, **options)

    optimizer, met = made(), []
    for number in range(1, STEPS + 1):
        x, y = share(number, grid.data.rank, grid.data.size)
        optimizer.zero_grad()
        mean_loss(model(x), y).backward()
        optimizer.step()
        met.append(optimizer.inner.synchronizes(number))
        if resumed and not met[-1] and number > 7:
            saved, resumed = optimizer.state_dict(), False
            for parameter in model.parameters():
                grid.data.broadcast(parameter.data)
            optimizer = made()
            optimizer.load_state_dict(saved)
    return [p.detach().clone() for p in model.parameters()], met


def test_resumed_in_a_plain_loop_where_replicas_were_apart(ranks: Any) -> None:
    for (found, met), (wanted, _) in zip(ranks(2, apart, True), ranks(2, apart, False), strict=True):
        assert not all(met[7:])
        for mine, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, want, rtol=1e-12, atol=1e-14)


CASES: list[tuple[dict[str, Any], str]] = [
    ({"zero_optimization": {"stage": 1}}, "into flat ranges: set stage 0, or use AdamW"),
    (
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
        "sub_group_size step flat ranges: leave them out",
    ),
    ({"freeze_step": 0}, "freeze_step=0 is too small: give at least 1"),
    ({"freeze_step": 2.5}, "optimizer.params.freeze_step: give a whole number"),
    ({"amsgrad": True}, "optimizer.params.amsgrad is true, but the variance is frozen after the warmup"),
    ({"eps_inside_sqrt": True}, "optimizer.params.eps_inside_sqrt is true, but eps is added to the root"),
    ({"max_grad_norm": 1.0}, "write gradient_clipping"),
    ({"cuda_aware": "no"}, "optimizer.params.cuda_aware: give true or false"),
    ({"comm_backend_name": 1}, "optimizer.params.comm_backend_name: give a text in quotes"),
    ({"betas": [0.9, 1.0]}, "both numbers must be at least 0 and less than 1"),
    ({"coeff_beta": 0.9}, "OneBitAdam has no coeff_beta; it takes lr, freeze_step"),
]


@pytest.mark.parametrize(("given", "words"), CASES, ids=[str(given) for given, _ in CASES])
def test_refused(given: dict[str, Any], words: str) -> None:
    params = {} if "zero_optimization" in given else given
    more = given if "zero_optimization" in given else {}
    with pytest.raises(ConfigError) as error:
        read_config(
            {"train_batch_size": 4, "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, **params}}, **more}
        )
    assert words in str(error.value)


def test_what_is_idle_is_said() -> None:
    params = {"lr": 1e-3, "freeze_step": 5, "cuda_aware": False, "comm_backend_name": "nccl", "eps_inside_sqrt": False}
    notes = notes_of(read_config({"train_batch_size": 4, "optimizer": {"type": "onebitadam", "params": params}}))
    assert [note.split(":")[0] for note in notes] == [
        "optimizer.params.comm_backend_name does nothing",
        "optimizer.params.cuda_aware does nothing",
    ]


def refused_on_ranks() -> list[str]:
    said = []
    grid = Grid(1, 1, 2, timeout=60)
    model = PipelineModule(layers(grid), grid=grid, loss_fn=mean_loss)
    config = {"train_batch_size": 4, "optimizer": {"type": "OneBitLamb", "params": {"lr": 0.1}}}
    cases: list[Callable[[], Any]] = [
        lambda: triax.initialize(model=model, config=config),
        lambda: triax.initialize(
            model=nn.Linear(2, 2),
            config={"train_micro_batch_size_per_gpu": 4},
            optimizer=lambda groups: OneBitAdam(groups),
        ),
        lambda: ShardedOptimizer(OneBitAdam, nn.Linear(2, 2).parameters(), Grid(timeout=60), stage=1),
        lambda: OneBitAdam([{"params": [nn.Parameter(torch.zeros(2))], "exp_avg_mask": None}]),
        lambda: OneBitAdam([{"params": [nn.Parameter(torch.zeros(2))], "freeze_step": 7}]),
        lambda: triax.initialize(
            model=PipelineModule([LayerSpec(VocabParallelEmbedding, 7, 4, grid=grid)], grid=grid, loss_fn=mean_loss),
            config={**config, "optimizer": {"type": "OneBitAdam"}},
        ),
    ]
    for case in cases:
        try:
            case()
        except ValueError as error:
            said.append(str(error))
    return said


def test_refused_on_every_rank(ranks: Any) -> None:
    for said in ranks(2, refused_on_ranks):
        wanted = [
            "the grid's tensor axis of 2 shards tensors: make a grid of tensor 1, or use OneBitAdam",
            "a function made a OneBitAdam",
            "pass stage=0, not 1",
            "exp_avg_mask, an option of DeepSpeed",
            "freeze_step must be equal in all parameter groups",
            "needs shards of equal size on all 2 tensor ranks",
        ]
        assert len(said) == len(wanted) and all(words in text for words, text in zip(wanted, said, strict=True)), said


def tied_ends(kind: str) -> Any:
    """A weight tied between the first and the last stage, each in a bucket of its own."""
    grid = Grid(2, 2, 1, timeout=60)
    sizes = GPTConfig(
        vocab_size=9,
        max_position_embeddings=4,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    model = PipelineModule(gpt_layers(sizes), grid=grid, loss_fn=GPTLoss(grid, vocab_size=9))
    optimizer = {"type": kind, "params": {"lr": 0.01, **PARAMS[kind]}}
    settings = {"train_batch_size": 8, "gradient_accumulation_steps": 2, "optimizer": optimizer}
    engine = triax.initialize(model=model, config=settings)[0]
    generator = torch.Generator().manual_seed(grid.data.rank)
    losses = []
    for _ in range(12):
        ids = torch.randint(8, (4, 5), generator=generator)
        pairs = zip(ids[:, :-1].split(2), ids[:, 1:].split(2), strict=True)
        losses.append(engine.train_batch(iter(list(pairs))).item())
    tie = next(bucket for bucket in engine.data_axis.buckets if bucket.tie is not None)
    return losses, tie.weights.clone(), {m.layout.name for m in tie.members}


@pytest.mark.parametrize(
    "kind", ["OneBitAdam", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in list(PARAMS)[1:])]
)
def test_a_tie_stays_one_weight_on_all_its_stages(ranks: Any, kind: str) -> None:
    found = ranks(4, tied_ends, kind)
    for losses, weights, names in found:
        assert names == found[0][2] and losses == found[0][0]
        assert torch.equal(weights, found[0][1])


def written_apart() -> Any:
    """Between two synchronizations one parameter is written on every replica, and the others are not."""
    engine = made((1, 2, 1), "ZeroOneAdam", params={"lr": 0.01})
    number = 0
    while number < 7 or engine.optimizer.synchronizes(engine.optimizer.steps):
        number += 1
        step(engine, number)
    parameters = dict(engine.module.named_parameters())
    name = next(iter(parameters))
    others = {other: p.detach().clone() for other, p in parameters.items() if other != name}
    with triax.zero.gathered(parameters[name], modifier_rank=0):
        parameters[name].data.fill_(3.0)
    same = all(torch.equal(others[other], parameters[other]) for other in others)
    step(engine, number + 1)
    return parameters[name].detach().clone(), same, {other: p.detach().clone() for other, p in others.items()}


def test_a_weight_that_is_written_between_meetings_stays_written(ranks: Any) -> None:
    first, second = ranks(2, written_apart)
    assert any(not torch.equal(first[2][name], second[2][name]) for name in first[2])  # they were apart
    for weight, same, _ in (first, second):
        assert same and (weight - 3.0).abs().max() < 0.2
