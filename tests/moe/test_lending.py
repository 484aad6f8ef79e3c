"""Lent experts: ranks compute equally many tokens, with the numbers of one process, and bytes and memory by formula."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import triax
from triax.base.deferred import Deferred
from triax.engine.monitor.profiler.memory_meter import MemoryMeter
from triax.grid import Grid
from triax.grid.randomness.random import Normal, seeded
from triax.models import MixtralConfig, mixtral_layers
from triax.moe import MoE, SwiGLU, grouped
from triax.moe.experts import Experts, clamped_swiglu
from triax.moe.grouped import Groups, grouped_mlp
from triax.moe.lending import Assignment, Loan, assign
from triax.pipe.backward import SplitBackward, deferring
from triax.pipe.spec import LayerSpec
from triax.plugins.plan.layer_memory import LayerSplit
from triax.plugins.plan.memory import ModelMemory
from triax.train.sections import ExpertsSection

from support.rank_checks import float64_by_default

D, E, K, W, ROWS, T = 8, 8, 2, 4, 8, 4


# ---------------------------------------------------------------------------------------------------- the assignment


@pytest.mark.parametrize(("percent", "before"), [(30, 2.94), (50, 4.39), (80, 6.55), (95, 7.64)])
def test_ranks_compute_equally_many_tokens_at_every_skew(percent: int, before: float) -> None:
    """128 experts on 8 ranks; 4 experts of one rank get some percent of the choices (arXiv:2601.17111, section 5)."""
    choices, hot = 4 * 8 * 8192, [16, 21, 25, 31]
    others = [expert for expert in range(128) if expert not in hot]
    loads = np.zeros(128, dtype=np.int64)
    loads[hot] = choices * percent // 100 // 4
    rest = choices - loads.sum()
    loads[others] = [rest // 124 + (place < rest % 124) for place in range(124)]
    owners = loads.reshape(8, 16).sum(1)
    assert owners.max() / owners.mean() == pytest.approx(before, abs=0.005)
    shares = assign(loads, 8, 1)
    assert shares.sum(1).max() == math.ceil(choices / 8)
    assert (shares.sum(0) == loads).all() and (shares >= 0).all()


def borrowed_by(shares: Any, rank: int, own: int) -> list[int]:
    return [int(e) for e in np.flatnonzero(shares[rank]) if e // own != rank]


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_no_rank_has_more_than_the_mean_while_slots_are_free(slots: int) -> None:
    numbers = np.random.default_rng(slots)
    for _ in range(200):
        ranks, own = int(numbers.integers(1, 7)), int(numbers.integers(1, 6))
        loads = (numbers.pareto(0.7, ranks * own) * 3).astype(np.int64) % 500
        shares = assign(loads, ranks, slots)
        work, limit = shares.sum(1), math.ceil(loads.sum() / ranks)
        borrowed = [borrowed_by(shares, rank, own) for rank in range(ranks)]
        assert (shares.sum(0) == loads).all() and (shares >= 0).all()
        assert max(map(len, borrowed)) <= slots
        assert all(work[rank] <= limit for rank in range(ranks) if borrowed[rank])
        if work.max() > limit:
            assert all(len(each) == slots or work[rank] >= limit for rank, each in enumerate(borrowed))


def test_rows_of_an_assignment_equal_those_of_single_tokens() -> None:
    numbers = np.random.default_rng(0)
    for _ in range(50):
        ranks, own, slots = (int(numbers.integers(1, top)) for top in (6, 4, 4))
        counts = (numbers.pareto(0.5, (ranks, ranks * own)) * 2).astype(np.int64) % 30
        shares = assign(counts.sum(0), ranks, slots)
        wanted = np.zeros((ranks, ranks, ranks * own), dtype=np.int64)  # from, to, expert
        for expert in range(ranks * own):
            sources = np.repeat(np.arange(ranks), counts[:, expert])
            targets = np.repeat(np.arange(ranks), shares[:, expert])
            for source, target in zip(sources, targets, strict=True):
                wanted[source, target, expert] += 1
        for rank in range(ranks):
            found = Assignment(counts, rank, slots)
            assert (found.leaving == wanted[rank]).all() and (found.arriving == wanted[:, rank]).all()
            assert [sorted(each) for each in found.borrowed] == [borrowed_by(shares, r, own) for r in range(ranks)]
            experts = [*range(rank * own, (rank + 1) * own), *found.borrowed[rank]]
            assert found.lengths == shares[rank, experts].tolist()


# -------------------------------------------------------------------------------------------------- runs of an engine


class Block(nn.Module):
    """x + experts(x). For most tokens these experts are on the first rank of the expert axis."""

    def __init__(self, options: dict[str, Any], *, grid: Grid) -> None:
        super().__init__()
        place: dict[str, Any] = {"balance": "bias", "bias_rate": 1e-6, "router": "sigmoid", "init": Normal(0.4)}
        self.moe = MoE(D, E, K, grid=grid, width=W, **place, **options)
        assert self.moe.router.correction_bias is not None
        self.moe.router.correction_bias.copy_(torch.tensor([0.7, 0.6, *[0.0] * (E - 2)]))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(x)


def squares(y: Tensor, labels: Tensor) -> Tensor:
    return ((y - labels) ** 2).mean()


@float64_by_default()
def train(case: dict[str, Any], kind: str, lend: int = 0) -> dict[str, Any]:
    """Two steps: losses, gradients and weights; and the tokens that this rank's experts computed in each call."""
    axes = ("pipe", "data", "context", "tensor", "expert")
    grid = Grid(**{axis: case.get(axis, 1) for axis in axes})
    schedule = case.get("schedule", "1f1b")
    model = triax.PipelineModule(
        [LayerSpec(Block, KINDS[kind] | {"lend": lend}) for _ in range(4)],
        grid=grid,
        loss_fn=squares,
        seed=3,
        chunks=2 if schedule == "zb-v" else 1,
        activation_checkpoint_interval=case.get("recompute", 0),
    )
    config = {
        "train_batch_size": ROWS,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": case.get("stage", 0), "reduce_bucket_size": 40},
        "pipeline": {"schedule": schedule},
        "activation_checkpointing": {"granularity": case.get("granularity")},
    }
    engine, *_ = triax.initialize(model=model, config=config)
    computed: list[int] = []
    for layer in model.modules():
        if isinstance(layer, Experts):
            layer.register_forward_pre_hook(lambda _, args: computed.append(sum(args[1].lengths)))
    found: dict[str, Any] = {"losses": [], "gradients": [], "computed": computed, "expert": grid.expert.ranks}
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        x, labels = (
            torch.randn(ROWS, T, D, generator=generator, dtype=torch.float64).unflatten(0, (2, grid.data.size, -1))
            for _ in range(2)
        )
        mine = [(x[i, grid.data.rank], labels[i, grid.data.rank]) for i in range(2)]
        found["losses"].append(float(engine.train_batch(iter(mine))))
        found["gradients"].append(engine.gather("gradients"))
    return found | {"weights": engine.gather()}


