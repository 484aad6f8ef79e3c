"""LAMB and Muon over shards: against the paper's formula and torch.optim.Muon in one process, in float64."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, PipelineModule
from triax.base.errors import ConfigError
from triax.engine.optim.layerwise import Lamb, Muon, muon_groups, newton_schulz, split_for_muon
from triax.moe import ModuleMoE
from triax.plugins.gradient_compression.onebit.lamb import OneBitLamb
from triax.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from triax.zero import ShardedOptimizer

from support.toys import mean_loss

EXHAUSTIVE = pytest.mark.exhaustive
WIDTH, INNER, WORDS, BATCH, STEPS = 6, 8, 11, 8, 3
LAMB: dict[str, Any] = {"lr": 0.05, "betas": [0.8, 0.95], "weight_decay": 0.1, "max_coeff": 3.0, "min_coeff": 0.3}
MUON = {"muon_lr": 0.05, "adam_lr": 0.01, "weight_decay": 0.1, "betas": [0.8, 0.95], "ns_dtype": "float64"}
PARAMS = {"Lamb": LAMB, "Muon": MUON}
Weights = dict[str, Tensor]


def layers(grid: Grid) -> list[Any]:
    """an embedding of rows that the tensor axis does not divide, two sharded linears, and a replicated one."""
    words = LayerSpec(VocabParallelEmbedding, WORDS, WIDTH, grid=grid)
    across = LayerSpec(ColumnParallelLinear, WIDTH, INNER, grid=grid)
    back = LayerSpec(RowParallelLinear, INNER, WIDTH, grid=grid)
    return [words, across, torch.tanh, back, torch.tanh, LayerSpec(nn.Linear, WIDTH, WIDTH)]


def plain() -> nn.Module:
    linears = [nn.Linear(WIDTH, INNER), nn.Tanh(), nn.Linear(INNER, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *linears).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(WORDS, (BATCH,), generator=generator), torch.randn(
        BATCH, WIDTH, generator=generator, dtype=torch.float64
    )


def made(shape: tuple[int, int, int], kind: str, stage: int, zero: dict[str, Any] | None = None, **config: Any) -> Any:
    grid = Grid(*shape, timeout=60)
    model = PipelineModule(layers(grid), grid=grid, loss_fn=mean_loss, dtype=torch.float64, partition="uniform")
    settings = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": kind, "params": PARAMS[kind]},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 60, **(zero or {})},
        **config,
    }
    return triax.initialize(model=model, config=settings)[0]


def step(engine: Any, number: int) -> None:
    x, y = batch(number)
    share, rank = BATCH // engine.grid.data.size, engine.grid.data.rank
    mine = slice(rank * share, (rank + 1) * share)
    engine.train_batch(iter(zip(x[mine].split(2), y[mine].split(2), strict=True)))


OFFLOADS: list[dict[str, Any]] = [{}, {"offload_optimizer": {"device": "cpu"}}, {"sub_group_size": 50}]


def trained(shape: tuple[int, int, int], kind: str, stage: int) -> tuple[Weights, list[Weights]]:
    """Train with each of OFFLOADS; return the initial weights, and those after the steps."""
    engines = [made(shape, kind, stage, zero) for zero in OFFLOADS]
    before = engines[0].gather()
    for number in range(STEPS):
        for engine in engines:
            step(engine, number)
    return before, [engine.gather() for engine in engines]


def lamb(weights: Weights, gradients: Weights, state: dict[str, Any], number: int) -> None:
    """You et al. 2020, algorithm 2, a whole tensor at a time."""
    first, second = LAMB["betas"]
    for name, w in weights.items():
        g = gradients[name]
        m = state[f"{name} m"] = first * state.get(f"{name} m", 0) + (1 - first) * g
        v = state[f"{name} v"] = second * state.get(f"{name} v", 0) + (1 - second) * g * g
        r = m / (1 - first**number) / ((v / (1 - second**number)).sqrt() + 1e-8) + 0.1 * w
        coefficient = 1.0 if w.norm() == 0 or r.norm() == 0 else float((w.norm() / r.norm()).clamp(0.3, 3.0))
        weights[name] = w - 0.05 * coefficient * r


def reference(before: Weights, kind: str, monkeypatch: pytest.MonkeyPatch) -> Weights:
    model = plain()
    names = dict(zip(before, model.parameters(), strict=True))
    for name, parameter in names.items():
        parameter.data.copy_(before[name])
    state: dict[str, Any] = {}
    optimizers: list[torch.optim.Optimizer] = []
    if kind == "Muon":  # torch computes in bfloat16 only
        monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())
        matrices = [p for p in list(model.parameters())[1:] if p.dim() == 2]
        others = [p for p in model.parameters() if all(p is not m for m in matrices)]
        optimizers = [
            torch.optim.Muon(matrices, lr=0.05, weight_decay=0.1),
            torch.optim.AdamW(others, lr=0.01, betas=(0.8, 0.95), weight_decay=0.1),
        ]
    for number in range(STEPS):
        model.zero_grad()
        x, y = batch(number)
        mean_loss(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
        if kind == "Lamb":
            weights = {name: p.detach() for name, p in names.items()}
            lamb(weights, {n: p.grad for n, p in names.items() if p.grad is not None}, state, number + 1)
            for name, p in names.items():
                p.data = weights[name]
    return {name: p.detach() for name, p in names.items()}


FIRST = [((1, 1, 1), 0), ((1, 2, 2), 2)]
REST = [
    (shape, stage)
    for shape in itertools.product((1, 2), (1, 2, 4), (1, 2))
    for stage in range(4)
    if math.prod(shape) <= 4 and (shape, stage) not in FIRST
]


@pytest.mark.parametrize("kind", ["Lamb", "Muon"])
@pytest.mark.parametrize(("shape", "stage"), [*FIRST, *(pytest.param(*cell, marks=EXHAUSTIVE) for cell in REST)])
def test_sharded_lamb_and_muon_step_as_one_process(
    ranks: Any, kind: str, shape: tuple[int, int, int], stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = ranks(math.prod(shape), trained, shape, kind, stage)
    wanted = reference(results[0][0], kind, monkeypatch)
    for found in (weights for _, of_engines in results for weights in of_engines):
        for name, weight in wanted.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-10, atol=1e-12)


EXPERTS = 4


class Mixture(nn.Module):
    """x + mixture(x) of experts with matrices and biases, each expert with weights of another size."""

    def __init__(self, *, grid: Grid) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(WIDTH, INNER), nn.Tanh(), nn.Linear(INNER, WIDTH))
        self.moe = ModuleMoE(grid, WIDTH, expert, EXPERTS, top_k=2)
        here = EXPERTS // grid.expert.size
        mine = slice(grid.expert.rank * here, (grid.expert.rank + 1) * here)
        for number, parameter in enumerate(self.moe.experts.parameters()):
            drawn = torch.randn(EXPERTS, *parameter.shape[1:], generator=torch.Generator().manual_seed(number))
            sizes = torch.arange(1, EXPERTS + 1).view(-1, *[1] * (parameter.dim() - 1))
            parameter.data = (0.2 * drawn * sizes)[mine].to(parameter.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(x)[0]


def mixture(x: Tensor, weights: dict[str, list[Tensor]], prefix: str) -> Tensor:
    """``Mixture`` in plain PyTorch, of one parameter for each expert."""
    scores = (x @ weights[f"{prefix}gate.weight"][0].T).softmax(-1)
    best, chosen = scores.topk(2, dim=-1)
    shares = torch.zeros_like(scores).scatter(1, chosen, best / best.sum(-1, keepdim=True))
    linears = (f"{prefix}experts.0", f"{prefix}experts.2")
    y = torch.zeros_like(x)
    for number in range(EXPERTS):
        (w1, b1), (w2, b2) = ((weights[f"{n}_weight"][number], weights[f"{n}_bias"][number]) for n in linears)
        y = y + shares[:, number : number + 1] * ((x @ w1.T + b1).tanh() @ w2.T + b2)
    return x + y


def engine_of_experts(axes: dict[str, int], kind: str, stage: int) -> Any:
    sizes: Any = {"data": 1, **axes}
    grid = Grid(**sizes, timeout=60)
    model = PipelineModule(
        [LayerSpec(Mixture, grid=grid)] * 2, grid=grid, loss_fn=mean_loss, dtype=torch.float64, seed=5
    )
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": kind, "params": EXPERT_PARAMS[kind]},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 60},
    }
    return triax.initialize(model=model, config=config)[0]


def step_experts(engine: Any, number: int) -> None:
    y, data = batch(number)[1], engine.grid.data
    engine.train_batch(iter([(part, part.sin()) for part in y.chunk(data.size)[data.rank].split(2)]))


def trained_experts(cells: list[tuple[dict[str, int], str, int]]) -> list[tuple[Weights, Weights]]:
    found = []
    for cell in cells:
        engine = engine_of_experts(*cell)
        before = engine.gather()
        for number in range(STEPS):
            step_experts(engine, number)
        found.append((before, engine.gather()))
    return found


EXPERT_PARAMS = {**PARAMS, "OneBitLamb": {"lr": 0.05, "betas": [0.8, 0.95], "weight_decay": 0.1, "freeze_step": 2}}


def reference_of_experts(before: Weights, kind: str, monkeypatch: pytest.MonkeyPatch, steps: int = STEPS) -> Weights:
    """Return the weights after steps in plain PyTorch, with a parameter of its own for each expert."""
    weights: dict[str, list[Tensor]] = {
        name: [nn.Parameter(w.clone()) for w in (whole if ".experts." in name else [whole])]
        for name, whole in before.items()
    }
    every = {f"{name} {number}": p for name, each in weights.items() for number, p in enumerate(each)}
    optimizers: list[torch.optim.Optimizer] = []
    if kind == "Muon":  # torch computes in bfloat16 only
        monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())
        optimizers = [
            torch.optim.Muon([p for p in every.values() if p.dim() == 2], lr=0.05, weight_decay=0.1),
            torch.optim.AdamW([p for p in every.values() if p.dim() < 2], lr=0.01, betas=(0.8, 0.95), weight_decay=0.1),
        ]
    if kind == "OneBitLamb":  # its equations: tests/plugins/gradient_compression/test_onebit.py
        optimizers = [OneBitLamb(every.values(), **{**EXPERT_PARAMS[kind], "betas": (0.8, 0.95)})]
    state: dict[str, Any] = {}
    for number in range(steps):
        x = batch(number)[1]
        y = x
        for layer in range(2):
            y = mixture(y, weights, f"layers.{layer}.moe.")
        mean_loss(y, x.sin()).backward()
        for optimizer in optimizers:
            optimizer.step()
        if kind == "Lamb":
            values = {name: p.detach() for name, p in every.items()}
            lamb(values, {name: p.grad for name, p in every.items() if p.grad is not None}, state, number + 1)
            for name, p in every.items():
                p.data = values[name]
        for p in every.values():
            p.grad = None
    return {
        name: torch.stack([p.detach() for p in each]) if ".experts." in name else each[0].detach()
        for name, each in weights.items()
    }


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=EXHAUSTIVE) for size in (1, 4))])
def test_each_expert_steps_as_a_layer_of_its_own(ranks: Any, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """LAMB's coefficients and Muon's matrices are those of a model with one parameter for each expert."""
    cells: Any = {
        1: [({}, kind, 0) for kind in EXPERT_PARAMS],
        2: [
            (axes, kind, stage)
            for kind in PARAMS
            for axes, stage in (({"data": 2, "expert": 2}, 1), ({"data": 2}, 3), ({"pipe": 2}, 0), ({"tensor": 2}, 2))
        ],
        4: [({"data": 4, "expert": 2}, kind, stage) for kind in PARAMS for stage in range(4)],
    }[size]
    every = ranks(size, trained_experts, cells, timeout=120)
    for number, (axes, kind, stage) in enumerate(cells):
        with monkeypatch.context() as patch:
            wanted = reference_of_experts(every[0][number][0], kind, patch)
        for found in every:
            for name, weight in wanted.items():
                torch.testing.assert_close(
                    found[number][1][name], weight, rtol=1e-10, atol=1e-12, msg=f"{axes} {kind} {stage} {name}"
                )


def test_a_checkpoint_has_the_coefficient_of_each_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1-bit LAMB goes on with the coefficients of its first two steps; after a resume they come from the checkpoint."""
    engine = engine_of_experts({}, "OneBitLamb", 0)
    wanted = reference_of_experts(engine.gather(), "OneBitLamb", monkeypatch, steps=4)
    for number in range(3):
        step_experts(engine, number)
    engine.save_checkpoint(tmp_path)
    loaded = engine_of_experts({}, "OneBitLamb", 0)
    loaded.load_checkpoint(tmp_path)
    step_experts(loaded, 3)
    torch.testing.assert_close(loaded.gather(), wanted, rtol=1e-10, atol=1e-12)


