"""1-bit optimizers by their papers' equations, and engines that step with them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, PipelineModule
from triax.grid.assemble import assemble
from triax.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from support.toys import mean_loss

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


HALF = {"enabled": True}