KINDS: dict[str, dict[str, Any]] = {"swiglu": {}, "biased": {"bias": True, "expert": clamped_swiglu(0.3, 1.3)}}
CASES: dict[int, list[dict[str, Any]]] = {
    2: [
        {"data": 2, "expert": 2},
        {"data": 2, "expert": 2, "stage": 3},
        {"data": 2, "expert": 2, "stage": 2, "recompute": 1},
        {"data": 2, "expert": 2, "recompute": 1, "granularity": "matmul"},
    ],
    4: [
        {"pipe": 2, "data": 2, "expert": 2, "schedule": "zb-v"},
        {"pipe": 2, "data": 2, "expert": 2, "schedule": "zb-v", "stage": 3},
        {"pipe": 2, "data": 2, "expert": 2, "schedule": "zb-h1", "stage": 2, "recompute": 1},
        {"data": 4, "expert": 4, "stage": 3},
        {"data": 4, "expert": 2, "stage": 1},
    ],
}
# Numbers of those in each run: recomputation and stages 0, 2 and 3; a pipeline and groups of replicas of experts.
FEW = {2: (2, 3), 4: (1, 4)}


@float64_by_default()
def module_run(sizes: dict[str, Any], lend: int) -> dict[str, Any]:
    """Train a plain module for two steps in stage 3 of ZeRO, and return its weights."""
    grid = Grid(**sizes)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(D, D), Block({"lend": lend}, grid=grid), nn.Linear(D, D))
    options: dict[str, Any] = {"optimizer": triax.Optimizer("Adam", lr=1e-2), "zero": triax.Zero(stage=3)}
    engine = triax.Engine(model, grid=grid, batch=triax.Batch(size=ROWS, microbatches=1), **options)
    x = torch.randn(ROWS, T, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for _ in range(2):
        engine.backward(engine(x.chunk(grid.data.size)[grid.data.rank]).square().mean())
        engine.step()
    return engine.gather()


def test_a_plain_module_lends_experts_in_stage_3(ranks: Any) -> None:
    wanted = module_run({}, 0)
    for found in ranks(2, module_run, {"data": 2, "expert": 2}, 2):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)