def test_adafactor_refuses_experts_that_share_one_scale() -> None:
    grid = Grid(timeout=60)
    model = PipelineModule([LayerSpec(Mixture, grid=grid)], grid=grid, loss_fn=mean_loss)
    config = {"train_batch_size": 2, "optimizer": {"type": "Adafactor", "params": {"lr": 0.1}}}
    with pytest.raises(
        ConfigError, match=r"layers\.0\.moe\.\S+ of shape \[4.*\] holds 4 experts, which would share one"
    ):
        triax.initialize(model=model, config=config)


def resumed(
    folder: str, shape: tuple[int, int, int], kind: str, stage: int, zero: dict[str, Any] | None = None
) -> Weights:
    """Weights after all steps, of which a checkpoint in ``folder`` has the first two, if it is there."""
    engine = made(shape, kind, stage, zero)
    if engine.load_checkpoint(folder)[0] is None:
        for number in range(2):
            step(engine, number)
        engine.save_checkpoint(folder)
    for number in range(2, STEPS):
        step(engine, number)
    found: Weights = engine.gather()
    return found


@EXHAUSTIVE
@pytest.mark.parametrize("kind", ["Lamb", "Muon"])
def test_lamb_and_muon_resume_on_another_grid(ranks: Any, kind: str, tmp_path: Path) -> None:
    [first, *_] = ranks(4, resumed, str(tmp_path), (1, 4, 1), kind, 2)
    for zero in OFFLOADS:
        for found in ranks(4, resumed, str(tmp_path), (2, 1, 2), kind, 1, zero):
            torch.testing.assert_close(found, first, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (5, 5)])
