"""A small model with all that the five axes share out, and its training in one cell: on one grid, in one way.

The list of layers is ``[embedding, attention, experts, attention, experts, norm, head]``, with functions in between, so
that there are 16 of them: two stages on each of 8 ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import triax
from triax.grid import Grid, Topology
from triax.grid.assemble import Shard, assemble_ranks
from triax.grid.randomness.random import Normal
from triax.models.attention import SelfAttention
from triax.models.layers import FinalRMSNorm, NextTokenLoss, TokenEmbedding
from triax.models.packed import attach, detach, valid_and_positions
from triax.models.rope import Rope
from triax.moe import MoE
from triax.pipe.spec import LayerSpec, TiedLayerSpec
from triax.tensor_parallel.embedding import VocabParallelHead
from triax.tensor_parallel.norm import RMSNorm

from support.moe_reference import reference as moe
from support.reference import attention, rms_norm, rotate, visible

VOCABULARY, WIDTH, HEADS, KV_HEADS, DIM = 37, 16, 8, 2, 2
EXPERTS, TOP_K, EXPERT_WIDTH = 8, 2, 8
ROWS, EVEN, ODD, STEPS = 16, 16, 13, 2
LR, CLIP, EPS, INIT = 1e-2, 0.3, 1e-6, Normal(0.4)
COEFFICIENTS = {"balance": 0.1, "z_loss": 0.02}
BIAS_RATE = 0.05
EXPERT_LAYERS = (4, 10)
SCHEDULES = {"1f1b": 1, "interleaved": 2, "zb-v": 2}  # and their stages per rank


@dataclass(frozen=True)
class Job:
    """What is computed: equal on every grid."""

    capacity: bool = False
    balance: str = "sequence"
    tied: bool = False
    packed: bool = False
    odd: bool = False

    @property
    def length(self) -> int:
        return ODD if self.odd else EVEN

    @property
    def options(self) -> dict[str, Any]:
        """Options of the layers of experts, with DeepSeek-V3's router where DeepSeek-V3's bias is."""
        return {
            "balance": self.balance,
            "router": "sigmoid" if self.balance == "bias" else "softmax",
            "capacity": 0.8 if self.capacity else None,
            "z_loss": COEFFICIENTS["z_loss"],
        }


@dataclass(frozen=True)
class Place:
    """On which grid it is computed, and how."""

    pipe: int = 1
    data: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    kind: str = "ring"
    stage: int = 0
    schedule: str = "1f1b"
    sequence_parallel: bool = False
    shard_tensor: bool = False
    microbatches: int = 1  # of each replica
    shard_size: int | None = None  # replicas that shard among themselves
    lend: int = 0

    @property
    def grid(self) -> tuple[int, ...]:
        return self.pipe, self.data, self.context, self.tensor, self.expert

    @property
    def ranks(self) -> int:
        return self.pipe * self.data * self.context * self.tensor


class Attend(nn.Module):
    """x + attention(norm(x))."""

    def __init__(self, place: Place, *, grid: Grid) -> None:
        super().__init__()
        common: dict[str, Any] = {"grid": grid, "sequence_parallel": place.sequence_parallel}
        heads: dict[str, Any] = {"head_dim": DIM, "kv_heads": KV_HEADS, "rope": Rope(DIM), "kind": place.kind}
        self.norm = RMSNorm(WIDTH, EPS, **common)
        self.attention = SelfAttention(WIDTH, HEADS, **heads, init=INIT, out_init=INIT, **common)

    def forward(self, x: Any) -> Any:
        x, documents = detach(x)
        return attach(x + self.attention(self.norm(x), documents), documents)


class Mix(nn.Module):
    """x + experts(norm(x)). In the first step two experts always have equal scores: their router's rows are 0."""

    def __init__(self, job: Job, place: Place, *, grid: Grid) -> None:
        super().__init__()
        self.grid, self.shards = grid, grid.tensor if place.sequence_parallel else None
        common: dict[str, Any] = {"grid": grid, "sequence_parallel": place.sequence_parallel}
        self.norm = RMSNorm(WIDTH, EPS, **common)
        self.moe = MoE(
            WIDTH,
            EXPERTS,
            TOP_K,
            width=EXPERT_WIDTH,
            shared_experts=1,
            shared_gate=True,
            balance_coefficient=COEFFICIENTS["balance"],
            bias_rate=BIAS_RATE,
            shard_tensor=place.shard_tensor,
            lend=place.lend,
            init=INIT,
            **common,
            **job.options,
        )
        with torch.no_grad():
            self.moe.router.weight[1:3] = 0.0

    def forward(self, x: Any) -> Any:
        x, documents = detach(x)
        held = valid_and_positions(x, self.grid.context, self.shards, documents)
        return attach(x + self.moe(self.norm(x), *held), documents)