def run(cells: list[tuple[dict[str, Any], str]]) -> list[dict[str, Any]]:
    return [train(case, kind, lend=3) for case, kind in cells]


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    return {kind: train({}, kind) for kind in KINDS}


@pytest.mark.parametrize(
    ("size", "every_kind"),
    [
        (size, every) if not every else pytest.param(size, every, marks=pytest.mark.exhaustive)
        for size, every in itertools.product(CASES, (False, True))
    ],
)
def test_lent_experts_train_as_on_one_process(
    ranks: Any, alone: dict[str, dict[str, Any]], size: int, every_kind: bool
) -> None:
    """Some grids with one kind of experts each; in the sweep every grid with every kind."""
    cells = [*itertools.product(CASES[size], KINDS)]
    if not every_kind:
        cells = [*zip([CASES[size][number] for number in FEW[size]], KINDS, strict=True)]
    every = ranks(size, run, cells, timeout=300)
    for index, (case, kind) in enumerate(cells):
        wanted = alone[kind]
        for found in (results[index] for results in every):
            what = f"{case}, {kind}"
            assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-12), what
            for got, want in zip([*found["gradients"], found["weights"]], [*wanted["gradients"], wanted["weights"]]):
                assert got.keys() == want.keys(), what
                for name, value in want.items():
                    torch.testing.assert_close(got[name], value, rtol=1e-12, atol=1e-12, msg=f"{what} {name}")
            peers = [every[rank][index]["computed"] for rank in found["expert"]]
            for calls in zip(*peers, strict=True):
                assert max(calls) == math.ceil(sum(calls) / len(peers)), what


# --------------------------------------------------------------------------------------------------------- one layer


def layer_and_tokens(grid: Grid, kind: str, lend: int, dtype: torch.dtype = torch.float64) -> tuple[MoE, Tensor]:
    """A layer whose experts 0 and 1 are hot, and this rank's tokens."""
    with seeded(1, "layer"):
        block = Block(KINDS[kind] | {"lend": lend, "dtype": dtype}, grid=grid)
    generator = torch.Generator().manual_seed(grid.rank)
    return block.moe, torch.randn(3, T, D, generator=generator, dtype=dtype).requires_grad_()


def sent_by_rank() -> dict[str, Any]:
    grid = Grid(data=4, expert=4)
    layer, x = layer_and_tokens(grid, "swiglu", 2)
    grid.traffic.clear()
    y = layer(x)
    counts, forward = grid.traffic.bytes("expert", "all_gather"), grid.traffic.bytes("expert", "all_to_all")
    y.sum().backward()
    backward = grid.traffic.bytes("expert", "all_to_all") - forward
    chosen = torch.bincount(layer.router(x).experts.flatten(), minlength=E)
    return {"chosen": chosen.numpy(), "counts": counts, "forward": forward, "backward": backward}