def test_muon_in_bfloat16_equals_torchs_bitwise(shape: tuple[int, int]) -> None:
    start, gradient = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    mine, its = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    for optimizer in (Muon([mine], lr=0.1, weight_decay=0.1), torch.optim.Muon([its], lr=0.1, weight_decay=0.1)):
        for factor in (1.0, 0.5, -2.0):
            mine.grad = its.grad = gradient * factor
            optimizer.step()
    assert torch.equal(mine, its)


def test_newton_schulz_takes_stacks_and_filters_as_matrices() -> None:
    stack = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = newton_schulz(stack, (3.4445, -4.775, 2.0315), 5, 1e-7)
    for one, each in zip(whole, stack, strict=True):
        torch.testing.assert_close(one, newton_schulz(each, (3.4445, -4.775, 2.0315), 5, 1e-7))
        assert ((torch.linalg.svdvals(one) - 0.9).abs() < 0.4).all()
    filters, flat = (nn.Parameter(torch.ones(4, 2, 3, 3)), nn.Parameter(torch.ones(4, 18)))
    filters.grad = torch.randn(4, 2, 3, 3)
    flat.grad = filters.grad.view(4, 18)
    for parameter in (filters, flat):
        Muon([parameter], lr=0.1).step()
    assert torch.equal(filters.view(4, 18), flat)