def bend(x: Any) -> Any:
    x, documents = detach(x)
    return attach(x + 0.1 * x.sin(), documents)


def layers(job: Job, place: Place) -> list[Any]:
    common: dict[str, Any] = {"init": INIT, "sequence_parallel": place.sequence_parallel}
    ends = [
        LayerSpec(TokenEmbedding, VOCABULARY, WIDTH, **common),
        LayerSpec(VocabParallelHead, WIDTH, VOCABULARY, **common),
    ]
    if job.tied:
        tie: Any = ("embed", TokenEmbedding, VOCABULARY, WIDTH)
        ends = [TiedLayerSpec(*tie, **common), TiedLayerSpec(*tie, **common, forward_fn=TokenEmbedding.attend)]
    attend, mix = LayerSpec(Attend, place), LayerSpec(Mix, job, place)
    norm = LayerSpec(FinalRMSNorm, WIDTH, EPS, sequence_parallel=place.sequence_parallel)
    return [ends[0], attend, bend, bend, mix, bend, bend, attend, bend, bend, mix, bend, bend, bend, norm, ends[1]]


@cache
def batch(job: Job, step: int) -> tuple[Any, Tensor]:
    """The global batch of a step: rows with unlike numbers of labels that count, one of them none at all."""
    generator = torch.Generator().manual_seed(7 + step)
    ids, labels = torch.randint(VOCABULARY, (2, ROWS, job.length), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    labels[5] = -100
    documents = (torch.rand(ids.shape, generator=generator) < 0.2).long().cumsum(1)
    return ((ids, documents) if job.packed else ids), labels


def microbatches(job: Job, place: Place, grid: Grid, step: int) -> Iterator[tuple[Any, Tensor]]:
    inputs, labels = batch(job, step)
    each = ROWS // place.data // place.microbatches
    for first in range(
        grid.data.rank * each * place.microbatches, (grid.data.rank + 1) * each * place.microbatches, each
    ):
        rows = slice(first, first + each)
        yield (tuple(part[rows] for part in inputs) if job.packed else inputs[rows]), labels[rows]


@dataclass
class Found:
    """Values of the training, of which a rank holds its own parts of whole tensors."""

    initial: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Any] = field(default_factory=dict)
    gradients: list[dict[str, Any]] = field(default_factory=list)  # of each step, divided and clipped
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    auxiliary: list[dict[str, float]] = field(default_factory=list)
    loads: list[dict[str, list[int]]] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)  # the selection's bias, the loads of the step before
    drifted: list[str] = field(default_factory=list)  # parameters that are not bitwise equal on all their replicas


def train(job: Job, place: Place, grid: Grid | None = None, settings: dict[str, Any] | None = None) -> Found:
    """Train for two steps, on one rank. ``settings`` are added to the configuration."""
    grid = make_grid(place) if grid is None else grid
    chunks = SCHEDULES[place.schedule]
    model = triax.PipelineModule(
        layers(job, place),
        grid=grid,
        loss_fn=NextTokenLoss(grid, VOCABULARY),
        seed=3,
        dtype=torch.float64,
        chunks=chunks,
        placement="v" if place.schedule == "zb-v" else "loop",
    )
    config = {
        "train_batch_size": ROWS,
        "gradient_accumulation_steps": place.microbatches,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1}},
        "gradient_clipping": CLIP,
        "zero_optimization": {
            "stage": place.stage,
            "reduce_bucket_size": 1500,
            "mics_shard_size": -1 if place.shard_size is None else place.shard_size,
        },
        "pipeline": {"schedule": place.schedule},
        **(settings or {}),
    }
    engine, *_ = triax.initialize(model=model, config=config)
    found = Found(initial=held(engine, "weights"))
    for step in range(STEPS):
        found.losses.append(float(engine.train_batch(microbatches(job, place, grid, step))))
        norm = engine.get_global_grad_norm()
        assert norm is not None
        found.norms.append(norm)
        found.gradients.append(held(engine, "gradients"))
        found.auxiliary.append(dict(engine.auxiliary_losses()))
        found.loads.append(dict(engine.expert_loads()))
    found.weights = held(engine, "weights")
    found.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    found.drifted = drifted(engine)
    return found


def make_grid(place: Place) -> Grid:
    return triax.Grid(place.pipe, place.data, place.tensor, context=place.context, expert=place.expert, timeout=60)


def held(engine: Any, what: str) -> dict[str, Shard]:
    """Parts that this rank holds as their first replica, with only the last stage of a tie left out."""
    grid = engine.grid
    return {
        name: (layout, part.clone())
        for name, (layout, part) in engine.shards(what).items()
        if grid.axis(layout.replicas).is_first
    }