def test_bytes_of_lent_experts_equal_the_formula(ranks: Any) -> None:
    every = ranks(4, sent_by_rank)
    chosen = np.stack([found["chosen"] for found in every])
    plans = [Assignment(chosen, rank, 2) for rank in range(4)]
    copies = [(borrower, expert // 2) for borrower, each in enumerate(plans[0].borrowed) for expert in each]
    assert {owner for _, owner in copies} == {0} and len(copies) >= 3
    expert = 8 * (2 * W * D + D * W)
    for rank, (found, plan) in enumerate(zip(every, plans, strict=True)):
        away = plan.leaving.sum() - plan.leaving[rank].sum() + plan.arriving.sum() - plan.arriving[rank].sum()
        lent = sum(owner == rank for _, owner in copies)
        assert found["counts"] == 3 * E * 8
        assert found["forward"] == 8 * D * away + lent * expert
        assert found["backward"] == 8 * D * away + (lent + len(plan.borrowed[rank])) * expert


def memory_of_rank() -> dict[str, int]:
    """Bytes allocated beside the weights: at the peak of each pass, and between the passes."""
    grid, (hidden, width) = Grid(data=4, expert=4), (64, 96)
    first = torch.randn(2, 2 * width, hidden, dtype=torch.float64, requires_grad=True)
    last = torch.randn(2, hidden, width, dtype=torch.float64, requires_grad=True)
    x = torch.randn(2 if grid.rank == 0 else 4, hidden, dtype=torch.float64, requires_grad=True)
    borrowed = [[], [0, 1], [0, 1], [1, 0]]  # the first rank lends both of its experts to all others
    lengths = [1] * len(x)
    groups = Groups(torch.tensor(lengths), lengths, Loan(grid.expert, borrowed, 2, 2))
    meter = MemoryMeter(lambda: 0)
    with meter:
        y = grouped_mlp(x, first, last, groups, SwiGLU)
        forward, between = meter.peak, meter.live
        dy = torch.ones_like(y)
        meter.peak = 0
        y.backward(dy)
        return {"forward": forward, "between": between, "backward": meter.peak}


def test_memory_of_lent_experts_is_within_the_bound(ranks: Any) -> None:
    matrix = 8 * 64 * 96
    rows = 8 * 4 * 8 * 96  # what four rows take, at most
    expert, messages = 3 * matrix, 3 * 2 * matrix  # M, and (n - 1) M'
    for rank, found in enumerate(ranks(4, memory_of_rank)):
        copies = 2 * expert if rank else 0  # S M, of a rank that borrows
        own = 2 * expert  # the gradients of its own experts
        assert found["between"] <= rows < matrix
        assert max(copies, messages) <= found["forward"] <= copies + (0 if rank else messages) + rows
        assert own + 2 * copies <= found["backward"] <= own + 2 * copies + (0 if rank else messages) + rows


def gradients_of_rank(kind: str, way: str) -> list[list[Tensor]]:
    """Gradients without and with lent experts.

    Args:
        kind: kind of experts.
        way: ``twice``: of the squares of a gradient; ``kernel``: by torch's grouped kernel; ``frozen``: of the tokens
            and the router alone; ``split``: the gradients of weights are deferred.
    """
    grid, found = Grid(data=4, expert=4), []
    with pytest.MonkeyPatch.context() as patch:
        if way == "kernel":
            patch.setattr(grouped, "_has_kernel", lambda rows, *lengths: rows.shape[0] > 0)
        for lend in (0, 2):
            layer, x = layer_and_tokens(grid, kind, lend, torch.float32 if way == "kernel" else torch.float64)
            layer.routed.requires_grad_(way != "frozen")
            deferred = Deferred()
            with SplitBackward(deferred) if way == "split" else nullcontext():
                y = layer(x).square().sum()
            if way == "twice":
                parameters = [x, layer.routed.down]
                y = sum((each.square().sum() for each in torch.autograd.grad(y, parameters, create_graph=True)), y)
            with deferring(deferred) if way == "split" else nullcontext():
                y.backward()
            if way == "split":
                assert layer.routed.down.grad is None
                deferred.run(lambda parameter: None, lambda parameter: None)
            tensors = [x, *(each for each in layer.parameters() if each.requires_grad)]
            found.append([tensor.grad for tensor in tensors if tensor.grad is not None])
            assert len(found[-1]) == len(tensors)
    return found


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("way", ["twice", "kernel", "frozen", "split"])
def test_lent_experts_have_the_gradients_of_unlent_ones(ranks: Any, kind: str, way: str) -> None:
    for wanted, found in ranks(4, gradients_of_rank, kind, way):
        for want, got in zip(wanted, found, strict=True):
            if way == "kernel":
                torch.testing.assert_close(got, want)
            else:
                torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_a_negative_number_of_lent_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="lend=-1 is no number of experts: give 0"):
        MoE(D, E, K, grid=Grid(), lend=-1)


def test_the_training_file_lends_experts() -> None:
    section = ExpertsSection(lend=2)
    sizes: dict[str, Any] = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 8}
    layers = mixtral_layers(MixtralConfig(num_experts=4, **sizes), **section.arguments)
    model = triax.PipelineModule(layers, seed=1)
    assert [layer.lend for layer in model.modules() if isinstance(layer, MoE)] == [2, 2]
    with pytest.raises(ValueError, match="lend"):
        ExpertsSection(lend=-1)


def test_the_memory_of_a_run_counts_copies_of_experts() -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1}
    config = MixtralConfig(num_attention_heads=4, num_key_value_heads=4, num_experts=8, **sizes)
    for tensor, expert, shard in ((1, 4, False), (2, 4, True), (2, 4, False), (1, 1, False)):
        split = LayerSplit(64, 64, 1, tensor, expert, 1, 1, "none")
        memories = [ModelMemory(config, lend=lend, shard_tensor=shard).layer_memory for lend in (0, 3)]
        block = next(kind for kind, layer in enumerate(memories[0].kinds) if layer.kind == "block")
        without, found = (memory.working(block, split) for memory in memories)
        matrix = 2 * 32 * 16 // (tensor if shard else 1)  # bytes of ``down`` in bf16; ``gate_up`` has two of it
        assert found - without == (2 * 3 * 3 * matrix + (expert - 1) * 2 * matrix if expert > 1 else 0)