def test_muon_takes_hidden_matrices_and_adamw_the_rest() -> None:
    """The choice between Muon and AdamW: by dims, by names, by classes, by ties, and by the user."""
    model = nn.ModuleDict(
        {
            "wte": nn.Embedding(5, 4),
            "hidden": nn.Linear(4, 4),
            "attention": nn.MultiheadAttention(4, 2),
            "lm_head": nn.Linear(4, 5),
            "tied": nn.Linear(4, 5, bias=False),
            "chosen": nn.Linear(4, 4, bias=False),
        }
    )
    model["tied"].weight = model["wte"].weight
    setattr(model["chosen"].weight, "use_muon", False)  # noqa: B010  # a Parameter does not declare it
    [(options, hidden), (_, rest)] = split_for_muon(model, [({"lr": 0.5}, list(model.parameters()))])
    names = {p: name for name, p in model.named_parameters()}
    assert options == {"use_muon": True, "lr": 0.5}
    wanted = ["hidden.weight", "attention.in_proj_weight", "attention.out_proj.weight"]
    assert [names[p] for p in hidden] == wanted and len(rest) == len(names) - 3
    groups = Muon(muon_groups(model), muon_lr=0.2, adam_lr=0.3).param_groups
    assert [(group["use_muon"], group["lr"]) for group in groups] == [(True, 0.2), (False, 0.3)]