def drifted(engine: Any) -> list[str]:
    """Names of parameters that differ from those of another replica, or of another stage with the same tie."""
    found = []
    with engine.whole_weights():
        placed = list(engine.module.local_parameters())
        for name in ("data_context", "expert_data"):
            mine = [p for p in placed if p.layout.replicas == name]
            found += _unequal(engine.grid.axis(name), mine)
        for tie in sorted({p.tie for p in placed if p.tie is not None}):  # the same order on every rank
            found += _unequal(engine.module.tie_axes[tie], [p for p in placed if p.tie == tie])
        # Over tensor the last bits may differ: shards may be uneven, and sums over replicas then in another order.
        found += _unequal(engine.grid.tensor, [p for p in placed if not p.layout.sharded], 1e-12)
    return found


def _unequal(axis: Any, placed: Sequence[Any], bound: float = 0.0) -> list[str]:
    if not placed or axis is None or axis.size == 1:
        return []
    mine = torch.cat([p.parameter.detach().flatten() for p in placed])
    extremes = torch.cat([mine, -mine])  # the largest and the smallest of all in one message
    axis.all_reduce(extremes, op="max")
    spread = (extremes[: len(mine)] + extremes[len(mine) :]).split([p.parameter.numel() for p in placed])
    equal = [bool(part.max() <= bound) for part in spread]  # NaN is not
    return [f"{p.layout.name} over {axis.name}" for p, same in zip(placed, equal, strict=True) if not same]


Cell = tuple[Job, Place]


def run(cells: Sequence[Cell], contexts: Sequence[AbstractContextManager[Any]] | None = None) -> list[Found]:
    """Train every cell, on each rank. Cells that follow one another on one grid share it."""
    found: list[Found] = []
    grid: Grid | None = None
    before: Place | None = None
    for index, (job, place) in enumerate(cells):
        if before is None or place.grid != before.grid:
            grid, before = make_grid(place), place
        with nullcontext() if contexts is None else contexts[index]:
            found.append(train(job, place, grid))
    return found


def whole(place: Place, everyone: Sequence[Found]) -> Found:
    """Whole tensors, from what each rank found in one cell."""
    topology = Topology(
        pipe=place.pipe,
        data=place.data,
        **({} if place.context == 1 else {"context": place.context}),
        tensor=place.tensor,
        expert=place.expert,
    )
    first = everyone[0]
    return Found(
        initial=assemble_ranks(topology, [found.initial for found in everyone]),
        weights=assemble_ranks(topology, [found.weights for found in everyone]),
        gradients=[assemble_ranks(topology, [found.gradients[step] for found in everyone]) for step in range(STEPS)],
        losses=first.losses,
        norms=first.norms,
        auxiliary=first.auxiliary,
        loads=first.loads,
        buffers={name: buffer for found in everyone for name, buffer in found.buffers.items()},
        drifted=sorted({name for found in everyone for name in found.drifted}),
    )


@cache
def alone(job: Job) -> Found:
    """One process, with one microbatch."""
    return whole(Place(), [train(job, Place())])


def differences(everyone: Sequence[Found], cell: Cell) -> list[str]:
    """Return a line for each value of a cell that differs from one process's, or between ranks."""
    job, place = cell
    found = whole(place, everyone)
    equal = ("losses", "norms", "auxiliary", "loads")
    unlike = [what for what in equal if any(getattr(each, what) != getattr(found, what) for each in everyone)]
    lines = [f"{name} has drifted" for name in found.drifted] + [f"{what} differ between ranks" for what in unlike]
    for each in everyone:
        known = {name: found.buffers[name] for name in each.buffers}
        lines += _far("buffers of a rank", each.buffers, known, 0.0)
    return lines + compare(found, alone(job))


def compare(found: Found, wanted: Found) -> list[str]:
    """Return a line for each value that differs by more than 1e-10: relative, with a floor for values near 0."""
    lines = _far("initial", found.initial, wanted.initial, 0.0)
    lines += _far("loss", dict(enumerate(found.losses)), dict(enumerate(wanted.losses)))
    lines += _far("norm", dict(enumerate(found.norms)), dict(enumerate(wanted.norms)))
    for step in range(STEPS):
        lines += _far(f"auxiliary {step}", found.auxiliary[step], wanted.auxiliary[step])
        lines += _far(f"gradients {step}", found.gradients[step], wanted.gradients[step])
        if found.loads[step] != wanted.loads[step]:
            lines.append(f"loads {step}: {found.loads[step]}, not {wanted.loads[step]}")
    return lines + _far("weights", found.weights, wanted.weights) + _far("buffers", found.buffers, wanted.buffers, 0.0)