def in_a_plain_loop(kind: str, stage: int) -> list[Tensor]:
    grid = Grid(data=2 if stage else 1, timeout=60)
    torch.manual_seed(3)
    model = plain()
    given: Any = muon_groups(model) if kind == "Muon" else model.parameters()
    own: Any = {"lr": 0.05, "ns_dtype": "float64"} if kind == "Muon" else {"lr": 0.05}
    cls: Any = Muon if kind == "Muon" else Lamb
    if stage:
        optimizer: Any = ShardedOptimizer(cls, given, grid, stage=stage, module=model, bucket_size=60, **own)
    else:
        optimizer = cls(given, **own)
    for number in range(STEPS):
        x, y = batch(number)
        mine = slice(grid.data.rank, None, grid.data.size) if stage else slice(None)
        optimizer.zero_grad()
        mean_loss(model(x[mine]), y[mine]).backward()
        optimizer.step()
    with triax.zero.gathered(model) if stage else nullcontext():
        return [p.detach().clone() for p in model.parameters()]


@EXHAUSTIVE
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", ["Lamb", "Muon"])
def test_layerwise_optimizers_shard_in_a_plain_loop(ranks: Any, kind: str, stage: int) -> None:
    wanted = in_a_plain_loop(kind, 0)
    for found in ranks(2, in_a_plain_loop, kind, stage):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_a_torch_muon_instance_steps_as_torch_in_stage_2() -> None:
    model = nn.Linear(4, 4, bias=False)
    its = nn.Parameter(model.weight.detach().clone())
    x = torch.randn(3, 4)
    config = {"train_batch_size": 3, "zero_optimization": {"stage": 2}}
    own = torch.optim.Muon(model.parameters(), lr=0.1, eps=1e-5)
    engine = triax.initialize(model=model, optimizer=own, config=config)[0]
    engine.backward((engine(x) ** 2).mean())
    engine.step()
    optimizer = torch.optim.Muon([its], lr=0.1, eps=1e-5)
    ((x @ its.T) ** 2).mean().backward()
    optimizer.step()
    assert torch.equal(model.weight, its)