def _far(what: str, found: dict[Any, Any], wanted: dict[Any, Any], bound: float = 1e-10) -> list[str]:
    if found.keys() != wanted.keys():
        return [f"{what}: {sorted(found.keys() ^ wanted.keys())} are on one side only"]
    lines = []
    for name, value in wanted.items():
        a, b = torch.as_tensor(found[name]), torch.as_tensor(value)
        if a.shape != b.shape:
            lines.append(f"{what} {name}: {tuple(a.shape)}, not {tuple(b.shape)}")
        elif not torch.allclose(a.double(), b.double(), rtol=bound, atol=bound / 100):
            lines.append(f"{what} {name}: differs by {(a.double() - b.double()).abs().max():.1e}")
    return lines


# ------------------------------------------------------------------------- the same in plain PyTorch


def plain(job: Job, initial: dict[str, Tensor]) -> Found:
    """The training in plain PyTorch on the whole batch, with loops over tokens."""
    weights = {name: value.clone().requires_grad_() for name, value in initial.items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=LR, weight_decay=0.1)
    found = Found(initial=initial)
    biases = {layer: torch.zeros(EXPERTS) for layer in EXPERT_LAYERS}
    past: dict[int, Tensor | None] = dict.fromkeys(EXPERT_LAYERS)
    for step in range(STEPS):
        inputs, labels = batch(job, step)
        ids, documents = inputs if job.packed else (inputs, None)
        optimizer.zero_grad()
        logits, losses, loads = _forward(job, weights, ids, documents, biases, past)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())  # mean over the labels that count
        total = loss
        for name, value in losses.items():
            total = total + COEFFICIENTS[name.rsplit(".", 1)[1]] * value / ROWS
        total.backward()
        found.losses.append(loss.item())
        found.norms.append(torch.nn.utils.clip_grad_norm_(weights.values(), CLIP).item())
        found.gradients.append({name: w.grad.clone() for name, w in weights.items() if w.grad is not None})
        found.auxiliary.append({name: value.item() / ROWS for name, value in losses.items()})
        found.loads.append({f"layers.{layer}.moe": count.tolist() for layer, count in loads.items()})
        optimizer.step()
        for layer, count in loads.items():
            past[layer] = count
            biases[layer] += BIAS_RATE * (count.float().mean() - count.float()).sign()
    found.weights = {name: value.detach() for name, value in weights.items()}
    for layer in EXPERT_LAYERS:
        if job.balance == "bias":
            found.buffers[f"layers.{layer}.moe.router.correction_bias"] = biases[layer]
        if job.balance == "batch":
            found.buffers[f"layers.{layer}.moe.past_loads"] = past[layer]  # type: ignore[assignment]
    return found


def _forward(
    job: Job,
    weights: dict[str, Tensor],
    ids: Tensor,
    documents: Tensor | None,
    biases: dict[int, Tensor],
    past: dict[int, Tensor | None],
) -> tuple[Tensor, dict[str, Tensor], dict[int, Tensor]]:
    """Return logits, the sum over samples of each auxiliary loss, and the loads of each layer of experts."""
    seen, places = visible(ids, documents)
    angles = places[..., None].float() * 1e4 ** -(torch.arange(0, DIM, 2).float() / DIM)
    turns = torch.complex(angles.cos(), angles.sin())[:, None].to(torch.complex128)
    x = F.embedding(ids, weights["layers.0.weight"])
    losses: dict[str, Tensor] = {}
    loads: dict[int, Tensor] = {}
    for layer in range(1, 14):
        w = {
            name.removeprefix(f"layers.{layer}."): v
            for name, v in weights.items()
            if name.startswith(f"layers.{layer}.")
        }
        h = rms_norm(x, w["norm.weight"], EPS) if w else x
        if "attention.q.weight" in w:
            q = F.linear(h, w["attention.q.weight"])
            k, v = F.linear(h, w["attention.kv.weight"]).chunk(2, dim=-1)
            q, k, v = (t.unflatten(-1, (-1, DIM)).transpose(1, 2) for t in (q, k, v))
            q, k = rotate(q, turns), rotate(k, turns)
            k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
            x = x + F.linear(attention(q, k, v, seen), w["attention.out.weight"])
        elif w:
            own = {name.removeprefix("moe."): value for name, value in w.items() if name.startswith("moe.")}
            bias = biases[layer] if job.balance == "bias" else None
            y, added, loads[layer] = moe(h, own, job.options, TOP_K, bias=bias, past=past[layer])
            losses |= {f"layers.{layer}.moe.{name}": value for name, value in added.items()}
            x = x + y
        else:
            x = x + 0.1 * x.sin()
    x = rms_norm(x, weights["layers.14.weight"], EPS)
    return F.linear(x, weights.get("layers.15.weight", weights["layers.0.weight"])), losses, loads
